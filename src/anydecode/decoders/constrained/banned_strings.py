"""Rewinds when the text contains a banned string.

Any decoder runs on a branch of the sequence. A token of the branch is final, and emitted, as soon
as no banned string can begin in it: the text does not end with the beginning of one that starts
there. When a token completes a banned string, the branch is cut before the token in which the
string begins, or before the first token that is not final. The removed token is banned at this
position, and the decoder goes on with new noise. So at every position a token comes from the
sampler's distribution without the tokens banned there, independent of the text that was removed. A
ban belongs to the text before it: it ends when a rewind goes to an earlier position.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, cast

from anydecode.constraints.tools.stream import overlap
from anydecode.decoders.constrained.unbiased_tokenization import PromptBoundaryDecoder
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.branches import TextStopChecker, check_one_text, restarted_branch
from anydecode.errors import ConstraintError, UnsupportedCombinationError
from anydecode.models.tokenizer import Tokenizer
from anydecode.sampling.bias import FirstTokenBan
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import SequenceState, StateKey

#: Maximum number of rewinds per answer. Each has noise of its own.
MAX_REWINDS = 1000
#: The finish reason of an answer that cannot go on without a banned string.
FINISH_REASON = "content_filter"


@dataclass
class RewindState:
    """The state kept across restarts: the branch and the bans.

    Attributes:
        tokens: The tokens of the branch; the sequence has the first of them.
        logprobs: Their log-probabilities.
        decoder_state: What the decoder on the branch keeps across a restart.
        bans: Banned tokens by position after the prompt.
        num_rewinds: Number of rewinds so far.
    """

    decoder_state: SequenceState
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    bans: dict[int, list[int]] = field(default_factory=dict)
    num_rewinds: int = 0


_STATE: StateKey[RewindState] = StateKey("banned-strings", "state")


class StringMatcher:
    """Finds the first of several strings that a growing text completes.

    Args:
        strings: The strings.
        ignore_case: Whether upper and lower case are equal.
    """

    def __init__(self, strings: Seq[str], ignore_case: bool = False) -> None:
        self._ignore_case = ignore_case
        self._strings = [self._folded(one) for one in strings]
        self._text = ""  # the end of the text that may be the beginning of a string
        self._tokens: list[int] = []  # by character of it, the token in which the character begins
        self._incomplete = b""  # bytes of an incomplete character
        self._incomplete_token = 0  # the token in which it begins

    @property
    def max_bytes(self) -> int:
        """Maximum size of a string in the text."""
        return 4 * max(map(len, self._strings))

    def push(self, token: int, data: bytes) -> int | None:
        """Append the bytes of the token with index `token`. Returns the index of the token in which
        the completed string begins; None if no string is complete."""
        first = self._incomplete_token if self._incomplete else token
        data = self._incomplete + data
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete, num_searched = data[num_used:], len(self._text)
        self._incomplete_token = token if text else first
        for index, character in enumerate(text):
            folded = self._folded(character)
            self._text += folded
            self._tokens += [token if index else first] * len(folded)
        found = [
            (start + len(string), start)
            for string in self._strings
            if (start := self._text.find(string, max(0, num_searched + 1 - len(string)))) >= 0
        ]
        if found:
            return self._tokens[min(found)[1]]
        num_kept = max(overlap(self._text, string) for string in self._strings)
        self._text = self._text[len(self._text) - num_kept :]
        self._tokens = self._tokens[len(self._tokens) - num_kept :]
        return None

    def occurs_in(self, text: str) -> bool:
        """Whether `text` contains one of the strings."""
        text = self._folded(text)
        return any(string in text for string in self._strings)

    @property
    def first_held(self) -> int | None:
        """The index of the first token in which a string may have begun; None if there is none."""
        if self._tokens:
            return self._tokens[0]
        return self._incomplete_token if self._incomplete else None

    def _folded(self, text: str) -> str:
        return text.casefold() if self._ignore_case else text


class RewindChecker:
    """A stop checker of the branch: applies the stop rules, and stops at a banned string.

    Args:
        outer: The stop checker of the sequence, which has received the final tokens.
        matcher: Finds the banned strings.
        tokenizer: Gives the bytes of each token.
        tokens: The tokens of the branch.
        num_final: The number of final tokens among them.
    """

    def __init__(
        self,
        outer: TextStopChecker,
        matcher: StringMatcher,
        tokenizer: Tokenizer,
        tokens: Seq[int],
        num_final: int,
    ) -> None:
        self._stop_checker = outer.fork()
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._num_tokens = self.num_final = num_final
        self.reason: str | None = None
        self.rewind_to: int | None = None  # the number of tokens to keep
        self._read_final(tokens[:num_final])
        self.push(list(tokens[num_final:]))

    @property
    def remaining(self) -> int:
        return self._stop_checker.remaining

    def stops_at(self, token: int) -> bool:
        return self._stop_checker.stops_at(token)

    @property
    def end_tokens(self) -> None:
        return None  # a banned string can stop it at any token

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        for num_taken, token in enumerate(tokens):
            if self.reason is not None:
                return num_taken, self.reason
            start = self._matcher.push(self._num_tokens, self._tokenizer.token_bytes(token))
            self._num_tokens += 1
            _, self.reason = self._stop_checker.push([token])
            if start is not None and self._is_in_answer():
                self.reason, self.rewind_to = "banned string", max(start, self.num_final)
            elif start is None:
                held = self._matcher.first_held
                self.num_final = max(self.num_final, self._num_tokens if held is None else held)
        return len(tokens), self.reason

    def _read_final(self, tokens: Seq[int]) -> None:
        """Pass the end of the final text to the matcher: a string may begin there and end later."""
        parts: list[bytes] = []
        num_bytes = 0
        for token in reversed(tokens):
            if num_bytes >= self._matcher.max_bytes:
                break
            parts.append(self._tokenizer.token_bytes(token))
            num_bytes += len(parts[-1])
        self._matcher.push(0, b"".join(reversed(parts)))

    def _is_in_answer(self) -> bool:
        """Whether the banned string just found is a part of the answer: a stop string or token may
        have ended the answer before it."""
        return self.reason is None or self._matcher.occurs_in(self._stop_checker.text)


class BannedStrings(Decoder):
    """The decoder `inner` with rewinds at banned strings.

    Args:
        inner: A decoder that samples from left to right.
        strings: The banned strings.
        ignore_case: Whether they match in upper and lower case.
        tokenizer: The tokenizer of the model.
    """

    def __init__(
        self, inner: Decoder, strings: Seq[str], ignore_case: bool, tokenizer: Tokenizer
    ) -> None:
        self.inner = inner
        self.strings = strings
        self.ignore_case = ignore_case
        self.tokenizer = tokenizer
        self.requirements = inner.requirements

    def prepare(self, sequence: Sequence) -> None:
        if isinstance(self.inner, PromptBoundaryDecoder):
            raise UnsupportedCombinationError(
                f"{self.inner.card.key} changes the prompt's tokens: it does not support"
                " banned_strings"
            )
        check_one_text(self.inner, "banned_strings are")
        self.inner.prepare(sequence)

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.get(_STATE)
        if state is None:
            state = sequence.state[_STATE] = RewindState(_copied(sequence.state))
        branch: Sequence | None = None
        while not sequence.finished:
            branch = self._branch(sequence, state, branch)
            checker = branch.stop_checker
            assert isinstance(checker, RewindChecker)
            try:
                yield from self._decode(sequence, branch, state, checker)
            except ConstraintError:
                if len(state.tokens) not in state.bans:
                    raise
                self._end(sequence, state)  # every token is banned here
                break
            if checker.rewind_to is not None:
                self._emit(sequence, state, checker.num_final)
                if not self._rewind(sequence, state, checker.rewind_to):
                    self._end(sequence, state)
            elif branch.finished:
                self._emit(sequence, state, len(state.tokens))
        sequence.state.update(state.decoder_state)
        if branch is not None:
            branch.release()

    def _decode(
        self, sequence: Sequence, branch: Sequence, state: RewindState, checker: RewindChecker
    ) -> Decoding:
        """Decodes `branch`, and emits its tokens as they become final. Returns at a banned string,
        at the end, and after the first token if some tokens are banned there."""
        banned_at = len(state.tokens) if len(state.tokens) in state.bans else None
        decoding = self.inner.decode(branch)
        try:
            action = next(decoding, None)
            while action is not None:
                if checker.reason is None:
                    self._emit(sequence, state, checker.num_final)
                    if banned_at is not None and len(state.tokens) > banned_at:
                        return
                action = decoding.send((yield action))
        except StopIteration:
            return
        finally:
            decoding.close()

    def _branch(self, sequence: Sequence, state: RewindState, old: Sequence | None) -> Sequence:
        """A branch with the tokens of `state`."""
        branch = restarted_branch(
            sequence, old, self.requirements.runners, state.tokens, state.logprobs
        )
        branch.state = state.decoder_state
        branch.noise = (
            sequence.noise.forked(state.num_rewinds) if state.num_rewinds else sequence.noise
        )
        sampler = sequence.sampler.fork()
        num_emitted = len(sequence.tokens)
        for token in state.tokens[num_emitted:]:
            sampler.advance(token)
        if banned := state.bans.get(len(state.tokens)):
            sampler = Sampler(
                sampler.temperature,
                [FirstTokenBan(banned), *sampler.pre_temperature],
                sampler.post_temperature,
                sampler.combiner,
            )
        branch.sampler = sampler
        branch.stop_checker = RewindChecker(
            cast(TextStopChecker, sequence.stop_checker),
            StringMatcher(self.strings, self.ignore_case),
            self.tokenizer,
            state.tokens,
            num_emitted,
        )
        return branch

    @staticmethod
    def _rewind(sequence: Sequence, state: RewindState, count: int) -> bool:
        """Keeps the first `count` tokens and bans the next one. Returns False if the budget of
        rewinds is spent, or if the decoder does not heed bans."""
        token = state.tokens[count]
        del state.tokens[count:], state.logprobs[count:]
        state.bans = {at: tokens for at, tokens in state.bans.items() if at <= count}
        banned = state.bans.setdefault(count, [])
        if token in banned or state.num_rewinds == MAX_REWINDS:
            return False
        banned.append(token)
        state.num_rewinds += 1
        state.decoder_state = _copied(sequence.state)
        return True

    def _end(self, sequence: Sequence, state: RewindState) -> None:
        """Ends the answer before a banned string."""
        self._emit(sequence, state, len(state.tokens))
        if not sequence.finished:
            cast(TextStopChecker, sequence.stop_checker).end(FINISH_REASON)
            sequence.finish_reason = FINISH_REASON

    @staticmethod
    def _emit(sequence: Sequence, state: RewindState, count: int) -> None:
        """Emits those of the first `count` tokens that have not been emitted."""
        first = len(sequence.tokens)
        if count > first:
            sequence.emit(state.tokens[first:count], logprobs=state.logprobs[first:count])


def _copied(state: SequenceState) -> SequenceState:
    """A copy of the entries of `state`."""
    copied = SequenceState()
    copied.update(state)
    return copied
