"""Checks what no mask expresses, and says an answer only once it has passed.

Any decoder runs on a branch of the sequence. The watch of the constraint looks at each token the
branch says. A value that closes wrong is taken back, and drawn again with noise of its own: values
are rejected whole, so what passes is distributed as the decoder's values given that they are valid.
Greedy decoding, which would only repeat itself, goes on without the token that closed the value.
When half of the tries are used up the answer is begun again under narrowed forms of the constraint.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from anydecode.constraints.constraint import Constraint, IncrementalValidator
from anydecode.constraints.shortest_completion import shortest_completion
from anydecode.decoders.decoder import Decoder
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.constrained import constraint_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence, StopChecker

KEY = "checked"
#: Places from which the end of a long answer is looked for.
_MOST_ENDINGS = 32


@dataclass
class RetryState:
    """What must survive a restart: the tokens that are kept, and what was tried."""

    kept: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    banned: dict[int, list[int]] = field(default_factory=dict)  # by place behind the prompt
    seen: dict[int, int] = field(default_factory=dict)  # wrong values by where they began
    tries: int = 0
    narrowed: int = 0
    discarded: int = 0

    def rewind(self, count: int) -> None:
        """Keep the first `count` tokens; bans behind them belonged to another text."""
        del self.kept[count:], self.logprobs[count:]
        self.banned = {
            position: bans for position, bans in self.banned.items() if position <= count
        }


class OutputBuffer:
    """Takes a branch's tokens, ends it where the answer ends or a value is wrong."""

    def __init__(
        self, outer: StopChecker, watch: IncrementalValidator | None, kept: Seq[int]
    ) -> None:
        self._outer = outer
        self._watch = watch
        self.tokens: list[int] = []
        self.wrong: int | None = None  # tokens before the wrong value
        self.reason: str | None = None
        for token in kept:
            self._watch_over(token)
            self.tokens.append(token)

    @property
    def remaining(self) -> int:
        return self._outer.remaining - len(self.tokens)

    def stops_at(self, token: int) -> bool:
        return self._outer.stops_at(token)

    @property
    def end_tokens(self) -> None:
        return None  # a wrong value may end it at any token

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        for taken, token in enumerate(tokens):
            if self.reason is not None:
                return taken, self.reason
            self.wrong = self._watch_over(token)
            self.tokens.append(token)
            if self.wrong is not None:
                self.reason = "wrong"
            elif self._outer.stops_at(token):
                self.reason = "stop"
            elif self.remaining <= 0:
                self.reason = "length"
        return len(tokens), self.reason

    def _watch_over(self, token: int) -> int | None:
        if self._watch is None:
            return None
        return self._watch.end() if self._outer.stops_at(token) else self._watch.push(token)


