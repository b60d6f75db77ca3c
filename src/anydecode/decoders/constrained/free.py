"""The model's distribution without the constraint, and tests of tokens against the constraint."""

from __future__ import annotations

import numpy as np

from anydecode.sampling.candidates import Distribution
from anydecode.sampling.constrained import Constrained, ConstraintState
from anydecode.sampling.sampler import Sampler, constraint_of


def split_constraint(sampler: Sampler) -> tuple[Sampler, ConstraintState | None]:
    """Returns `sampler` without its constraint (valid for its present state only), and the
    constraint's state; None if there is no constraint."""
    part = constraint_of(sampler)
    if part is None:
        return sampler, None
    pre_temperature = [
        processor for processor in sampler.pre_temperature if not isinstance(processor, Constrained)
    ]
    unconstrained = Sampler(
        sampler.temperature, pre_temperature, sampler.post_temperature, sampler.combiner
    )
    return unconstrained, part.state


def is_allowed(state: ConstraintState | None, token: int) -> bool:
    """Whether `token` is allowed next. Uses `state.allows` if available, else the mask."""
    if state is None:
        return True
    allows = getattr(state, "allows", None)
    if allows is not None:
        return bool(allows(token))
    mask = state.mask()
    if mask is None:
        return True
    return bool(mask[token]) if mask.dtype == np.bool_ else token in mask


def unconstrained_distribution(
    sampler: Sampler, logits: np.ndarray
) -> tuple[Distribution, ConstraintState | None]:
    """Returns the distribution of the next token without the constraint, and the constraint's
    state. At temperature 0 the scores are the logits; only their order matters."""
    unconstrained, state = split_constraint(sampler)
    if not sampler.is_greedy:
        return unconstrained.distribution(logits), state
    sampler_at_one = Sampler(1.0, unconstrained.pre_temperature, (), unconstrained.combiner)
    return sampler_at_one.distribution(logits), state


def token_ids(distribution: Distribution) -> np.ndarray:
    """The token ids of a distribution, int64 `[n]`."""
    if distribution.tokens is None:
        return np.arange(len(distribution.scores))
    return distribution.tokens.astype(np.int64)
