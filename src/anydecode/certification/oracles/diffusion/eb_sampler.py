"""Oracle test of eb-sampler (Entropy Bounded Unmasking, arXiv:2505.24857): the longest prefix of
the ranking whose entropies, without the largest, sum to at most the bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import StepState, UnmaskingRule, entropy_nats, margin
from anydecode.certification.oracles.diffusion.scripted_denoising import default_steps, same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("eb-sampler")
def eb_sampler() -> Iterator[Check]:
    """The longest prefix of the ranking whose entropies, without the largest, sum to at most the
    bound."""

    def rule_of(score: Callable[[np.ndarray], float], gamma: float) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            order = state.order(score)
            fits = 1
            for count in range(2, len(order) + 1):
                unknown = sorted(entropy_nats(state.probabilities[i]) for i in order[:count])[:-1]
                fits = count if sum(unknown) <= gamma else fits
            return order[:fits]

        return rule

    scores: dict[str, Callable[[np.ndarray], float]] = {
        "entropy": lambda p: -entropy_nats(p),
        "confidence": np.max,
        "margin": margin,
    }
    for name, score in scores.items():
        decoder = f"eb-sampler:gamma=0.5,remasking={name},block=12"
        yield same_steps(f"fills the longest prefix ranked by {name}", decoder, rule_of(score, 0.5))
    other = same_steps("", "eb-sampler:gamma=1.5,block=12", rule_of(np.max, 0.5)).passed
    yield Check("another bound differs", not other)
    yield default_steps("eb-sampler", rule_of(np.max, 0.1))
    yield same_steps(
        "a bound of 0 fills one token per pass",
        "eb-sampler:gamma=0,block=12",
        lambda state: state.order()[:1],
    )


register_losses("eb-sampler", "eb-sampler", accuracy=0.05, passes=0.5)
