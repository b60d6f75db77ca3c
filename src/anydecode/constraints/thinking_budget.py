"""A limit on the number of reasoning tokens: when it is reached, the closing reasoning tag is
forced, and the answer goes on behind it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np

from anydecode.constraints.vocabulary import Vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import REASONING_TAGS, Tokenizer
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor

#: The messages of gpt-oss: how one with reasoning and any other one start, and their channels.
_ANALYSIS, _MESSAGE = b"<|channel|>analysis<|message|>", b"<|start|>"
_CHANNEL, _REASONING_CHANNEL = b"<|channel|>", b"analysis"
_NEXT_MESSAGE = "<|end|><|start|>assistant"
_ANSWER = _NEXT_MESSAGE + "<|channel|>final<|message|>"
_TAGS = [(opening.encode(), closing.encode()) for opening, closing in REASONING_TAGS.values()]
_TAGS.append((_ANALYSIS, _MESSAGE))
_MAX_TAG = max(len(tag) for tags in _TAGS for tag in tags)


class ThinkingBudget(LogitsProcessor):
    """Forces the closing reasoning tag after `budget` reasoning tokens.

    Reasoning starts behind any opening tag of `REASONING_TAGS`, or on the channel `analysis` of
    gpt-oss, in the text or at the end of the prompt. All reasoning of an answer shares one budget.
    An incomplete character at the end of the budget is completed first. A closing tag that has
    begun is continued. A message of gpt-oss is followed by the start of its answer, or with tools
    by a message on another channel, which the model chooses.

    Args:
        budget: Maximum number of reasoning tokens.
        vocabulary: The bytes of the tokens.
        prompt_end: The text at the end of the prompt.
        next_message: The tokens from the end of a message of gpt-oss on, see `next_message`.
        may_call: Whether the answer may have tool calls.
    """

    is_stateful = True

    def __init__(
        self,
        budget: int,
        vocabulary: Vocabulary,
        prompt_end: str,
        *,
        next_message: Sequence[int] = (),
        may_call: bool = False,
    ) -> None:
        self.budget = budget
        self._vocabulary = vocabulary
        self._next_message = tuple(next_message)
        self._may_call = may_call
        self._last_tokens: tuple[int, ...] = ()  # not more than there are in `next_message`
        self._is_between_messages = False  # whether `next_message` is being forced
        self._num_tokens = 0  # reasoning tokens so far
        self._tail = b""  # the last bytes of the text since the last tag
        self._closing: bytes | None = None  # the tag that ends the reasoning; None outside of it
        for opening, closing in _TAGS:
            if prompt_end.rstrip().encode().endswith(opening):
                self._closing = closing

    def apply(self, candidates: Candidates) -> Candidates:
        token = self._forced_token()
        if token is None:
            return self._without_reasoning(candidates)
        index, _ = candidates.positions(np.array([token], np.int32))
        if not len(index):
            raise ConstraintError(
                f"thinking_token_budget forces token {token}, which the other rules forbid here"
            )
        return candidates.keep(index)

    def advance(self, token: int) -> None:
        if self._closing == _MESSAGE and token == self._forced_token():
            self._is_between_messages = True
        self._last_tokens = (*self._last_tokens, token)[-len(self._next_message) :]
        if self._last_tokens == self._next_message:
            self._is_between_messages = False
        self._num_tokens += self._closing is not None
        text = self._tail + self._vocabulary.token_bytes[token]
        while (found := self._next_tag(text)) is not None:
            end, self._closing = found
            text = text[end:]
        self._tail = text[-_MAX_TAG:]

    def fork(self) -> ThinkingBudget:
        branch = object.__new__(ThinkingBudget)
        branch.__dict__.update(self.__dict__)
        return branch

    def _next_tag(self, text: bytes) -> tuple[int, bytes | None] | None:
        """The end of the first tag in `text` that starts or ends reasoning, and the closing tag
        after it; None if there is no tag."""
        if self._closing is not None:
            start = text.find(self._closing)
            return None if start < 0 else (start + len(self._closing), None)
        starts = [(text.find(opening), opening, closing) for opening, closing in _TAGS]
        found = [
            (start + len(opening), closing) for start, opening, closing in starts if start >= 0
        ]
        return min(found) if found else None

    def _forced_token(self) -> int | None:
        """The token that must come next; None if all are allowed."""
        if self._is_between_messages:
            return self._next_message[self._num_matched()]
        closing = self._closing
        if closing is None or self._num_tokens < self.budget:
            return None
        if closing == _MESSAGE:
            num_matched = self._num_matched()
            if not self._next_message or (not num_matched and _ends_in_character(self._tail)):
                return None
            return self._next_message[num_matched]
        sizes = range(min(len(closing) - 1, len(self._tail)), 0, -1)
        matched = next((size for size in sizes if self._tail.endswith(closing[:size])), 0)
        if not matched and _ends_in_character(self._tail):
            return None
        tokens = self._vocabulary.tokenize_greedily(closing[matched:])
        return tokens[0] if tokens else None

    def _num_matched(self) -> int:
        """The number of tokens of `next_message` that the text ends with."""
        text, message = self._last_tokens, self._next_message
        sizes = range(min(len(text), len(message) - 1), 0, -1)
        return next((size for size in sizes if text[-size:] == message[:size]), 0)

    def _without_reasoning(self, candidates: Candidates) -> Candidates:
        """The candidates without those that start more reasoning where the budget is spent and the
        model chooses the channel."""
        is_choice = self._may_call and self._tail.endswith(_CHANNEL)
        if not is_choice or self._num_tokens < self.budget:
            return candidates
        sizes = range(1, len(_REASONING_CHANNEL))
        starts = [_REASONING_CHANNEL[:size] for size in sizes]
        tokens = [token for start in starts for token in self._vocabulary.tokens_equal_to(start)]
        tokens += self._vocabulary.tokens_with_prefix(_REASONING_CHANNEL)
        index, _ = candidates.positions(np.array(sorted(tokens), np.int32))
        kept = np.setdiff1d(np.arange(len(candidates)), index)
        return candidates.keep(kept) if len(kept) else candidates


def next_message(tokenizer: Tokenizer, vocabulary: Vocabulary, *, may_call: bool) -> list[int]:
    """The tokens that end a message of gpt-oss and start its answer; with tools, those that start a
    message whose channel is the model's choice. Empty if the vocabulary has no such messages."""
    if vocabulary.tokenize_greedily(_ANALYSIS) is None:
        return []
    return tokenizer.encode(_NEXT_MESSAGE if may_call else _ANSWER, special=False)


def _ends_in_character(data: bytes) -> bool:
    """Whether `data`, which may start inside a character, ends inside one."""
    text = data.lstrip(bytes(range(0x80, 0xC0)))
    return codecs.utf_8_decode(text, "replace", False)[1] < len(text)
