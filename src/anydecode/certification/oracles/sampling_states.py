"""Oracle tests of rules that read hidden states: contrastive search and AutoDeco."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.sampling_claims import repetition
from anydecode.certification.oracles.sampling_oracles import random_heads
from anydecode.certification.samplers import OracleContext, ToyModel, softmax
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from anydecode.sampling.autodeco import Heads, features
from anydecode.training.autodeco import (
    AutoDecoRecipe,
    Gain,
    HeadsModule,
    TrainingRows,
    soft_nucleus,
    train,
)
from anydecode.training.autodeco import measure as held_out_gain

PROMPTS = ("ab", "the cat sat on the cat", "0101")


def contrastive_oracle(
    model: ToyModel, prompt: list[int], length: int, k: int, alpha: float
) -> list[int]:
    """The rule, with every candidate's state recomputed from the first token."""

    def unit(text: list[int]) -> np.ndarray:
        state = OracleContext(model, text).state(())
        length_one: np.ndarray = state / np.linalg.norm(state)
        return length_one

    text = list(prompt)
    states = [unit(text[: position + 1]) for position in range(len(text))]
    for _ in range(length):
        p = softmax(OracleContext(model, text).logits(()))
        values = {}
        for token in sorted(range(len(p)), key=lambda token: (-p[token], token))[:k]:
            state = unit([*text, token])
            repeats = max(float(state @ other) for other in states)
            values[token] = (1 - alpha) * p[token] - alpha * repeats
        text.append(max(values, key=lambda token: values[token]))
        states.append(unit(text))
    return text[len(prompt) :]


@oracle_test("contrastive-search")
def contrastive_search() -> Iterator[Check]:
    """The oracle's text; greedy decoding where there is no contrast; one pass per token."""
    model = ToyModel(seed=5)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        options: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True}
        for k, alpha in ((4, 0.6), (3, 0.3), (6, 0.9)):
            decoder = f"contrastive-search:k={k},alpha={alpha}"
            texts = [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in PROMPTS]
            exact = [contrastive_oracle(model, list(p.encode()), 14, k, alpha) for p in PROMPTS]
            yield Check(f"k={k}, alpha={alpha} equals the oracle", texts == exact)
        changed = texts
        greedy = [
            llm.generate(prompt, decoder="autoregressive", **options).tokens for prompt in PROMPTS
        ]
        for decoder in ("contrastive-search:alpha=0", "contrastive-search:k=1"):
            texts = [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in PROMPTS]
            yield Check(f"{decoder} equals greedy decoding", texts == greedy)
        yield Check(
            "contrastive search changes the text",
            all(a != b for a, b in zip(changed, greedy, strict=True)),
        )
        answer = llm.generate(PROMPTS[0], decoder="contrastive-search", **options)
        passes = answer.stats.passes
        yield Check("one pass per token, two for the prompt", passes == 16, f"{passes} passes")
        ended = llm.generate(PROMPTS[0], decoder="contrastive-search", logit_bias={EOS: 40.0})
        yield Check("ends at the model's end-of-text token", ended.finish_reason == "stop")
    plain = repetition(Reflecting(), 60)
    yield Check("greedy decoding repeats itself", plain > 0.9, f"{plain:.2f} of 4-grams repeat")


