"""Oracle of mirostat (arXiv:2007.14966): the limit on each token, from the surprisal of all tokens
before it; and the mean surprisal of long texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.chi_square import Text
from anydecode.certification.oracles.sampling.one_row import by_hand, log_probabilities
from anydecode.certification.oracles.sampling.token_sets import descending, renormalized, tempered
from anydecode.certification.samplers import OracleContext, oracle
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.sampling.params import SamplingParams


def _mirostat(
    context: OracleContext,
    tokens: Text,
    tau: float,
    eta: float,
    cut: Callable[[np.ndarray, float], list[int]],
) -> np.ndarray:
    mu = 2 * tau
    for position, token in enumerate(tokens):
        surprise = -math.log2(tempered(context, tokens[:position])[token])
        mu = min(max(mu - eta * (surprise - tau), 0.0), 4 * tau)
    probabilities = tempered(context, tokens)
    return renormalized(probabilities, cut(probabilities, mu))


def _below(probabilities: np.ndarray, mu: float) -> list[int]:
    kept = [t for t in range(len(probabilities)) if -math.log2(probabilities[t]) <= mu]
    return kept or descending(probabilities)[:1]


def _zipf(probabilities: np.ndarray, mu: float) -> list[int]:
    """Version 1, from the paper's equations for the exponent and for k."""
    order = descending(probabilities)
    ratios = [
        math.log(probabilities[a] / probabilities[b])
        for a, b in zip(order, order[1:], strict=False)
    ]
    logs = [math.log((i + 2) / (i + 1)) for i in range(len(ratios))]
    exponent = sum(t * b for t, b in zip(logs, ratios, strict=True)) / sum(t * t for t in logs)
    excess = exponent - 1
    k = (excess * 2**mu / (1 - len(probabilities) ** -excess)) ** (1 / exponent)
    return order[: max(1, min(len(probabilities), round(k)))]


@oracle(
    "mirostat",
    {"tau": 1.1, "eta": 0.4},
    {"tau": 0.8, "eta": 0.9},
    {"tau": 1.1, "eta": 0.4, "version": 1},
    {},
)
def mirostat_probabilities(
    context: OracleContext, tokens: Text, tau: float = 5.0, eta: float = 0.1, version: int = 2
) -> np.ndarray:
    """The limit on each token follows from the surprisal of all tokens before it."""
    return _mirostat(context, tokens, tau, eta, _below if version == 2 else _zipf)


ZIPF_LENGTH = 2000


def zipf_model() -> ScriptedModel:
    """Zipf's law over 200 tokens; its exponent falls from 1.4 to 1.05 over the text."""
    ranks = np.log(np.arange(1, 201))

    def script(seen: tuple[int, ...]) -> np.ndarray:
        order = np.random.default_rng(len(seen)).permutation(200)
        row: np.ndarray = -ranks[order] * (1.4 - 0.35 * len(seen) / ZIPF_LENGTH)
        return row

    return ScriptedModel(script, 200)


def surprisals(length: int, **options: Any) -> np.ndarray:
    """Bits of each token of a text that the engine samples from `zipf_model`."""
    model = zipf_model()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        request: dict[str, Any] = {
            "max_tokens": length,
            "seed": 5,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        entries = llm.generate([1], logprobs=0, **request, **options).logprobs
    tokens = [token for token in entries or () if token is not None]
    assert len(tokens) == length
    return np.array([-token.logprob / math.log(2) for token in tokens])


@oracle_test("mirostat")
def mirostat() -> Iterator[Check]:
    """Version 2 with tau 1 and eta 0.5: mu starts at 2 and then follows the surprisal."""
    row = log_probabilities(0.5, 0.25, 0.15, 0.1)  # 1, 2, 2.74 and 3.32 bits
    sampler = SamplingParams(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5).sampler([], 4)
    yield by_hand("mu starts at 2 bits", sampler.distribution(row).dense(4), 2 / 3, 1 / 3, 0, 0)
    sampler.advance(1)
    yield by_hand("then mu is 1.5", sampler.distribution(row).dense(4), 1, 0, 0, 0)
    sampler.advance(0)
    yield by_hand("mu stays 1.5", sampler.distribution(row).dense(4), 1, 0, 0, 0)
    p = np.arange(1, 51) ** -1.3
    first = SamplingParams(mirostat=1, mirostat_tau=2.0).sampler([], 50)
    count = round((0.3 * 2**4 / (1 - 50**-0.3)) ** (1 / 1.3))
    num_kept = len(first.distribution(np.log(p / p.sum()).astype(np.float32)))
    yield Check("version 1 keeps k tokens of Zipf's law", num_kept == count, f"{num_kept} of 50")
    bits = surprisals(800, top_p=0.6)
    drift = float(bits[600:].mean() - bits[:200].mean())
    yield Check("top-p drifts on the same rows", drift > 0.25, f"by {drift:.2f} bits in 800 tokens")


@measure("mirostat", "relative error of the mean surprisal", samples=ZIPF_LENGTH, margin=0.05)
def mirostat_claim(samples: int) -> float:
    """Relative to a target of 3 bits, over 2,000 tokens; the worst of both versions, each over the
    whole text and over the last quarter."""
    off = []
    for version in (1, 2):
        bits = surprisals(samples, mirostat=version, mirostat_tau=3.0)
        off += [abs(bits.mean() - 3) / 3, abs(bits[-samples // 4 :].mean() - 3) / 3]
    return float(max(off))
