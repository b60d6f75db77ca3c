"""The sampler: from a row of logits to a token.

Order: the pre-temperature processors (penalties, bias, bans, the constraint) change the logits,
the temperature divides them, the post-temperature processors (truncations) drop candidates, and the
token is the argmax of score + Gumbel noise. Penalties come before the constraint, so that no
penalty can lift its mask; truncations come after it, so that they never leave only forbidden
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anydecode.errors import ConstraintError
from anydecode.kernels.interface import Truncation
from anydecode.kernels.library import load_library, sample_gumbel, sample_truncated
from anydecode.sampling.candidates import Candidates, Distribution
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.noise import Noise
from anydecode.sampling.processor import LogitsCombiner, LogitsProcessor

#: Maximum number of tokens tried at a position before the tokens of a forced completion are taken.
_MAX_TRIED = 8


class Sampler:
    """Samples tokens from logits with a temperature and ordered logits processors.

    At temperature 0 the token is the argmax after the pre-temperature processors, ties to the
    lowest id; post-temperature processors cannot change it and are skipped. A row of logits is
    float32 `[vocab_size]` and is never written to.

    Args:
        temperature: 0 for greedy decoding.
        pre_temperature: Processors of the logits. A constraint in last place is applied lazily.
        post_temperature: Processors of the scaled logits.
        combiner: Combines the logits of companion prompts or early layers with those of the
            sequence, before all processors.
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
        #: The truncations, if there is nothing but these and a temperature, and the kernels know
        #: them.
        self.truncation = self._truncation()
        last = self.pre_temperature[-1] if self.pre_temperature else None
        self._constraint = last if isinstance(last, Constrained) else None
        self._stateful = tuple(
            p for p in (*self.pre_temperature, *self.post_temperature) if p.is_stateful
        )
        self._observing = tuple(p for p in self._stateful if p.observes_hidden)

    def _truncation(self) -> Truncation | None:
        if self.is_greedy or self.pre_temperature or self.combiner or not self.post_temperature:
            return None
        rule: Truncation | None = Truncation(self.temperature)
        for processor in self.post_temperature:
            rule = rule and processor.truncated(rule)
        return rule

    @property
    def is_stateful(self) -> bool:
        """Whether the distribution depends on earlier tokens through `advance`."""
        return bool(self._stateful)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_temperature_only(self) -> bool:
        """Whether there is only a temperature, so that a backend may sample by itself."""
        return not (self.pre_temperature or self.post_temperature or self.combiner)

    @property
    def is_constraint_only(self) -> bool:
        """Whether there are only a constraint and a temperature: a token that a backend sampled
        without the constraint is valid if the constraint allows it."""
        return self._constraint is not None and not (
            self.pre_temperature[1:] or self.post_temperature or self.combiner
        )

    def allows(self, token: int) -> bool:
        """Whether the constraint, if there is one, allows `token` next."""
        return self._constraint is None or self._constraint.allows(token)

    @property
    def learns_from_logits(self) -> bool:
        """Whether the state depends on logits too, so that it cannot be rebuilt from the tokens
        alone (mirostat)."""
        return any(processor.learns_from_logits for processor in self._stateful)

    @property
    def observes_hidden(self) -> bool:
        """Whether `observe_hidden` must be called with the last hidden state of each row."""
        return bool(self._observing)

    def observe_hidden(self, state: np.ndarray, logits: np.ndarray) -> None:
        """Pass the row that `distribution` or `sample` is called for next.

        Args:
            state: Last hidden state after the final norm, float32 `[hidden_size]`.
            logits: The model's unmodified logits, float32 `[vocab_size]`.
        """
        for processor in self._observing:
            processor.observe_hidden(state, logits)

    @property
    def companions(self) -> int:
        """Number of companion prompts whose logits `combine` needs."""
        return self.combiner.companions if self.combiner else 0

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """The layers whose logits `combine` needs."""
        return self.combiner.capture_layers if self.combiner else ()

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """Combine the logits of the sequence, its companions and the captured layers into one row,
        float32 `[vocab_size]`."""
        return (
            self.combiner.combine(logits, companions, capture_layers) if self.combiner else logits
        )

    def fork(self) -> Sampler:
        """A copy with the same state for a branch of the text. A stateless sampler returns
        itself."""
        if not self._stateful:
            return self
        return Sampler(
            self.temperature,
            [processor.fork() for processor in self.pre_temperature],
            [processor.fork() for processor in self.post_temperature],
            self.combiner,
        )

    def prepare(self) -> None:
        """Called when the pass for the next token starts, so that processors can compute in
        parallel with it."""
        if self.is_constraint_only:
            return  # tokens sampled without the mask are mostly valid
        for processor in self._stateful:
            processor.prepare()

    def advance(self, token: int) -> None:
        """Append `token` to the text. Processors that learn from probabilities (mirostat) use those
        of the last `distribution` or `sample` of this branch."""
        for processor in self._stateful:
            processor.advance(token)

    def distribution(self, logits: np.ndarray) -> Distribution:
        """The distribution of the next token; at temperature 0 a single token. With a forced
        completion, its next token only."""
        return self._distribution(self._prepare(logits))

    def _distribution(self, candidates: Candidates) -> Distribution:
        if self.is_greedy:
            token = np.array([candidates.argmax()], np.int32)
            return Distribution(token, np.zeros(1, np.float32))
        return self._scaled(candidates)

    def distribution_of(self, logits: np.ndarray, token: int) -> Distribution:
        """The distribution that `token` was sampled from: with a forced completion, the one without
        it if `token` is none of its tokens."""
        constraint = self._constraint
        if constraint is None or not constraint.is_completing or constraint.allows(token):
            return self.distribution(logits)
        return self._distribution(constraint.unforced(self._without_constraint(logits)))

    def _scaled(self, candidates: Candidates) -> Distribution:
        """The distribution over the candidates that the pre-temperature processors have left."""
        allowed = candidates.allowed()
        candidates = Candidates(allowed.tokens, allowed.scores / self._divisor, owned=True)
        for processor in self.post_temperature:
            candidates = processor.apply(candidates)
        return Distribution(candidates.tokens, candidates.scores)

    def sample(self, logits: np.ndarray, noise: Noise, position: int, attempt: int = 0) -> int:
        """Sample the token at `position`: argmax of score + Gumbel noise over the allowed tokens,
        ties to the lowest id.

        Args:
            logits: float32 `[vocab_size]`.
            noise: The random numbers of the sequence.
            position: Text position of the sampled token.
            attempt: Counts repeated samples for the same position.

        Raises:
            ConstraintError: If no token is allowed.
        """
        if self._constraint is not None and self._constraint.is_completing:
            token = self._sample_fitting(logits, noise, position, attempt)
            if token is not None:
                return token
        if self.is_greedy:
            if not self.pre_temperature and self.combiner is None:
                return int(logits.argmax())
            if self._constraint is None:
                return self._prepare(logits).argmax()
            unconstrained = self._without_constraint(logits)
            token = unconstrained.argmax()  # mostly allowed, which saves computing the mask
            if self._constraint.allows(token):
                return token
            return self._constrained(unconstrained).argmax()
        if self.is_temperature_only:
            return self._sample_scaled(logits, noise, position, attempt)
        if self.truncation is not None and load_library() and logits.flags.c_contiguous:
            noise_key = (noise.seed, noise.stream, position, attempt)
            token = sample_truncated(logits, self.truncation, *noise_key)
            if token is not None:
                return token
        if self.post_temperature or self.combiner:
            return self.distribution(logits).sample(noise, position, attempt)
        candidates = self._without_constraint(logits)
        if self._constraint is not None:
            if candidates.tokens is None and self._constraint.forbids_little():
                token = self._sample_scaled(candidates.scores, noise, position, attempt)
                if self._constraint.allows(token):
                    return token
            candidates = self._constrained(candidates)
        return self._sample_among(candidates, noise, position, attempt)

    def _sample_fitting(
        self, logits: np.ndarray, noise: Noise, position: int, attempt: int
    ) -> int | None:
        """The token sampled as without the forced completion, from those behind which a completion
        fits. None if the first few are none."""
        assert self._constraint is not None
        candidates = self._constraint.unforced(self._without_constraint(logits))
        for num_tried in range(_MAX_TRIED):
            if not np.any(candidates.scores > -np.inf):
                return None
            token = self._sample_among(candidates, noise, position, attempt)
            if self._constraint.fits(token, num_tried):
                return token
            candidates = candidates.without(token)
        return None

    def _sample_among(
        self, candidates: Candidates, noise: Noise, position: int, attempt: int
    ) -> int:
        """Sample among the candidates that the pre-temperature processors have left."""
        if self.is_greedy:
            return candidates.argmax()
        if self.post_temperature or self.combiner:
            return self._scaled(candidates).sample(noise, position, attempt)
        if candidates.tokens is None:  # penalties, or a constraint that allows most tokens
            candidates.argmax()  # raises if no token is allowed
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
        """Sample among `tokens` (all if None) with the temperature only."""
        inverse = 1 / self.temperature
        if tokens is None and load_library() is not None and logits.flags.c_contiguous:
            noise_key = (noise.seed, noise.stream, position, attempt)
            return sample_gumbel(logits, inverse, *noise_key)
        # In float64, like the native kernels, so that both give the same token.
        scaled = logits.astype(np.float64) * inverse
        return Distribution(tokens, scaled).sample(noise, position, attempt)

    def _without_constraint(self, logits: np.ndarray) -> Candidates:
        """The candidates after all pre-temperature processors but the constraint."""
        candidates = Candidates(None, logits)
        for processor in (
            self.pre_temperature if self._constraint is None else self.pre_temperature[:-1]
        ):
            candidates = processor.apply(candidates)
        return candidates

    def _prepare(self, logits: np.ndarray) -> Candidates:
        return self._constrained(self._without_constraint(logits))

    def _constrained(self, candidates: Candidates) -> Candidates:
        """The candidates that the constraint allows."""
        if self._constraint is not None:
            candidates = self._constraint.apply(candidates)
        if not len(candidates):
            raise ConstraintError("no token is allowed here: bans and constraint forbid all tokens")
        return candidates


def constraint_of(sampler: Sampler) -> Constrained | None:
    """The processor of `sampler` that applies its constraint, or None."""
    return next((part for part in sampler.pre_temperature if isinstance(part, Constrained)), None)