class ValidateAndRetry(Decoder):
    """`inner` under `constraint`, which must have been started."""

    def __init__(
        self,
        inner: Decoder,
        constraint: Constraint,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self.inner = inner
        self.constraint = constraint
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.tries = constraint.tries
        self.close = constraint.close
        self.runners = inner.runners
        self.causal = inner.causal
        self.can_sample = inner.can_sample

    def prepare(self, sequence: Sequence) -> None:
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        trials: RetryState = sequence.state.setdefault(KEY, RetryState())
        branch: Sequence | None = None
        while not sequence.finished:
            branch = self._branch(sequence, trials, branch)
            hold = branch.stop_checker
            assert isinstance(hold, OutputBuffer)
            if hold.reason is None:
                try:
                    yield from self.inner.decode(branch)
                except ConstraintError as error:
                    self._dead_end(trials, hold, error)
                    continue
            if hold.reason == "wrong" or (hold.reason == "length" and trials.tries):
                if self._retry(sequence, trials, branch, hold):
                    continue
            if hold.reason == "length" and self.close:
                self._close(sequence, hold, _tokens_before(branch))
            self._say(sequence, branch, hold)
            branch.release()
            return

    def _branch(self, sequence: Sequence, trials: RetryState, old: Sequence | None) -> Sequence:
        """A branch that has said what is kept, with the memory of the one before."""
        kept = trials.kept
        if old is None:
            sequence.context()
            branch = sequence.fork()
        else:
            branch = old.branch()
            old.release()
        branch.noise = sequence.noise.forked(trials.tries) if trials.tries else sequence.noise
        branch.sampler = self._policy(sequence, trials)
        branch.annotate, branch.trace = sequence.annotate, sequence.trace
        branch.tokens = sequence.tokens + kept
        branch.logprobs = list(trials.logprobs)
        branch.finish_reason = None
        branch.state = {}
        branch.stop_checker = OutputBuffer(
            sequence.stop_checker, self.constraint.incremental_validator(self.tokenizer), kept
        )
        length = len(sequence.prompt) + len(branch.tokens)
        for runner in ("target", *self.runners):
            if branch.is_open(runner) and branch.context(runner).length >= length:
                branch.truncate(length - 1, runner)
        return branch

    def _policy(self, sequence: Sequence, trials: RetryState) -> Sampler:
        sampler = sequence.sampler.fork()
        part = constraint_of(sampler)
        if part is not None and trials.narrowed:
            narrower = self.constraint.narrowed(trials.narrowed - 1)
            assert narrower is not None
            limit = sequence.remaining
            part.state = narrower.begin(self.tokenizer, self.vocab_size, limit)
        for token in trials.kept:
            sampler.advance(token)
        banned = trials.banned.get(len(trials.kept))
        if part is not None and banned:
            state: Any = part.state
            part.state = state.without(banned)
        return sampler

    def _retry(
        self, sequence: Sequence, trials: RetryState, branch: Sequence, hold: OutputBuffer
    ) -> bool:
        """Set up the next try; False where there is nothing left to try for a long answer."""
        before = _tokens_before(branch)
        if hold.reason == "length" and (
            trials.narrowed
            or before == len(hold.tokens)
            or not self._narrow(trials, branch, hold, before)
        ):
            return False
        trials.tries += 1
        if hold.reason == "length":
            return True
        if trials.tries > self.tries:
            raise ConstraintError(
                f"no valid answer within {self.tries} tries:"
                f" {', '.join(self.constraint.report().checked[:3])}"
            )
        assert hold.wrong is not None
        said = hold.tokens
        late = trials.tries * 2 > self.tries or _is_steered(branch)  # as long as it may get
        if late and self._narrow(trials, branch, hold, before):
            return True
        greedy = sequence.sampler.is_greedy or not self.inner.can_sample
        seen = trials.seen[hold.wrong] = trials.seen.get(hold.wrong, 0) + 1
        keep = len(said) - 1 if greedy else hold.wrong if seen <= 4 else before
        trials.discarded += len(said) - keep
        trials.kept, trials.logprobs = list(said), list(branch.logprobs)
        trials.rewind(keep)
        if greedy:
            trials.banned.setdefault(keep, []).append(said[keep])
        return True

    def _narrow(
        self, trials: RetryState, branch: Sequence, hold: OutputBuffer, before: int
    ) -> bool:
        """Begin again, behind the first `before` tokens, under the next narrowed constraint that
        has a start."""
        for number in range(trials.narrowed, trials.narrowed + 4):
            narrower = self.constraint.narrowed(number)
            if narrower is None:
                return False
            try:
                narrower.start(self.tokenizer, self.vocab_size)
            except ConstraintError:
                continue
            trials.narrowed = number + 1
            trials.discarded += len(hold.tokens) - before
            trials.kept, trials.logprobs = list(hold.tokens), list(branch.logprobs)
            trials.rewind(before)
            trials.banned = {}
            return True
        return False

    def _dead_end(self, trials: RetryState, hold: OutputBuffer, error: ConstraintError) -> None:
        """Nothing is allowed any more: take back the last token, too."""
        trials.tries += 1
        said = hold.tokens
        if trials.tries > self.tries or not said:
            raise ConstraintError(f"no valid answer within {self.tries} tries: {error}") from None
        keep = len(said) - 1
        trials.discarded += 1
        trials.kept = list(said)
        trials.logprobs += [None] * (len(said) - len(trials.logprobs))
        trials.rewind(keep)
        trials.banned.setdefault(keep, []).append(said[keep])

    def _close(self, sequence: Sequence, hold: OutputBuffer, before: int) -> None:
        """Replace the end of a long answer, behind its first `before` tokens, by the shortest one
        that makes it whole."""
        limit = len(hold.tokens)
        state = self.constraint.start(self.tokenizer, self.vocab_size)
        states = [state.fork()]
        for token in hold.tokens:
            state.advance(token)
            states.append(state.fork())
        keep, step = limit, 1
        for _ in range(_MOST_ENDINGS):
            if keep < before:
                return
            ending = shortest_completion(states[keep], self.tokenizer, self.constraint.hints)
            if ending is None or keep + len(ending) > limit:
                over = 0 if ending is None else (keep + len(ending) - limit) // 2
                keep, step = keep - max(step, over), step + (ending is None)
                continue
            text = hold.tokens[:keep] + ending
            trial = OutputBuffer(
                sequence.stop_checker, self.constraint.incremental_validator(self.tokenizer), ()
            )
            if trial.push(text)[0] == len(text) and trial.wrong is None:
                hold.tokens, hold.reason = text, "stop"
                return
            keep, step = keep - step, 2 * step

    @staticmethod
    def _say(sequence: Sequence, branch: Sequence, hold: OutputBuffer) -> None:
        first = len(sequence.tokens)
        taken = sequence.emit(hold.tokens)
        if sequence.annotate is not None:
            notes = branch.logprobs[:taken] + [None] * (taken - len(branch.logprobs))
            sequence.logprobs[first : first + taken] = notes


def _is_steered(sequence: Sequence) -> bool:
    """Whether the answer has taken the short way to its end."""
    part = constraint_of(sequence.sampler)
    return part is not None and bool(getattr(part.state, "steered", False))


def _tokens_before(sequence: Sequence) -> int:
    """How many tokens of the answer came before what its constraint is about."""
    part = constraint_of(sequence.sampler)
    return 0 if part is None else int(getattr(part.state, "before", 0))


def validate_and_retry(
    decoder: Decoder, constraint: Constraint | None, tokenizer: Tokenizer, vocab_size: int
) -> Decoder:
    """`decoder`, with checks around it where a started `constraint` needs them."""
    if constraint is None or (
        constraint.incremental_validator(tokenizer) is None and not constraint.close
    ):
        return decoder
    return ValidateAndRetry(decoder, constraint, tokenizer, vocab_size)


def outcome(constraint: Constraint, sequence: Sequence) -> dict[str, Any]:
    """How a constraint was enforced in a finished answer: its report, whether the answer is
    complete under it, and what the checks cost."""
    part = constraint_of(sequence.sampler)
    whole = part is not None and bool(getattr(part.state, "may_stop", True))
    trials: RetryState = sequence.state.get(KEY, RetryState())
    return {
        **constraint.report().to_dict(),
        "complete": whole and sequence.finish_reason == "stop",
        "steered": _is_steered(sequence),
        "tries": trials.tries,
        "narrowed": bool(trials.narrowed),
        "discarded": trials.discarded,
    }
