"""A limit on the number of reasoning tokens: when it is reached, the closing reasoning tag is
forced, and the answer goes on behind it."""

from __future__ import annotations

import codecs

import numpy as np

from anydecode.constraints.vocabulary import Vocabulary
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import REASONING_TAGS
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.processor import LogitsProcessor

_TAGS = [(opening.encode(), closing.encode()) for opening, closing in REASONING_TAGS.values()]
_MAX_TAG = max(len(tag) for tags in _TAGS for tag in tags)


class ThinkingBudget(LogitsProcessor):
    """Forces the closing reasoning tag after `budget` reasoning tokens.

    Reasoning starts behind any opening tag of `REASONING_TAGS`, in the text or at the end of the
    prompt. All reasoning of an answer shares one budget. An incomplete character at the end of the
    budget is completed first. A closing tag that has begun is continued.

    Args:
        budget: Maximum number of reasoning tokens.
        vocabulary: The bytes of the tokens.
        prompt_end: The text at the end of the prompt.
    """

    is_stateful = True

    def __init__(self, budget: int, vocabulary: Vocabulary, prompt_end: str) -> None:
        self.budget = budget
        self._vocabulary = vocabulary
        self._num_tokens = 0  # reasoning tokens so far
        self._tail = b""  # the last bytes of the text since the last tag
        self._closing: bytes | None = None  # the tag that ends the reasoning; None outside of it
        for opening, closing in _TAGS:
            if prompt_end.rstrip().encode().endswith(opening):
                self._closing = closing

    def apply(self, candidates: Candidates) -> Candidates:
        token = self._forced_token()
        if token is None:
            return candidates
        index, _ = candidates.positions(np.array([token], np.int32))
        if not len(index):
            raise ConstraintError(
                f"thinking_token_budget forces token {token}, which the other rules forbid here"
            )
        return candidates.keep(index)

    def advance(self, token: int) -> None:
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
        closing = self._closing
        if closing is None or self._num_tokens < self.budget:
            return None
        sizes = range(min(len(closing) - 1, len(self._tail)), 0, -1)
        matched = next((size for size in sizes if self._tail.endswith(closing[:size])), 0)
        if not matched and _ends_in_character(self._tail):
            return None
        tokens = self._vocabulary.tokenize_greedily(closing[matched:])
        return tokens[0] if tokens else None


def _ends_in_character(data: bytes) -> bool:
    """Whether `data`, which may start inside a character, ends inside one."""
    text = data.lstrip(bytes(range(0x80, 0xC0)))
    return codecs.utf_8_decode(text, "replace", False)[1] < len(text)
