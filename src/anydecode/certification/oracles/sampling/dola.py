"""Oracle of dola (DoLa, arXiv:2309.03883): the contrast with the layer of the largest divergence;
and facts that only the last layer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import by_hand, log_probabilities
from anydecode.certification.samplers import OracleContext, oracle, softmax
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.params import SamplingParams


@oracle("dola", {"layers": "0+1+2+3"}, {})
def dola_probabilities(context: OracleContext, tokens: Text, layers: str = "high") -> np.ndarray:
    """The layer of the largest Jensen-Shannon divergence; tokens below a tenth of the best are
    excluded."""
    last = softmax(context.logits(tokens))

    def divergence(q: np.ndarray) -> float:
        middle = (last + q) / 2
        parts = ((last, middle), (q, middle))
        return 0.5 * sum(float((a * np.log(a / b)).sum()) for a, b in parts)

    candidates = [2, 3] if layers == "high" else [int(layer) for layer in layers.split("+")]
    early = max((softmax(context.early(tokens, layer)) for layer in candidates), key=divergence)
    scores = np.where(last >= 0.1 * max(last), np.log(last) - np.log(early), -np.inf)
    return softmax(scores / context.temperature)


class FactModel(ScriptedModel):
    """Early layers prefer the frequent token 1; the last layer almost prefers the fact: token 2 for
    even lengths of the text, 3 for odd ones. Token 0 has some probability in every layer."""

    def __init__(self) -> None:
        super().__init__(lambda seen: self.last(seen), 8)

    @staticmethod
    def last(seen: tuple[int, ...]) -> np.ndarray:
        row = log_probabilities(0.05, 0.47, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
        row[2 + len(seen) % 2] = np.log(0.42)
        return row

    def _path_logits(self, number: int, layer: int) -> np.ndarray:
        if layer == self.spec.num_layers:
            return super()._path_logits(number, layer)
        return log_probabilities(0.04, 0.8, 0.02, 0.02, 0.03, 0.03, 0.03, 0.03)


def facts_missed(count: int, **options: Any) -> float:
    """The share of tokens that are not the fact."""
    with LLM(FactModel(), tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        tokens = llm.generate([5], max_tokens=count, ignore_eos=True, **options).tokens
    missed = sum(token != 2 + (1 + position) % 2 for position, token in enumerate(tokens))
    return float(missed / count)


@oracle_test("dola")
def dola() -> Iterator[Check]:
    """ln(0.42 / 0.02) is larger than ln(0.47 / 0.8); tokens below a tenth of the best are
    excluded."""
    sampler = SamplingParams(dola_layers=(0, 2)).sampler([], 4, num_layers=4)
    last, near, far = (
        log_probabilities(0.5, 0.3, 0.15, 0.05),
        log_probabilities(0.5, 0.28, 0.17, 0.05),
        log_probabilities(0.7, 0.1, 0.1, 0.1),
    )
    row = sampler.combine(last, [], {0: far, 2: near})
    ratio = np.array([0.5, 0.3, 0.15]) / np.array([0.7, 0.1, 0.1])
    expected = [*(ratio / (ratio.sum() + 0.5)), 0.5 / (ratio.sum() + 0.5)]
    actual = sampler.distribution(row).dense(4)
    yield by_hand("the layer that differs most is contrasted", actual, *expected)
    row = sampler.combine(log_probabilities(0.6, 0.3, 0.06, 0.04), [], {0: far, 2: near})
    tokens = np.flatnonzero(sampler.distribution(row).dense(4)).tolist()
    yield Check("the bound is a tenth of the best", tokens == [0, 1, 2], str(tokens))
    missed = facts_missed(20)
    yield Check(
        "greedy decoding generates the frequent token", missed == 1.0, f"{missed:.2f} missed"
    )


@measure("dola", "facts missed", samples=40, margin=0.0)
def dola_claim(samples: int) -> float:
    """Facts that only the last layer has are generated."""
    return facts_missed(samples, decoder="dola:layers=high")