class Reflecting(ScriptedModel):
    """Greedy text is a loop, with other tokens nearly as probable. A hidden state is the sum of the
    last tokens' embeddings, with the largest weight on the latest, so that repeated words have the
    same states."""

    def __init__(self) -> None:
        super().__init__(self._circle, 40)
        self._embeddings = np.random.default_rng(3).normal(size=(40, 16))

    @staticmethod
    def _circle(seen: tuple[int, ...]) -> np.ndarray:
        row = np.random.default_rng(seen[-1]).normal(0, 0.6, 40)
        row[(seen[-1] + 1) % 5] += 2.5
        return row

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states, float32 `[n, 16]`."""
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
    """Stands in for a model: the first number of a state says which of two kinds of text it belongs
    to, the others which of 20 tokens are probable."""

    vocab_size = 20

    def __init__(self) -> None:
        drawn = np.random.default_rng(7).normal(0, 2.0, (6, self.vocab_size))
        self._head = torch.from_numpy(drawn).float()

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 `[n, 20]`."""
        return states[:, 1:] @ self._head

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The states unchanged."""
        return states

    def rows(self, count: int, seed: int) -> TrainingRows:
        """Tokens sampled at temperature 0.4 in one kind of text and at 1.6 in the other."""
        generator = torch.Generator().manual_seed(seed)
        kind = torch.randint(0, 2, (count, 1), generator=generator).float()
        states = torch.cat([2 * kind - 1, torch.randn(count, 6, generator=generator)], 1)
        temperature = 0.4 + 1.2 * kind
        p = torch.softmax(self.head(states) / temperature, -1)
        labels = torch.multinomial(p, 1, generator=generator)[:, 0]
        return TrainingRows(states, labels, torch.arange(count) // 20)


@cache
def learned(samples: int) -> tuple[HeadsModule, Gain]:
    """Heads trained on 3,000 tokens of `Mixed`, and their gain on held-out tokens."""
    model = Mixed()
    recipe = AutoDecoRecipe(width=16, epochs=8, batch=64, rate=1e-2)
    learner = train(model, model.rows(3000, 1), recipe)
    return learner, held_out_gain(model, model.rows(samples, 2), learner)


@oracle_test("autodeco")
def autodeco() -> Iterator[Check]:
    """The heads' inputs, the soft nucleus by hand, training, and files."""
    half = np.array([math.log(0.5), math.log(0.3), math.log(0.2)], np.float32)
    shown = features(half, 1.0)
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    variance = ((0.5 - 1 / 3) ** 2 + (0.3 - 1 / 3) ** 2 + (0.2 - 1 / 3) ** 2) / 2
    right = np.abs(shown - np.array([1.0, 0.5, entropy, variance, 1.0])).max() < 1e-6
    yield Check("the input features of (0.5, 0.3, 0.2)", bool(right), str(shown.round(4)))
    row, every = torch.from_numpy(half).expand(3, 3), torch.arange(3)
    top_p = torch.full((3, 1), 0.6, requires_grad=True)
    log_q = soft_nucleus(row, every, top_p)
    weights = np.array([0.5, 0.3 * math.exp(-30 * 0.2), 0.2 * math.exp(-30 * 0.4)])
    actual = log_q.detach().exp().numpy()
    close = np.abs(actual - weights / weights.sum()).max() < 1e-5
    yield Check("the soft nucleus of 0.6", bool(close), str(actual.round(5)))
    (gradient,) = torch.autograd.grad(log_q[1], top_p)
    slope = float(gradient[1])
    yield Check(
        "the edge of the soft nucleus has a gradient", slope > 0, f"d ln q / d p = {slope:.2f}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.safetensors"
        heads = random_heads()
        heads.save(path)
        state = np.array([0.3, -0.2, 0.9, 0.1], np.float32)
        again = Heads.load(path)(state, half)
    is_equal = np.allclose(again, heads(state, half), atol=2e-3)
    yield Check("saved heads can be loaded", bool(is_equal), f"{again}")
    learner, _ = learned(2000)
    probe = torch.zeros(2, 7)
    probe[:, 0] = torch.tensor([-1.0, 1.0])
    cool, hot = learner.temperature(probe).detach().flatten().tolist()
    detail = f"{cool:.2f} and {hot:.2f}, sampled at 0.4 and 1.6"
    yield Check("each kind of text gets its temperature", cool < 0.8 < 1.1 < hot, detail)


@measure(
    "autodeco", "nats per token relative to the best fixed temperature", samples=2000, margin=-0.03
)
def autodeco_claim(samples: int) -> float:
    """Heads fit held-out text better than any fixed temperature does (below 0: better)."""
    gain = learned(samples)[1]
    return gain.heads - gain.fixed
