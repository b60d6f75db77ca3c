"""Oracle test of contrastive-search (Su et al., arXiv:2202.06417): every candidate's state is
recomputed from the first token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.sampling.repetition import repetition
from anydecode.certification.samplers import OracleContext, ToyModel, softmax
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

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
        for decoder, k, alpha in (
            ("contrastive-search", 4, 0.6),
            ("contrastive-search:k=3,alpha=0.3", 3, 0.3),
            ("contrastive-search:k=6,alpha=0.9", 6, 0.9),
        ):
            texts = [llm.generate(prompt, decoder=decoder, **options).tokens for prompt in PROMPTS]
            exact = [contrastive_oracle(model, list(p.encode()), 14, k, alpha) for p in PROMPTS]
            yield Check(f"{decoder} equals the oracle", texts == exact)
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

    def normed(self, hidden: np.ndarray) -> np.ndarray:
        """The states, float32 `[n, 16]`."""
        rows = []
        for _, _, high, low in hidden.tolist():
            seen, _ = self._paths[int(high) << 24 | int(low)]
            last = np.array(seen[-3:][::-1])
            weights = 0.5 ** np.arange(len(last))
            rows.append(weights @ self._embeddings[last])
        return np.array(rows, np.float32)


@measure("contrastive-search", "4-grams that repeat", samples=60, margin=0.1)
def contrastive_claim(samples: int) -> float:
    """Text whose states repeat is avoided."""
    return repetition(Reflecting(), samples, decoder="contrastive-search")
