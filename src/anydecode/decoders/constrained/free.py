"""What the model would say without the constraint, beside what the constraint allows."""

from __future__ import annotations

import numpy as np

from anydecode.sampling.candidates import Distribution
from anydecode.sampling.constrained import Constrained, ConstraintState, constraint_of
from anydecode.sampling.sampler import Sampler


def split(sampler: Sampler) -> tuple[Sampler, ConstraintState | None]:
    """`policy` without its constraint (for its present state only), and the constraint's state."""
    part = constraint_of(sampler)
    if part is None:
        return sampler, None
    others = [one for one in sampler.pre_temperature if not isinstance(one, Constrained)]
    free = Sampler(sampler.temperature, others, sampler.post_temperature, sampler.combiner)
    return free, part.state


def allows(state: ConstraintState | None, token: int) -> bool:
    """Whether `token` may follow; states that can tell without a mask are asked to."""
    if state is None:
        return True
    ask = getattr(state, "allows", None)
    if ask is not None:
        return bool(ask(token))
    mask = state.mask()
    if mask is None:
        return True
    return bool(mask[token]) if mask.dtype == np.bool_ else token in mask


def unmasked(sampler: Sampler, logits: np.ndarray) -> tuple[Distribution, ConstraintState | None]:
    """The distribution of the next token without the constraint, and the constraint's state. At
    temperature 0 the scores are the logits: their order is what counts."""
    free, state = split(sampler)
    if not sampler.is_greedy:
        return free.distribution(logits), state
    ranked = Sampler(1.0, free.pre_temperature, (), free.combiner)
    return ranked.distribution(logits), state


def spoken(distribution: Distribution) -> np.ndarray:
    """Token ids of a distribution, int64."""
    if distribution.tokens is None:
        return np.arange(len(distribution.scores))
    return distribution.tokens.astype(np.int64)
