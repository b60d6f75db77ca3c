"""Oracle test of deal (Huang et al., arXiv:2402.06147): every token by brute force, each
continuation from the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.decoders.search.deal import Deal
from anydecode.models.scripted import ScriptedModel

PROMPT, END = [0, 1], 3
#: From the model and a text to its value.
Value = Callable[[ScriptedModel, list[int]], float]


def flat_model(seed: int) -> ScriptedModel:
    """Four tokens that are nearly equally probable, of which the last ends a text."""

    def script(seen: tuple[int, ...]) -> np.ndarray:
        row = 0.4 * np.random.default_rng([seed, *seen]).normal(size=4)
        row[END] -= 0.5
        return np.asarray(row, np.float32)

    return ScriptedModel(script, vocab_size=4)


def confidence(model: ScriptedModel, text: list[int]) -> float:
    """The geometric mean of the probabilities of the tokens."""
    rows = [log_softmax(logits_after(model, PROMPT + text[:i])) for i in range(len(text))]
    return float(np.exp(np.mean([row[token] for row, token in zip(rows, text, strict=True)])))


def share_of_twos(model: ScriptedModel, text: list[int]) -> float:
    """The share of one token in the text without its end."""
    visible = [token for token in text if token != END]
    return visible.count(2) / max(1, len(visible))


def share_reward(prompt: str, texts: list[str]) -> list[float]:
    """`share_of_twos` as a reward: the tokens of a text are its bytes."""
    return [text.count("\2") / max(1, len(text)) for text in texts]


def is_over(text: list[int], limit: int) -> bool:
    return len(text) == limit or text[-1:] == [END]


def deal_oracle(
    model: ScriptedModel, value: Value, k: int, length: int, weight: float, limit: int
) -> list[int]:
    """The text, each token by brute force."""
    text: list[int] = []
    while not is_over(text, limit):
        logs = log_softmax(logits_after(model, PROMPT + text))
        best: dict[int, float] = {}
        for token in sorted(range(len(logs)), key=lambda token: (-logs[token], token))[:k]:
            ahead = [*text, token]
            for _ in range(length):
                if not is_over(ahead, limit):
                    ahead.append(int(np.argmax(logits_after(model, PROMPT + ahead))))
            best[token] = logs[token] + weight * value(model, ahead)
        text.append(max(best, key=lambda token: best[token]))
    return text


@oracle_test("deal")
def deal() -> Iterator[Check]:
    """The oracle's texts; greedy decoding without a reward or with one token; the rows."""
    settings: dict[str, tuple[Any, Value, int, int, float]] = {
        "the default build": ("deal", confidence, 5, 32, 5.0),
        "a weight of 20, 3 tokens ahead": (
            "deal:length=3,weight=20", confidence, 5, 3, 20.0,
        ),
        "another reward": (Deal(3, 4, 2.0, share_reward), share_of_twos, 3, 4, 2.0),
        "nothing ahead": (Deal(4, 0, 5.0, share_reward), share_of_twos, 4, 0, 5.0),
    }  # fmt: skip
    greedy: list[list[int]] = []
    alike = {"k=1": 0, "weight=0": 0}
    for name, (decoder, value, k, length, weight) in settings.items():
        wrong = changed = 0
        for seed in range(10):
            model = flat_model(seed)
            with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
                found = llm.generate(PROMPT, decoder=decoder, max_tokens=12).tokens
                plain = llm.generate(PROMPT, decoder="autoregressive", max_tokens=12).tokens
                for option in alike:
                    text = llm.generate(PROMPT, decoder=f"deal:{option}", max_tokens=12).tokens
                    alike[option] += text == plain
            wrong += found != deal_oracle(model, value, k, length, weight, 12)
            changed += found != plain
            greedy.append(plain)
        detail = f"{wrong} of 10 wrong, {changed} not greedy"
        yield Check(f"{name} equals the oracle", wrong == 0 < changed, detail)
    for option, count in alike.items():
        yield Check(f"{option} is greedy decoding", count == len(greedy), f"{count} alike")


@measure("deal", "reward lost against greedy decoding", samples=16, margin=-0.2)
def deal_gain(samples: int) -> float:
    """The mean share of one token in greedy texts, less that with this reward."""
    losses = []
    for seed in range(samples):
        model = flat_model(seed)
        with LLM(model, tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
            texts = [
                llm.generate(PROMPT, decoder=decoder, max_tokens=12).tokens
                for decoder in ("autoregressive", Deal(weight=4.0, reward=share_reward))
            ]
        values = [share_of_twos(model, text) for text in texts]
        losses.append(values[0] - values[1])
    return float(np.mean(losses))
