"""A constraint as a part of a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor

if TYPE_CHECKING:
    from anydecode.sampling.sampler import Sampler


class ConstraintState(Protocol):
    """What is asked of a constraint: where it stands, and what it allows next."""

    def mask(self) -> np.ndarray | None:
        """Boolean `[vocab_size]`, or int ids ascending, of what may follow; None: anything."""
        ...

    def advance(self, token: int) -> None: ...

    def fork(self) -> ConstraintState: ...


class Constrained(LogitsProcessor):
    """Keeps what the constraint allows."""

    stateful = True

    def __init__(self, state: ConstraintState) -> None:
        self.state = state

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; states that can tell without a mask are asked to."""
        allows = getattr(self.state, "allows", None)
        if allows is not None:
            return bool(allows(token))
        mask = self.state.mask()
        if mask is None:
            return True
        return bool(mask[token]) if mask.dtype == np.bool_ else token in mask

    def forbids_little(self) -> bool:
        """Whether most of the vocabulary may come next."""
        mask = self.state.mask()
        return mask is None or (
            mask.dtype == np.bool_ and 2 * int(np.count_nonzero(mask)) > len(mask)
        )

    def apply(self, candidates: Candidates) -> Candidates:
        kept = self._kept(candidates, self.state.mask())
        unforced = getattr(self.state, "unforced", None)
        if unforced is not None and len(kept) == 1 and kept.scores[0] == -np.inf:
            return self._kept(candidates, unforced.mask())  # the short way to the end is banned
        return kept

    def _kept(self, candidates: Candidates, mask: np.ndarray | None) -> Candidates:
        """What `mask` allows of `candidates`."""
        if mask is None:
            return candidates
        if mask.dtype == np.bool_ and candidates.tokens is None:
            count = int(np.count_nonzero(mask[: len(candidates)]))
            if 2 * count > len(candidates):  # an open string: dropping few beats gathering many
                return self._without_few(candidates, mask[: len(candidates)], count)
        if mask.dtype == np.bool_:
            allowed = mask if candidates.tokens is None else mask[candidates.tokens]
            index = np.flatnonzero(allowed[: len(candidates)])
        else:
            index, _ = candidates.positions(mask)
        if not len(index):
            raise ConstraintError("the constraint allows none of the tokens that may come here")
        return candidates if len(index) == len(candidates) else candidates.keep(index)

    @staticmethod
    def _without_few(candidates: Candidates, mask: np.ndarray, count: int) -> Candidates:
        if count == len(candidates):
            return candidates
        scores = np.where(mask, candidates.scores, np.float32(-np.inf))
        return Candidates(None, scores, owned=True, masked=True)

    def advance(self, token: int) -> None:
        self.state.advance(token)

    def prepare(self) -> None:
        prepare = getattr(self.state, "prepare", None)
        if prepare is not None:
            prepare()

    def fork(self) -> Constrained:
        return Constrained(self.state.fork())


def constraint_of(sampler: Sampler) -> Constrained | None:
    """The part of `policy` that holds its constraint, or None."""
    return next((part for part in sampler.pre_temperature if isinstance(part, Constrained)), None)
