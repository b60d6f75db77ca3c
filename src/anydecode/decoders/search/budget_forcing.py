"""Budget forcing (Muennighoff et al., "s1: Simple test-time scaling", arXiv:2501.19393): reasoning
that ends too early is continued, and reasoning that takes too long is ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anydecode.catalogue import Card, Range, Text, register
from anydecode.constraints.vocabulary import vocabulary
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.branches import restarted_branch
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.sequence_data import StopChecker
from anydecode.scoring.state import StateKey


@dataclass
class ForcingState:
    """What a restart needs.

    Attributes:
        tokens: All tokens; the last ones may be the beginning of the end marker, and are not
            emitted yet.
        logprobs: Their requested log-probabilities, None for forced tokens.
        num_thinking: The number of sampled tokens of the reasoning.
        num_extensions: How often the reasoning was continued.
        is_answering: Whether the reasoning has ended.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    num_thinking: int = 0
    num_extensions: int = 0
    is_answering: bool = False


_STATE: StateKey[ForcingState] = StateKey("budget-forcing", "state")


class NeverStops:
    """The stop checker of the branch, whose tokens are only emitted later.

    Args:
        outer: The stop checker of the sequence.
    """

    end_tokens = None

    def __init__(self, outer: StopChecker) -> None:
        self._outer = outer

    @property
    def remaining(self) -> int:
        return self._outer.remaining

    def stops_at(self, token: int) -> bool:
        return self._outer.stops_at(token)

    def push(self, tokens: list[int]) -> tuple[int, str | None]:
        return len(tokens), None


