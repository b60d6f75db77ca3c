"""From a row of logits to a token.

Order: `before` (penalties, bias, bans, the constraint) works on logits, then the temperature
divides them, then `after` (the truncations) works on what is left, and the pick is the argmax of
score + Gumbel noise. Penalties come before the mask so that a mask has the last word on what may
be said; truncations come after it so that they never leave only forbidden tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.kernels.library import load_library, pick_gumbel
from anydecode.sampling.candidates import Candidates, Distribution
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.processor import Combiner, Processor
from anydecode.scoring.noise import Noise


class Policy:
    """A temperature and an ordered list of processors.

    At temperature 0 the pick is the argmax after `before`, ties to the lowest id; `after` cannot
    change it and is skipped. A row is float32 `[vocab_size]` and is never written to.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        before: Iterable[Processor] = (),
        after: Iterable[Processor] = (),
        combiner: Combiner | None = None,
    ) -> None:
        self.temperature = temperature
        self.before = tuple(before)
        self.after = tuple(after)
        self.combiner = combiner
        self._divisor = np.float32(temperature)
        last = self.before[-1] if self.before else None
        self._constraint = last if isinstance(last, Constrained) else None
        self._told = tuple(p for p in (*self.before, *self.after) if p.stateful)
        self._seeing = tuple(p for p in self._told if p.sees_states)

    @property
    def stateful(self) -> bool:
        """Whether the distribution depends on the tokens said so far."""
        return bool(self._told)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether the temperature is all there is, so that a backend may pick by itself."""
        return not (self.before or self.after or self.combiner)

    @property
    def is_held(self) -> bool:
        """Whether a constraint and the temperature are all there is: what a backend picks without
        the constraint stands if that permits it."""
        return self._constraint is not None and not (self.before[1:] or self.after or self.combiner)

    def permits(self, token: int) -> bool:
        """Whether the constraint, if there is one, lets `token` come next."""
        return self._constraint is None or self._constraint.permits(token)

    @property
    def learns(self) -> bool:
        """Whether a text's tokens alone do not tell where it stands (mirostat)."""
        return any(processor.learns for processor in self._told)

    @property
    def sees_states(self) -> bool:
        """Whether it must be shown the last layer's state of each row (`see`)."""
        return bool(self._seeing)

    def see(self, state: np.ndarray, logits: np.ndarray) -> None:
        """Show the row that the next `distribution` or `pick` is asked of: its last layer's state
        after the final norm, float32 `[hidden_size]`, and the model's own logits."""
        for processor in self._seeing:
            processor.see(state, logits)

    @property
    def companions(self) -> int:
        """How many companion contexts `combine` wants."""
        return self.combiner.companions if self.combiner else 0

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose logits `combine` wants."""
        return self.combiner.taps if self.combiner else ()

    def combine(
        self, logits: np.ndarray, companions: list[np.ndarray], taps: dict[int, np.ndarray]
    ) -> np.ndarray:
        """One row from the sequence's own, its companions' and the tapped layers' logits."""
        return self.combiner.combine(logits, companions, taps) if self.combiner else logits

    def fork(self) -> Policy:
        """The same state for a branch. Without state the branch shares this object."""
        if not self._told:
            return self
        return Policy(
            self.temperature,
            [processor.fork() for processor in self.before],
            [processor.fork() for processor in self.after],
            self.combiner,
        )

    def prepare(self) -> None:
        """A pass for the next token starts: whatever can be computed beside it may begin."""
        if self.is_held:
            return  # what is picked without a mask mostly stands
        for processor in self._told:
            processor.prepare()

    def advance(self, token: int) -> None:
        """The text goes on with `token`. Policies that learn from probabilities (mirostat) take
        them from the last `distribution` or `pick` of this branch."""
        for processor in self._told:
            processor.advance(token)

    def distribution(self, logits: np.ndarray) -> Distribution:
        """What the next token is drawn from; at temperature 0 a single token."""
        candidates = self._prepare(logits)
        if self.is_greedy:
            token = np.array([candidates.argmax()], np.int32)
            return Distribution(token, np.zeros(1, np.float32))
        return self._scaled(candidates)

    def _scaled(self, candidates: Candidates) -> Distribution:
        """The distribution of what `before` has left."""
        candidates = candidates.allowed()
        candidates.scores = candidates.scores / self._divisor
        candidates.owned = True
        for processor in self.after:
            candidates = processor.apply(candidates)
        return Distribution(candidates.tokens, candidates.scores)

    def pick(self, logits: np.ndarray, noise: Noise, position: int, attempt: int = 0) -> int:
        """The token said at `position`: argmax of score + Gumbel noise over what is allowed, ties
        to the lowest id. `attempt` counts redraws of the same place."""
        if self.is_greedy:
            if not self.before and self.combiner is None:
                return int(logits.argmax())
            if self._constraint is None:
                return self._prepare(logits).argmax()
            free = self._free(logits)
            token = free.argmax()  # mostly the constraint has nothing against it
            return token if self._constraint.permits(token) else self._held(free).argmax()
        if self.is_plain:
            return self._pick_scaled(logits, noise, position, attempt)
        if self.after or self.combiner:
            return self.distribution(logits).pick(noise, position, attempt)
        candidates = self._free(logits)
        if self._constraint is not None:
            if candidates.tokens is None and self._constraint.forbids_little():
                token = self._pick_scaled(candidates.scores, noise, position, attempt)
                if self._constraint.permits(token):
                    return token
            candidates = self._held(candidates)
        if candidates.tokens is None:  # penalties, or a constraint that forbids little
            candidates.argmax()  # raises where everything is forbidden
            return self._pick_scaled(candidates.scores, noise, position, attempt)
        allowed = candidates.allowed()
        return self._pick_scaled(allowed.scores, noise, position, attempt, allowed.tokens)

    def _pick_scaled(
        self,
        logits: np.ndarray,
        noise: Noise,
        position: int,
        attempt: int,
        tokens: np.ndarray | None = None,
    ) -> int:
        """The pick among `tokens` (all if None) where nothing but the temperature acts any more."""
        inverse = 1 / self.temperature
        if tokens is None and load_library() is not None and logits.flags.c_contiguous:
            place = (noise.seed, noise.stream, position, attempt)
            return pick_gumbel(logits, inverse, *place)
        # In float64, as the native kernels scale: both ways pick the same token.
        scaled = logits.astype(np.float64) * inverse
        return Distribution(tokens, scaled).pick(noise, position, attempt)

    def _free(self, logits: np.ndarray) -> Candidates:
        """What `before` has left without its last part, if that is a constraint."""
        candidates = Candidates(None, logits, masked=self.combiner is not None)
        for processor in self.before if self._constraint is None else self.before[:-1]:
            candidates = processor.apply(candidates)
        return candidates

    def _prepare(self, logits: np.ndarray) -> Candidates:
        return self._held(self._free(logits))

    def _held(self, candidates: Candidates) -> Candidates:
        """`candidates` under the constraint."""
        if self._constraint is not None:
            candidates = self._constraint.apply(candidates)
        if not len(candidates):
            raise ConstraintError("no token is allowed here: bans and constraint leave none")
        return candidates
