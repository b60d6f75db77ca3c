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
from anydecode.kernels.library import load_library, sample_gumbel
from anydecode.sampling.candidates import Candidates, Distribution
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.processor import LogitsCombiner, LogitsProcessor
from anydecode.scoring.noise import Noise


class Sampler:
    """A temperature and an ordered list of processors.

    At temperature 0 the pick is the argmax after `before`, ties to the lowest id; `after` cannot
    change it and is skipped. A row is float32 `[vocab_size]` and is never written to.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        pre_temperature: Iterable[LogitsProcessor] = (),
        post_temperature: Iterable[LogitsProcessor] = (),
        combiner: LogitsCombiner | None = None,
    ) -> None:
        self.temperature = temperature
        self.pre_temperature = tuple(pre_temperature)
        self.post_temperature = tuple(post_temperature)
        self.combiner = combiner
        self._divisor = np.float32(temperature)
        last = self.pre_temperature[-1] if self.pre_temperature else None
        self._constraint = last if isinstance(last, Constrained) else None
        self._stateful = tuple(
            p for p in (*self.pre_temperature, *self.post_temperature) if p.stateful
        )
        self._observing = tuple(p for p in self._stateful if p.observes_hidden)

    @property
    def stateful(self) -> bool:
        """Whether the distribution depends on the tokens said so far."""
        return bool(self._stateful)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_temperature_only(self) -> bool:
        """Whether the temperature is all there is, so that a backend may pick by itself."""
        return not (self.pre_temperature or self.post_temperature or self.combiner)

    @property
    def is_constraint_only(self) -> bool:
        """Whether a constraint and the temperature are all there is: what a backend picks without
        the constraint stands if that permits it."""
        return self._constraint is not None and not (
            self.pre_temperature[1:] or self.post_temperature or self.combiner
        )

    def allows(self, token: int) -> bool:
        """Whether the constraint, if there is one, lets `token` come next."""
        return self._constraint is None or self._constraint.allows(token)

    @property
    def learns_from_logits(self) -> bool:
        """Whether a text's tokens alone do not tell where it stands (mirostat)."""
        return any(processor.learns_from_logits for processor in self._stateful)

    @property
    def observes_hidden(self) -> bool:
        """Whether it must be shown the last layer's state of each row (`see`)."""
        return bool(self._observing)

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:
        """Show the row that the next `distribution` or `pick` is asked of: its last layer's state
        after the final norm, float32 `[hidden_size]`, and the model's own logits."""
        for processor in self._observing:
            processor.observe_hidden(state, logits)

    @property
    def companions(self) -> int:
        """How many companion contexts `combine` wants."""
        return self.combiner.companions if self.combiner else 0

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The layers whose logits `combine` wants."""
        return self.combiner.capture_layers if self.combiner else ()

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """One row from the sequence's own, its companions' and the tapped layers' logits."""
        return (
            self.combiner.combine(logits, companions, capture_layers) if self.combiner else logits
        )

    def fork(self) -> Sampler:
        """The same state for a branch. Without state the branch shares this object."""
        if not self._stateful:
            return self
        return Sampler(
            self.temperature,
            [processor.fork() for processor in self.pre_temperature],
            [processor.fork() for processor in self.post_temperature],
            self.combiner,
        )

    def prepare(self) -> None:
        """A pass for the next token starts: whatever can be computed beside it may begin."""
        if self.is_constraint_only:
            return  # what is picked without a mask mostly stands
        for processor in self._stateful:
            processor.prepare()

    def advance(self, token: int) -> None:
        """The text goes on with `token`. Policies that learn from probabilities (mirostat) take
        them from the last `distribution` or `pick` of this branch."""
        for processor in self._stateful:
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
        for processor in self.post_temperature:
            candidates = processor.apply(candidates)
        return Distribution(candidates.tokens, candidates.scores)

    def sample(self, logits: np.ndarray, noise: Noise, position: int, attempt: int = 0) -> int:
        """The token said at `position`: argmax of score + Gumbel noise over what is allowed, ties
        to the lowest id. `attempt` counts redraws of the same place."""
        if self.is_greedy:
            if not self.pre_temperature and self.combiner is None:
                return int(logits.argmax())
            if self._constraint is None:
                return self._prepare(logits).argmax()
            free = self._without_constraint(logits)
            token = free.argmax()  # mostly the constraint has nothing against it
            return token if self._constraint.allows(token) else self._constrained(free).argmax()
        if self.is_temperature_only:
            return self._sample_scaled(logits, noise, position, attempt)
        if self.post_temperature or self.combiner:
            return self.distribution(logits).sample(noise, position, attempt)
        candidates = self._without_constraint(logits)
        if self._constraint is not None:
            if candidates.tokens is None and self._constraint.forbids_little():
                token = self._sample_scaled(candidates.scores, noise, position, attempt)
                if self._constraint.allows(token):
                    return token
            candidates = self._constrained(candidates)
        if candidates.tokens is None:  # penalties, or a constraint that forbids little
            candidates.argmax()  # raises where everything is forbidden
            return self._sample_scaled(candidates.scores, noise, position, attempt)
        allowed = candidates.allowed()
        return self._sample_scaled(allowed.scores, noise, position, attempt, allowed.tokens)

    def _sample_scaled(
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
            noise_key = (noise.seed, noise.stream, position, attempt)
            return sample_gumbel(logits, inverse, *noise_key)
        # In float64, as the native kernels scale: both ways pick the same token.
        scaled = logits.astype(np.float64) * inverse
        return Distribution(tokens, scaled).sample(noise, position, attempt)

    def _without_constraint(self, logits: np.ndarray) -> Candidates:
        """What `before` has left without its last part, if that is a constraint."""
        candidates = Candidates(None, logits, masked=self.combiner is not None)
        for processor in (
            self.pre_temperature if self._constraint is None else self.pre_temperature[:-1]
        ):
            candidates = processor.apply(candidates)
        return candidates

    def _prepare(self, logits: np.ndarray) -> Candidates:
        return self._constrained(self._without_constraint(logits))

    def _constrained(self, candidates: Candidates) -> Candidates:
        """`candidates` under the constraint."""
        if self._constraint is not None:
            candidates = self._constraint.apply(candidates)
        if not len(candidates):
            raise ConstraintError("no token is allowed here: bans and constraint leave none")
        return candidates
