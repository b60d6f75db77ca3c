"""What the model would say without the constraint, beside what the constraint allows."""

from __future__ import annotations

import numpy as np

from anydecode.constraints.constraint import ConstraintState
from anydecode.sampling.candidates import Distribution
from anydecode.sampling.constrained import Constrained, constraint_of
from anydecode.sampling.policy import Policy


def split(policy: Policy) -> tuple[Policy, ConstraintState | None]:
    """`policy` without its constraint (for its present state only), and the constraint's state."""
    part = constraint_of(policy)
    if part is None:
        return policy, None
    others = [one for one in policy.before if not isinstance(one, Constrained)]
    free = Policy(policy.temperature, others, policy.after, policy.combiner)
    state = part.state
    return free, state if isinstance(state, ConstraintState) else None


def unmasked(policy: Policy, logits: np.ndarray) -> tuple[Distribution, ConstraintState | None]:
    """The distribution of the next token without the constraint, and the constraint's state. At
    temperature 0 the scores are the logits: their order is what counts."""
    free, state = split(policy)
    if not policy.is_greedy:
        return free.distribution(logits), state
    ranked = Policy(1.0, free.before, (), free.combiner)
    return ranked.distribution(logits), state


def spoken(distribution: Distribution) -> np.ndarray:
    """Token ids of a distribution, int64."""
    if distribution.tokens is None:
        return np.arange(len(distribution.scores))
    return distribution.tokens.astype(np.int64)