@register(
    Card(
        "budget-forcing",
        "search",
        paper="s1: Simple test-time scaling (arXiv:2501.19393)",
        exactness="lossy",
        summary="Continues reasoning that ends early with a word such as Wait, and ends reasoning"
        " that takes too long.",
        needs=("a model that reasons before a marker",),
        works_with=("truncation", "penalties", "guidance", "batches", "adapters"),
        deviations=(
            "the reasoning begins with the first generated token: the prompt ends with the opening"
            " tag, or the model generates it",
            "the budget is shared by all parts of the reasoning and counts sampled tokens only",
            "after the reasoning was continued, its tokens have new random numbers",
            "forced tokens have no log-probability (None), so the server refuses logprobs",
        ),
        remote={
            "limit": Range(0, 1_000_000),
            "extensions": Range(0, 64),
            "wait": Text(64),
            "end": Text(64),
            "final": Text(64),
        },
    )
)
class BudgetForcing(Decoder):
    """Plain decoding with control over the length of the reasoning.

    The reasoning ends with the marker `end`, or with a token that would end the generation. Up to
    `extensions` times the marker or that token is dropped, and `wait` takes its place. After
    `limit` sampled tokens of reasoning the marker and `final` are appended, and the answer follows.
    Without extensions and within the limit the text is that of plain decoding.

    Args:
        limit: Maximum number of tokens of reasoning.
        extensions: How often reasoning that ends is continued.
        wait: The text with which it is continued.
        end: The text that ends the reasoning.
        final: A text behind the marker, where that was forced, such as "Final Answer:".
    """

    def __init__(
        self,
        limit: int = 2048,
        extensions: int = 1,
        wait: str = "Wait",
        end: str = "</think>",
        final: str = "",
    ) -> None:
        if limit < 0 or not 0 <= extensions <= 4095:
            raise InvalidRequestError(
                "budget-forcing needs a limit of at least 0 and extensions from 0 to 4095, not"
                f" {limit} and {extensions}"
            )
        if not wait or not end:
            raise InvalidRequestError("budget-forcing needs texts for wait and end, not empty ones")
        self.limit = limit
        self.extensions = extensions
        self.wait = wait
        self.end = end
        self.final = final

    def prepare(self, sequence: Sequence) -> None:
        if constraint_of(sequence.sampler) is not None:
            raise UnsupportedCombinationError(
                "budget-forcing adds tokens that a constraint may forbid: it does not work with"
                " constraints; thinking_token_budget does"
            )
        if sequence.sampler.learns_from_logits:
            raise UnsupportedCombinationError("budget-forcing does not work with mirostat")
        for text in (self.wait, self.end + self.final):
            self._spelled(sequence, text)

    def decode(self, sequence: Sequence) -> Decoding:
        state = sequence.state.setdefault(_STATE, ForcingState())
        branch = self._branch(sequence, state, None)
        while not sequence.finished:
            if not state.is_answering and state.num_thinking >= self.limit:
                branch = self._cut(sequence, state, branch, self.end + self.final)
                state.is_answering = True
                self._emit(sequence, state, len(state.tokens))
                continue
            scores = yield branch.score()
            token = scores.sampled[-1]
            branch.emit([token])
            if state.is_answering:
                self._emit(sequence, state, len(state.tokens))
                continue
            state.num_thinking += 1
            if not self._has_ended(sequence, state):
                self._emit(sequence, state, self._num_settled(sequence, state))
            elif state.num_extensions < self.extensions and state.num_thinking < self.limit:
                state.num_extensions += 1
                branch = self._cut(sequence, state, branch, self.wait)
                self._emit(sequence, state, len(state.tokens))
            else:
                state.is_answering = True
                self._emit(sequence, state, len(state.tokens))
        branch.release()

    def _held(self, sequence: Sequence, state: ForcingState) -> list[bytes]:
        """The bytes of each token that is not emitted yet."""
        tokenizer = sequence.tokenizers[TARGET]
        return [tokenizer.token_bytes(token) for token in state.tokens[len(sequence.tokens) :]]

    def _has_ended(self, sequence: Sequence, state: ForcingState) -> bool:
        """Whether the last token has ended the reasoning."""
        if sequence.stops_at(state.tokens[-1]):
            return True
        return self.end.encode() in b"".join(self._held(sequence, state))

    def _num_settled(self, sequence: Sequence, state: ForcingState) -> int:
        """The number of tokens in which the marker cannot have begun."""
        held = self._held(sequence, state)
        if len(held) >= sequence.remaining:
            return len(state.tokens)
        return len(state.tokens) - len(held) + _num_before(held, self.end.encode())

    def _cut(
        self, sequence: Sequence, state: ForcingState, branch: Sequence, text: str
    ) -> Sequence:
        """Drop the marker, or what has begun of it, and append `text`. Returns the new branch."""
        held = self._held(sequence, state)
        marker = self.end.encode()
        count = len(held)
        if held and sequence.stops_at(state.tokens[-1]):
            count -= 1
        count = _num_before(held[:count], marker)
        kept = len(sequence.tokens) + count
        del state.tokens[kept:], state.logprobs[kept:]
        branch = self._branch(sequence, state, branch)
        tokens = self._spelled(sequence, text)
        branch.emit(tokens, logprobs=[None] * len(tokens))
        return branch

    def _branch(self, sequence: Sequence, state: ForcingState, old: Sequence | None) -> Sequence:
        """A branch with the tokens of `state`."""
        branch = restarted_branch(sequence, old, (), state.tokens, state.logprobs)
        if state.num_extensions:
            branch.noise = sequence.noise.forked(state.num_extensions)
        branch.sampler = sequence.sampler.fork()
        for token in state.tokens[len(sequence.tokens) :]:
            branch.sampler.advance(token)
        branch.stop_checker = NeverStops(sequence.stop_checker)
        return branch

    def _emit(self, sequence: Sequence, state: ForcingState, count: int) -> None:
        """Emit those of the first `count` tokens that have not been emitted."""
        first = len(sequence.tokens)
        sequence.emit(state.tokens[first:count], logprobs=state.logprobs[first:count])

    def _spelled(self, sequence: Sequence, text: str) -> list[int]:
        """The tokens of `text`, which may hold tags.

        Raises:
            InvalidRequestError: The tokenizer cannot spell it.
        """
        tokenizer: Any = sequence.tokenizers[TARGET]
        words = vocabulary(tokenizer, tokenizer.vocab_size)
        tokens = words.tokenize_greedily(text.encode())
        if tokens is None:
            raise InvalidRequestError(
                f"budget-forcing: the tokenizer has no tokens for {text!r}; use another text"
            )
        return tokens


def _num_before(held: list[bytes], marker: bytes) -> int:
    """The number of tokens before the one in which `marker`, or the longest beginning of it with
    which the text ends, begins."""
    text = b"".join(held)
    start = text.find(marker)
    if start < 0:
        sizes = range(min(len(text), len(marker) - 1), 0, -1)
        start = len(text) - next((size for size in sizes if text.endswith(marker[:size])), 0)
    count = length = 0
    for part in held:
        length += len(part)
        if length > start:
            break
        count += 1
    return count
