"""Rules that look at hidden states: contrastive search and AutoDeco."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch

from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.mechanisms.sampling_claims import repetition
from anydecode.evaluation.mechanisms.sampling_oracles import random_heads
from anydecode.evaluation.samplers import Toy, World, softmax
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.autodeco import Heads, figures
from anydecode.training.autodeco import Gain, Learner, Recipe, Rows, soft_nucleus, train
from anydecode.training.autodeco import measure as held_out_gain

PROMPTS = ("ab", "the cat sat on the cat", "0101")


def contrastive_oracle(
    model: Toy, prompt: list[int], length: int, k: int, alpha: float
) -> list[int]:
    """The rule with every state of every candidate recomputed from the first token."""

    def unit(text: list[int]) -> np.ndarray:
        state = World(model, text).state(())
        length_one: np.ndarray = state / np.linalg.norm(state)
        return length_one

    text = list(prompt)
    held = [unit(text[: position + 1]) for position in range(len(text))]
    for _ in range(length):
        p = softmax(World(model, text).logits(()))
        worth = {}
        for token in sorted(range(len(p)), key=lambda token: (-p[token], token))[:k]:
            state = unit([*text, token])
            repeats = max(float(state @ other) for other in held)
            worth[token] = (1 - alpha) * p[token] - alpha * repeats
        text.append(max(worth, key=lambda token: worth[token]))
        held.append(unit(text))
    return text[len(prompt) :]


@mechanism("contrastive-search")
def contrastive_search() -> Iterator[Check]:
    """The text of the oracle; greedy decoding where nothing contrasts; one pass per token."""
    model = Toy(seed=5)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        options = {"max_tokens": 14, "ignore_eos": True}
        for k, alpha in ((4, 0.6), (3, 0.3), (6, 0.9)):
            decoder = f"contrastive-search:k={k},alpha={alpha}"
            found = [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in PROMPTS]
            exact = [contrastive_oracle(model, list(p.encode()), 14, k, alpha) for p in PROMPTS]
            yield Check(f"k={k}, alpha={alpha} equals the oracle", found == exact)
        changed = found
        greedy = [
            llm.generate(prompt, decoder="autoregressive", **options).tokens for prompt in PROMPTS
        ]
        for decoder in ("contrastive-search:alpha=0", "contrastive-search:k=1"):
            found = [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in PROMPTS]
            yield Check(f"{decoder} is greedy decoding", found == greedy)
        yield Check(
            "it changes the text", all(a != b for a, b in zip(changed, greedy, strict=True))
        )
        answer = llm.generate(PROMPTS[0], decoder="contrastive-search", **options)
        passes = answer.stats.passes
        yield Check("one pass per token, two for the prompt", passes == 16, f"{passes} passes")
        ended = llm.generate(PROMPTS[0], decoder="contrastive-search", logit_bias={EOS: 40.0})
        yield Check("it ends where the model does", ended.finish_reason == "stop")
    plain = repetition(Reflecting(), 60)
    yield Check("greedy decoding walks in circles", plain > 0.9, f"{plain:.2f} of 4-grams repeat")


class Reflecting(ScriptedModel):
    """Greedy text goes round in a circle, with other tokens close; a state is the sum of the last
    tokens' embeddings, the latest most, so that repeated words have the same states."""

    def __init__(self) -> None:
        super().__init__(self._circle, 40)
        self._embeddings = np.random.default_rng(3).normal(size=(40, 16))

    @staticmethod
    def _circle(seen: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng(seen[-1]).normal(0, 0.6, 40)
        row[(seen[-1] + 1) % 5] += 2.5
        return row

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[n, 16]`."""
        rows = []
        for _, _, high, low in hidden.tolist():
            seen, _ = self._paths[int(high) << 24 | int(low)]
            last = np.array(seen[-3:][::-1])
            weights = 0.5 ** np.arange(len(last))
            rows.append(weights @ self._embeddings[last])
        return torch.from_numpy(np.array(rows, np.float32))


@measure("contrastive-search", "4-grams that repeat", samples=60, margin=0.1)
def contrastive_claim(samples: int) -> float:
    """Text whose states repeat is avoided."""
    return repetition(Reflecting(), samples, decoder="contrastive-search")


class Mixed:
    """Stands for a model: the first number of a state tells which of two kinds of text it is in,
    the others which of 20 tokens are likely."""

    vocab_size = 20

    def __init__(self) -> None:
        drawn = np.random.default_rng(7).normal(0, 2.0, (6, self.vocab_size))
        self._head = torch.from_numpy(drawn).float()

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """float32 `[n, 20]`."""
        return states[:, 1:] @ self._head

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return states

    def rows(self, count: int, seed: int) -> Rows:
        """Tokens said at temperature 0.4 in one kind of text and at 1.6 in the other."""
        generator = torch.Generator().manual_seed(seed)
        kind = torch.randint(0, 2, (count, 1), generator=generator).float()
        states = torch.cat([2 * kind - 1, torch.randn(count, 6, generator=generator)], 1)
        heat = 0.4 + 1.2 * kind
        p = torch.softmax(self.head(states) / heat, -1)
        labels = torch.multinomial(p, 1, generator=generator)[:, 0]
        return Rows(states, labels, torch.arange(count) // 20)


@cache
def learned(samples: int) -> tuple[Learner, Gain]:
    """Heads that have seen 3,000 tokens of `Mixed`, and their gain on others."""
    model = Mixed()
    recipe = Recipe(width=16, epochs=8, batch=64, rate=1e-2)
    learner = train(model, model.rows(3000, 1), recipe)
    return learner, held_out_gain(model, model.rows(samples, 2), learner)


@mechanism("autodeco")
def autodeco() -> Iterator[Check]:
    """The heads' numbers, the soft nucleus and the figures by hand; what is learned; files."""
    half = np.array([math.log(0.5), math.log(0.3), math.log(0.2)], np.float32)
    shown = figures(half, 1.0)
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    variance = ((0.5 - 1 / 3) ** 2 + (0.3 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 2
    right = np.abs(shown - np.array([1.0, 0.5, entropy, variance, 1.0])).max() < 1e-6
    yield Check("the figures of (0.5, 0.3, 0.2)", bool(right), str(shown.round(4)))
    row, every = torch.from_numpy(half).expand(3, 3), torch.arange(3)
    top_p = torch.full((3, 1), 0.6, requires_grad=True)
    log_q = soft_nucleus(row, every, top_p)
    weights = np.array([0.5, 0.3 * math.exp(-30 * 0.2), 0.2 * math.exp(-30 * 0.4)])
    found = log_q.detach().exp().numpy()
    close = np.abs(found - weights / weights.sum()).max() < 1e-5
    yield Check("the soft nucleus of 0.6", bool(close), str(found.round(5)))
    (gradient,) = torch.autograd.grad(log_q[1], top_p)
    slope = float(gradient[1])
    yield Check("its edge has a slope", slope > 0, f"d ln q / d p = {slope:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.safetensors"
        heads = random_heads()
        heads.save(path)
        state = np.array([0.3, -0.2, 0.9, 0.1], np.float32)
        again = Heads.load(path)(state, half)
    kept = np.allclose(again, heads(state, half), atol=2e-3)
    yield Check("heads come back from a file", bool(kept), f"{again}")
    learner, _ = learned(2000)
    probe = torch.zeros(2, 7)
    probe[:, 0] = torch.tensor([-1.0, 1.0])
    cool, hot = learner.temperature(probe).detach().flatten().tolist()
    told = f"{cool:.2f} and {hot:.2f}, said at 0.4 and 1.6"
    yield Check("each kind of text gets its temperature", cool < 0.8 < 1.1 < hot, told)


@measure(
    "autodeco", "nats per token against the best fixed temperature", samples=2000, margin=-0.03
)
def autodeco_claim(samples: int) -> float:
    """Heads fit held-out text better than any one temperature does (below 0: better)."""
    gain = learned(samples)[1]
    return gain.heads - gain.fixed
