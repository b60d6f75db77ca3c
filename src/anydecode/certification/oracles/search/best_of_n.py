"""Oracle test of best-of-n: the choice among plain samples, and the law of the best of n texts by
enumeration of all texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text, expected, fit, small_llm
from anydecode.certification.oracles.scripted_rows import log_softmax, logits_after
from anydecode.certification.oracles.search.beam import ShortTokenizer, short_model
from anydecode.decoders.search.best_of_n import BestOfN
from anydecode.models.scripted import ScriptedModel

PROMPT = [1, 0, 3]


def mean_logprob(model: ScriptedModel, prompt: list[int], tokens: list[int]) -> float:
    """The mean log-probability of the tokens, each from the whole text before it."""
    rows = [log_softmax(logits_after(model, prompt + tokens[:i])) for i in range(len(tokens))]
    return float(np.mean([row[token] for row, token in zip(rows, tokens, strict=True)]))


def best_law(texts: dict[Text, float], value: Callable[[Text], float], n: int) -> dict[Text, float]:
    """The law of the best of `n` independent texts: the n-th power of the cumulative probability,
    in the order of values, increases by a text's probability of being the best."""
    law, below = {}, 0.0
    for text in sorted(texts, key=value):
        law[text] = (below + texts[text]) ** n - below**n
        below += texts[text]
    return law


def value_of(text: Text) -> float:
    """A fixed pseudo-random value of a text."""
    return float(np.random.default_rng([7, *text]).random())


def value_texts(prompt: str, texts: list[str]) -> list[float]:
    """`value_of` as a reward: the tokens of a text are its bytes."""
    return [value_of(tuple(text.encode())) for text in texts]


def answers(llm: LLM, decoder: Any, samples: int, length: int) -> list[Text]:
    """The answers to requests with different seeds."""
    options: dict[str, Any] = {"decoder": decoder, "temperature": 1.0, "max_tokens": length}
    return [tuple(llm.generate(PROMPT, seed=s, **options).tokens) for s in range(samples)]


@oracle_test("best-of-n")
def best_of_n() -> Iterator[Check]:
    """The best of the plain samples with the same seed, all in their order; and the law of the
    answer on an enumerable model."""
    wrong = changed = 0
    for seed in range(12):
        model = short_model(seed)
        with LLM(model, tokenizer=ShortTokenizer(), cache_positions=1024) as llm:
            options: dict[str, Any] = {"n": 8, "temperature": 1.3, "seed": seed, "max_tokens": 9}
            plain = llm.generate([0, 1], decoder="autoregressive", **options).samples
            ranked = llm.generate([0, 1], decoder="best-of-n", **options).samples
        texts = [one.tokens for one in plain]
        scores = [mean_logprob(model, [0, 1], tokens) for tokens in texts]
        order = sorted(range(8), key=lambda number: -scores[number])
        wrong += [one.tokens for one in ranked] != [texts[number] for number in order]
        wrong += any(
            abs((one.score or 0) - scores[number]) > 1e-5
            for one, number in zip(ranked, order, strict=True)
        )
        changed += order[0] != 0
    detail = f"{wrong} of 12 wrong, {changed} changed"
    yield Check("the plain samples, the most likely per token first", wrong == 0 < changed, detail)
    law = expected({"temperature": 1.0}, PROMPT)
    with small_llm() as llm:
        for n in (1, 2, 4):
            found = answers(llm, BestOfN(n, value_texts), 400, 3)
            result = fit(found, best_law(law, value_of, n))
            yield Check(f"law of the best of {n}", result.passed, str(result))
        found = answers(llm, "best-of-n", 400, 3)
        result = fit(found, best_law(law, lambda text: float(np.log(law[text])), 8))
        yield Check("law of the default build", result.passed, str(result))
        plain_texts = answers(llm, "autoregressive", 40, 3)
        alike = BestOfN(4, lambda prompt, texts: [0.5] * len(texts))
        yield Check("equal values keep the first", answers(llm, alike, 40, 3) == plain_texts)


@measure("best-of-n", "log-probability per token lost against sampling", samples=60, margin=-0.2)
def best_of_n_gain(samples: int) -> float:
    """Mean over seeds, in nats. The best of 8 texts is more likely than a sample."""
    model = short_model(3)
    losses = []
    with LLM(model, tokenizer=ShortTokenizer(), cache_positions=1024) as llm:
        for seed in range(samples):
            options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 8}
            both = [
                llm.generate([0, 1], decoder=decoder, **options).tokens
                for decoder in ("autoregressive", "best-of-n")
            ]
            plain, best = (mean_logprob(model, [0, 1], tokens) for tokens in both)
            losses.append(plain - best)
    return float(np.mean(losses))
