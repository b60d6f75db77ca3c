"""Validates what a mask cannot express, and emits an answer only once it is valid.

Any decoder runs on a branch of the sequence. The constraint's incremental validator checks each
token of the branch. An invalid value is removed and sampled again with different noise: values are
rejected as a whole, so the accepted ones follow the decoder's distribution given that they are
valid. Greedy decoding would repeat itself, so it continues with a ban of the token that completed
the value. After half of the tries, the answer is generated again under narrowed forms of the
constraint. What the validator reports as settled is emitted at once, and is generated only once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from anydecode.constraints.constraint import Constraint, IncrementalValidator
from anydecode.constraints.json.shortest_completion import max_work, search_completion
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.branches import check_one_text, restarted_branch
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.sampler import Sampler, constraint_of
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.sequence_data import StopChecker
from anydecode.scoring.state import StateKey

#: Maximum number of positions from which a completion of a long answer is searched.
_MAX_COMPLETION_STARTS = 32


@dataclass
class RetryState:
    """The state kept across restarts: the accepted tokens, token bans and counters."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    bans: dict[int, list[int]] = field(default_factory=dict)  # by position after the prompt
    num_invalid: dict[int, int] = field(default_factory=dict)  # invalid values by start
    num_tries: int = 0
    num_narrowed: int = 0
    num_discarded: int = 0
    num_released: int = 0  # tokens that may have been emitted
    settled_text: str = ""  # the part of the answer before the narrowed constraint applies

    def rewind(self, count: int) -> None:
        """Keeps the first `count` tokens. Bans after them belonged to another text."""
        del self.tokens[count:], self.logprobs[count:]
        self.bans = {position: bans for position, bans in self.bans.items() if position <= count}


_RETRY_STATE: StateKey[RetryState] = StateKey("validate-and-retry", "state")


class OutputBuffer:
    """A stop checker that buffers a branch's tokens. It stops the branch at the end of the answer
    or at an invalid value.

    Attributes:
        num_released: The number of tokens to emit: the settled ones but the last, which can still
            be banned if no token is allowed after it. It depends on the tokens alone, not on how
            many of them come at once.
    """

    def __init__(
        self,
        outer: StopChecker,
        validator: IncrementalValidator | None,
        tokens: Seq[int],
        num_emitted: int = 0,
        num_released: int = 0,
    ) -> None:
        self._outer = outer
        self._validator = validator
        self.num_emitted = num_emitted  # the first tokens, which `outer` has received
        self.tokens: list[int] = []
        self.num_valid: int | None = None  # tokens before the invalid value
        self.reason: str | None = None
        self.num_released = num_released
        for token in tokens:
            self._validate(token)
            self.tokens.append(token)
            self._release()

    @property
    def remaining(self) -> int:
        return self._outer.remaining - len(self.tokens) + self.num_emitted

    @property
    def num_settled(self) -> int:
        """The number of tokens that no retry removes."""
        return getattr(self._validator, "num_settled", 0)

    @property
    def settled_text(self) -> str:
        """The part of the answer that no retry removes."""
        return getattr(self._validator, "settled_text", "")

    def stops_at(self, token: int) -> bool:
        return self._outer.stops_at(token)

    @property
    def end_tokens(self) -> None:
        return None  # an invalid value can stop it at any token

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        for num_taken, token in enumerate(tokens):
            if self.reason is not None:
                return num_taken, self.reason
            self.num_valid = self._validate(token)
            self.tokens.append(token)
            if self.num_valid is not None:
                self.reason = "invalid"
            elif self._outer.stops_at(token):
                self.reason = "stop"
            elif self.remaining <= 0:
                self.reason = "length"
            else:
                self._release()
        return len(tokens), self.reason

    def _release(self) -> None:
        self.num_released = max(self.num_released, min(self.num_settled, len(self.tokens) - 1))

    def _validate(self, token: int) -> int | None:
        if self._validator is None:
            return None
        return self._validator.end() if self._outer.stops_at(token) else self._validator.push(token)


