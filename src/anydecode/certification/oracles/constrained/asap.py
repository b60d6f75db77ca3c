"""Oracle test of asap (Grammar-Aligned Decoding, arXiv:2405.21047): the paper's recursion on a
trie, its fixed point, and the distance from the model's distribution given the constraint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.constrained.trap_model import (
    TABLE,
    TRUTH,
    WORDS,
    distance,
    trap_llm,
)
from anydecode.decoders.constrained.asap import Asap


def hope(visited: set[str], prefix: str, temperature: float) -> float:
    """The paper's recursion over the prefixes of all samples so far: the probability of a text that
    satisfies the constraint, where prefixes that were not visited count as 1."""
    words = set(TRUTH)
    if prefix in words or prefix not in visited:
        return 1.0
    weights = {letter: p ** (1 / temperature) for letter, p in TABLE[prefix].items()}
    allowed = [letter for letter in weights if any(w.startswith(prefix + letter) for w in words)]
    total = sum(weights.values())
    return sum(
        weights[letter] / total * hope(visited, prefix + letter, temperature) for letter in allowed
    )


@oracle_test("asap")
def asap() -> Iterator[Check]:
    """The estimate of the whole text against the paper's recursion, recomputed after each sample,
    at two temperatures in turn; and its fixed point."""
    decoder = Asap()
    visited: dict[float, set[str]] = {1.0: set(), 0.5: set()}
    hopes: list[float] = []
    largest = 0.0
    with trap_llm() as llm:
        for seed in range(80):
            temperature = (1.0, 0.5)[seed % 2]
            options: dict[str, Any] = {"temperature": temperature, "seed": seed}
            text = llm.generate("?", decoder=decoder, constraint=WORDS, **options).text
            visited[temperature] |= {text[:length] for length in range(len(text))}
            actual = next(reversed(decoder.tries.values())).completion_probability
            largest = max(largest, abs(actual - hope(visited[temperature], "", temperature)))
            hopes += [actual] if temperature == 1 else []
    yield Check("estimates equal the recursion's", largest < 1e-6, f"largest error {largest:.1g}")
    falls = all(after <= before + 1e-12 for before, after in zip(hopes, hopes[1:], strict=False))
    yield Check("the estimate never rises", falls, f"{hopes[0]:.3f} to {hopes[-1]:.3f}")
    truth = sum(TRUTH.values())
    close = abs(hopes[-1] - truth) < 1e-3
    yield Check("the estimate converges to the exact value", close, f"{truth:.3f}")


@measure(
    "asap", "distance from the conditional distribution, after learning", samples=300, margin=0.08
)
def asap_loss(samples: int) -> float:
    """Total variation distance after 60 samples of learning. Plain masking has about 0.5."""
    decoder = Asap()
    distance(decoder, 60)
    return distance(decoder, samples, first=1000)
