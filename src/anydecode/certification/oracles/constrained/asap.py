"""Oracle test of asap (Grammar-Aligned Decoding, arXiv:2405.21047): the paper's recursion on a
trie, its fixed point, and the distance from the model's distribution given the constraint."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.constrained.trap_model import TRUTH, WORDS, distance, trap_llm
from anydecode.decoders.constrained.asap import Asap, Node


@oracle_test("asap")
def asap() -> Iterator[Check]:
    """The paper's recursion on a trie of two levels, and its fixed point on a model with known
    probabilities."""
    root = Node(mass=0.9)
    root.children = {
        1: Node(0.6, completion_probability=0.05),
        2: Node(0.3, completion_probability=1.0),
    }
    root.update()
    yield Check(
        "expected future grammaticality (hope) of a prefix",
        abs(root.completion_probability - (0.6 * 0.05 + 0.3)) < 1e-12,
        f"{root.completion_probability}",
    )
    decoder = Asap()
    hopes = []
    with trap_llm() as llm:
        for seed in range(40):
            llm.generate("?", decoder=decoder, constraint=WORDS, temperature=1.0, seed=seed)
            hopes.append(next(iter(decoder.tries.values())).completion_probability)
    falls = all(after <= before + 1e-12 for before, after in zip(hopes, hopes[1:], strict=False))
    yield Check("hope never rises", falls, f"{hopes[0]:.3f} to {hopes[-1]:.3f}")
    truth = sum(TRUTH.values())
    yield Check("hope converges to the exact value", abs(hopes[-1] - truth) < 1e-3, f"{truth:.3f}")


@measure(
    "asap", "distance from the conditional distribution, after learning", samples=300, margin=0.08
)
def asap_loss(samples: int) -> float:
    """Total variation distance after 60 samples of learning. Plain masking has about 0.5."""
    decoder = Asap()
    distance(decoder, 60)
    return distance(decoder, samples, first=1000)