class ValidateAndRetry(Decoder):
    """The decoder `inner` with validation and retries under `constraint`, which must have been
    started."""

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
        self.requirements = inner.requirements

    def prepare(self, sequence: Sequence) -> None:
        check_one_text(self.inner, "this constraint is")
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        retry_state = sequence.state.setdefault(_RETRY_STATE, RetryState())
        branch: Sequence | None = None
        while not sequence.finished:
            branch = self._branch(sequence, retry_state, branch)
            output = branch.stop_checker
            assert isinstance(output, OutputBuffer)
            if output.reason is None:
                try:
                    yield from self._decode(sequence, branch, output)
                except ConstraintError as error:
                    self._ban_last_token(retry_state, output, error)
                    continue
            if sequence.finished:  # by a stop string in the settled text
                branch.release()
                return
            if output.reason == "invalid" or (output.reason == "length" and retry_state.num_tries):
                if self._retry(sequence, retry_state, branch, output):
                    continue
            if output.reason == "length" and self.close:
                self._close(sequence, output, _num_reasoning_tokens(branch), retry_state.num_tries)
            self._emit(sequence, branch, output.tokens)
            branch.release()
            return

    def _decode(self, sequence: Sequence, branch: Sequence, output: OutputBuffer) -> Decoding:
        """Decodes `branch`, and emits its released tokens as they come."""
        decoding = self.inner.decode(branch)
        try:
            action = next(decoding, None)
            while action is not None:
                if output.reason is None and output.num_released > len(sequence.tokens):
                    self._emit(sequence, branch, output.tokens[: output.num_released])
                    output.num_emitted = len(sequence.tokens)
                    if sequence.finished:
                        return
                try:
                    action = decoding.send((yield action))
                except StopIteration:
                    return
        finally:
            decoding.close()

    def _branch(
        self, sequence: Sequence, retry_state: RetryState, old: Sequence | None
    ) -> Sequence:
        """A branch with the accepted tokens, which reuses the cache of the previous branch."""
        if len(sequence.tokens) > len(retry_state.tokens):  # after a preemption
            retry_state.tokens = list(sequence.tokens)
            retry_state.logprobs = list(sequence.logprobs)
        tokens = retry_state.tokens
        branch = restarted_branch(
            sequence, old, self.requirements.runners, list(tokens), list(retry_state.logprobs)
        )
        branch.noise = (
            sequence.noise.forked(retry_state.num_tries)
            if retry_state.num_tries
            else sequence.noise
        )
        branch.sampler = self._sampler(sequence, retry_state)
        branch.stop_checker = OutputBuffer(
            sequence.stop_checker,
            self.constraint.incremental_validator(self.tokenizer),
            tokens,
            len(sequence.tokens),
            retry_state.num_released,
        )
        return branch

    def _sampler(self, sequence: Sequence, retry_state: RetryState) -> Sampler:
        sampler = sequence.sampler.fork()
        part = constraint_of(sampler)
        if part is not None and retry_state.num_narrowed:
            narrowed_constraint = self.constraint.narrowed(retry_state.num_narrowed - 1)
            assert narrowed_constraint is not None
            limit = sequence.remaining + len(sequence.tokens)
            state: Any = narrowed_constraint.with_prefix(retry_state.settled_text).start_with_limit(
                self.tokenizer, self.vocab_size, limit
            )
            state.limit_searches(retry_state.num_tries)
            for token in sequence.tokens:
                state.advance(token)
            part.state = state
        elif part is not None:
            limited: Any = part.state
            limited.limit_searches(retry_state.num_tries)
        for token in retry_state.tokens[len(sequence.tokens) :]:
            sampler.advance(token)
        bans = retry_state.bans.get(len(retry_state.tokens))
        if part is not None and bans:
            unbanned: Any = part.state
            part.state = unbanned.with_banned(bans)
        return sampler

    def _retry(
        self, sequence: Sequence, retry_state: RetryState, branch: Sequence, output: OutputBuffer
    ) -> bool:
        """Prepares the next try. Returns False if there is none left for an answer that is too
        long."""
        num_reasoning_tokens = _num_reasoning_tokens(branch)
        if output.reason == "length" and (
            retry_state.num_narrowed
            or max(num_reasoning_tokens, output.num_settled) == len(output.tokens)
            or not self._narrow(retry_state, branch, output, num_reasoning_tokens)
        ):
            return False
        retry_state.num_tries += 1
        retry_state.num_released = output.num_released
        if output.reason == "length":
            return True
        if retry_state.num_tries > self.tries:
            raise ConstraintError(
                f"no valid answer within {self.tries} tries:"
                f" {', '.join(self.constraint.report().checked[:3])}"
            )
        assert output.num_valid is not None
        tokens = output.tokens
        # After a forced completion, no tokens are left for retries.
        is_late = retry_state.num_tries * 2 > self.tries or _is_forced(branch)
        if is_late and self._narrow(retry_state, branch, output, num_reasoning_tokens):
            return True
        greedy = sequence.sampler.is_greedy or not self.requirements.can_sample
        num_invalid = retry_state.num_invalid[output.num_valid] = (
            retry_state.num_invalid.get(output.num_valid, 0) + 1
        )
        num_kept = (
            len(tokens) - 1
            if greedy
            else output.num_valid
            if num_invalid <= 4
            else max(num_reasoning_tokens, output.num_settled)
        )
        retry_state.num_discarded += len(tokens) - num_kept
        retry_state.tokens, retry_state.logprobs = list(tokens), list(branch.logprobs)
        retry_state.rewind(num_kept)
        if greedy:
            retry_state.bans.setdefault(num_kept, []).append(tokens[num_kept])
        return True

    def _narrow(
        self,
        retry_state: RetryState,
        branch: Sequence,
        output: OutputBuffer,
        num_reasoning_tokens: int,
    ) -> bool:
        """Restarts after the reasoning and the settled tokens under the next narrowed constraint
        that can be started. Returns False if there is none."""
        num_kept = max(num_reasoning_tokens, output.num_settled)
        for index in range(retry_state.num_narrowed, retry_state.num_narrowed + 4):
            narrowed_constraint = self.constraint.narrowed(index)
            if narrowed_constraint is None:
                return False
            narrowed_constraint = narrowed_constraint.with_prefix(output.settled_text)
            try:
                narrowed_constraint.start(self.tokenizer, self.vocab_size)
            except ConstraintError:
                continue
            retry_state.num_narrowed = index + 1
            retry_state.settled_text = output.settled_text
            retry_state.num_discarded += len(output.tokens) - num_kept
            retry_state.tokens, retry_state.logprobs = list(output.tokens), list(branch.logprobs)
            retry_state.rewind(num_kept)
            retry_state.bans = {}
            return True
        return False

    def _ban_last_token(
        self, retry_state: RetryState, output: OutputBuffer, error: ConstraintError
    ) -> None:
        """Handles a state in which no token is allowed: removes and bans the last token."""
        retry_state.num_tries += 1
        tokens = output.tokens
        retry_state.num_released = output.num_released
        if retry_state.num_tries > self.tries or len(tokens) <= output.num_released:
            raise ConstraintError(f"no valid answer within {self.tries} tries: {error}") from None
        num_kept = len(tokens) - 1
        retry_state.num_discarded += 1
        retry_state.tokens = list(tokens)
        retry_state.logprobs += [None] * (len(tokens) - len(retry_state.logprobs))
        retry_state.rewind(num_kept)
        retry_state.bans.setdefault(num_kept, []).append(tokens[num_kept])

    def _close(
        self, sequence: Sequence, output: OutputBuffer, num_reasoning_tokens: int, num_tries: int
    ) -> None:
        """Replaces the end of a long answer, after its first `num_reasoning_tokens` tokens, by the
        shortest completion."""
        limit = len(output.tokens)
        state = self.constraint.start(self.tokenizer, self.vocab_size)
        states = [state.fork()]
        for token in output.tokens:
            state.advance(token)
            states.append(state.fork())
        num_kept, step, work = limit, 1, 0
        for _ in range(_MAX_COMPLETION_STARTS):
            if num_kept < num_reasoning_tokens:
                return
            completion, spent = search_completion(
                states[num_kept],
                self.tokenizer,
                self.constraint.completion_hints,
                max_work(num_tries, work),
            )
            work += spent
            if completion is None or num_kept + len(completion) > limit:
                excess = 0 if completion is None else (num_kept + len(completion) - limit) // 2
                num_kept, step = num_kept - max(step, excess), step + (completion is None)
                continue
            text = output.tokens[:num_kept] + completion
            candidate = OutputBuffer(
                sequence.stop_checker, self.constraint.incremental_validator(self.tokenizer), ()
            )
            if candidate.push(text)[0] == len(text) and candidate.num_valid is None:
                output.tokens, output.reason = text, "stop"
                return
            num_kept, step = num_kept - step, 2 * step

    @staticmethod
    def _emit(sequence: Sequence, branch: Sequence, tokens: list[int]) -> None:
        """Emits those of the first `tokens` of the answer that have not been emitted."""
        first = len(sequence.tokens)
        num_taken = sequence.emit(tokens[first:])
        if sequence.compute_logprobs is not None:
            logprobs = branch.logprobs[first : first + num_taken]
            logprobs += [None] * (num_taken - len(logprobs))
            sequence.logprobs[first : first + num_taken] = logprobs


def _is_forced(sequence: Sequence) -> bool:
    """Whether the answer contains tokens of a forced completion."""
    part = constraint_of(sequence.sampler)
    return part is not None and bool(getattr(part.state, "is_forced", False))


def _num_reasoning_tokens(sequence: Sequence) -> int:
    """The number of tokens before the text that the constraint applies to."""
    part = constraint_of(sequence.sampler)
    return 0 if part is None else int(getattr(part.state, "num_reasoning_tokens", 0))


def validate_and_retry(
    decoder: Decoder, constraint: Constraint | None, tokenizer: Tokenizer, vocab_size: int
) -> Decoder:
    """Returns `decoder`, wrapped with validation if the started `constraint` needs it."""
    if constraint is None or (
        constraint.incremental_validator(tokenizer) is None and not constraint.close
    ):
        return decoder
    return ValidateAndRetry(decoder, constraint, tokenizer, vocab_size)


def enforcement_report(constraint: Constraint, sequence: Sequence) -> dict[str, Any]:
    """How a constraint was enforced in a finished answer.

    Returns:
        The constraint's report, and: "complete" (whether the answer is complete), "steered"
        (whether a completion was forced), "tries", "narrowed" and "discarded" (tokens).
    """
    part = constraint_of(sequence.sampler)
    is_complete = part is not None and bool(getattr(part.state, "can_stop", True))
    retry_state = sequence.state.get(_RETRY_STATE, RetryState())
    return {
        **constraint.report().to_dict(),
        "complete": is_complete and sequence.finish_reason == "stop",
        "steered": _is_forced(sequence),
        "tries": retry_state.num_tries,
        "narrowed": bool(retry_state.num_narrowed),
        "discarded": retry_state.num_discarded,
    }
