"""Search for the shortest completion of a text under a constraint."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.byte_cache import byte_cached
from anydecode.constraints.constraint import CompletionHints, ConstraintState
from anydecode.constraints.vocabulary import vocabulary
from anydecode.models.tokenizer import Tokenizer

#: Bytes that complete a JSON text outside of strings, the most promising first.
_CLOSING_BYTES = b'}]":,0entflu{[1'
#: Cost, in tokens, of a step other than the most promising one: such steps are tried last.
_DETOUR_COST = 1000
#: The same for a token that leaves a sequence with unchanging masks, such as digits.
_EXIT_COST = 16
#: The same for a token that leaves a sequence of equal closing brackets, which end nested values.
_NESTED_EXIT_COST = 128
#: Maximum number of branching states, and of masks, before the search gives up.
_MAX_BRANCHES = 600
_MAX_MASKS = 6000
#: Maximum work of one search, and of all searches of the first try of an answer. The unit is the
#: check of one token of a value or name, about 0.1 microseconds; each check of a text, each mask
#: and each character tried as an exit cost some more.
MAX_WORK, MAX_WORK_PER_TRY = 300_000, 1_000_000
_WORK_PER_CHECK, _WORK_PER_MASK, _WORK_PER_EXIT = 8, 800, 100
#: A mask within a constant takes time for each of its characters.
_CHARACTERS_PER_WORK = 6
#: Maximum number of continuations of one state, and of values from the hints among them.
_MAX_CONTINUATIONS = 5
_MAX_VALUES = 2
#: Maximum size of the cached tokens of values and names, in bytes.
_MAX_BYTEWISE_BYTES = 16 << 20
#: A mask that allows more printable characters than this is taken to be inside a string.
_MAX_OUTSIDE_STRING = 32


def shortest_completion(
    state: ConstraintState, tokenizer: Tokenizer, hints: CompletionHints | None = None
) -> list[int] | None:
    """Returns the shortest completion found by a best-first search.

    Short continuations and closing brackets are tried first. The completion is then tokenized with
    as few tokens as possible.

    Args:
        state: The constraint's state after the text; not changed.
        tokenizer: The tokenizer of the model.
        hints: Values and names of the schema that the search may try.

    Returns:
        Token ids, the last one an end-of-text token; None if no completion was found.
    """
    return search_completion(state, tokenizer, hints, MAX_WORK)[0]


def search_completion(
    state: ConstraintState, tokenizer: Tokenizer, hints: CompletionHints | None, max_work: int
) -> tuple[list[int] | None, int]:
    """`shortest_completion` with at most about `max_work` of work, and the work it took."""
    search = _Search(state, _vocabulary(tokenizer), hints, max_work)
    tokens = search.run()
    completion = None if tokens is None else _retokenized(state, _vocabulary(tokenizer), tokens)
    return completion, search.work


def max_work(num_tries: int, work: int) -> int:
    """Maximum work of the next search of an answer, a function of its text and number of tries
    alone.

    A try has the less work the more tries there were before it: all tries together have only some
    times the work of the first. A search has at most half of what is left, so that the later
    searches, which have less text to find, are possible after one that finds nothing.

    Args:
        num_tries: Number of tries of the answer before this one.
        work: Work of the earlier searches of this try.
    """
    return max(0, min(MAX_WORK, (MAX_WORK_PER_TRY // (1 + num_tries) - work) // 2))


def _retokenized(state: ConstraintState, vocab: _Vocabulary, tokens: list[int]) -> list[int]:
    """The text of `tokens` in as few tokens as possible, with an end-of-text token."""
    shorter = vocab.fewest_tokens(b"".join(map(vocab.token_bytes, tokens)))
    if len(shorter) < len(tokens) and state.allows_sequence(shorter):
        tokens = shorter
    branch = state.fork()
    for token in tokens:
        branch.advance(token)
    mask = branch.mask()
    return [*tokens, next(end for end in vocab.eos_ids if mask is None or mask[end])]


class _Step(NamedTuple):
    """A node of the search: its tokens, the state after them, the mask before the last token (None
    if several tokens were appended together), and the number of last tokens that did not change
    the mask."""

    tokens: list[int]
    state: ConstraintState
    mask: np.ndarray | None
    num_unchanged: int


class _Search:
    """One search, by tokens of one byte if the vocabulary has them."""

    def __init__(
        self,
        state: ConstraintState,
        vocab: _Vocabulary,
        hints: CompletionHints | None,
        max_work: int,
    ) -> None:
        self.work = 0
        self._max_work = max_work
        longest_text = 0 if hints is None else hints.longest_text
        self._work_per_mask = _WORK_PER_MASK + longest_text // _CHARACTERS_PER_WORK
        self._vocab = vocab
        self._hints = hints
        self._num_masks = 0
        self._order = 0
        self._queue: list[tuple[int, int, _Step]] = [(0, 0, _Step([], state.fork(), None, 0))]

    def run(self) -> list[int] | None:
        """Returns the tokens after which the text may stop, or None."""
        for _ in range(_MAX_BRANCHES):
            if not self._queue or self._num_masks > _MAX_MASKS or self.work >= self._max_work:
                return None
            cost, _, step = heappop(self._queue)
            mask = self._skip_forced(step)
            if self._may_stop(step.state, mask):
                return step.tokens
            if mask is None:
                return None
            is_unchanged = step.mask is not None and np.array_equal(mask, step.mask)
            num_unchanged = step.num_unchanged + 1 if is_unchanged else 0
            for extra_cost, tokens in self._continuations(step.state, mask, num_unchanged):
                branch = step.state.fork()
                for token in tokens:
                    branch.advance(token)
                self._order -= 1  # the latest of equal cost first: depth-first among equals
                previous_mask = mask if len(tokens) == 1 else None
                next_step = _Step([*step.tokens, *tokens], branch, previous_mask, num_unchanged)
                heappush(self._queue, (cost + len(tokens) + extra_cost, self._order, next_step))
        return None

    def _may_stop(self, state: ConstraintState, mask: np.ndarray | None) -> bool:
        return state.can_stop and any(mask is None or mask[end] for end in self._vocab.eos_ids)

    def _skip_forced(self, step: _Step) -> np.ndarray | None:
        """Appends tokens to `step` while only one is allowed, and returns the mask after them."""
        while True:
            mask = step.state.mask()
            self._num_masks += 1
            self.work += self._work_per_mask
            if mask is None or self._may_stop(step.state, mask):
                return mask
            allowed = np.flatnonzero(mask)
            if len(allowed) > 1:
                allowed = self._vocab.single_byte[mask[self._vocab.single_byte]]
            if len(allowed) != 1 or self._num_masks > _MAX_MASKS or self.work > self._max_work:
                return mask
            step.state.advance(int(allowed[0]))
            step.tokens.append(int(allowed[0]))

    def _continuations(
        self, state: ConstraintState, mask: np.ndarray, num_unchanged: int
    ) -> list[tuple[int, list[int]]]:
        """Token sequences to append, each with its cost in addition to its length."""
        vocab = self._vocab
        candidates = [[token] for token in _candidates(mask, vocab)]
        in_string = vocab.in_string(mask)
        if in_string and (string_ends := self._string_ends(state)):
            return [(0, tokens) for tokens in string_ends]
        ends = (b'"',) if in_string else (b"}", b"]", b",")
        closing = [candidate for candidate in candidates if vocab.token_bytes(candidate[0]) in ends]
        if not closing and self._hints is not None:
            candidates = self._from_hints(state, in_string) + candidates
        continuations = [
            (_DETOUR_COST * i, candidate)
            for i, candidate in enumerate(candidates[:_MAX_CONTINUATIONS])
        ]
        if num_unchanged and not num_unchanged & (
            num_unchanged - 1
        ):  # the first, second, fourth, eighth ... time
            is_nested = bool(closing) and vocab.token_bytes(closing[0][0]) in (b"}", b"]")
            if not is_nested:
                continuations = [(cost + _EXIT_COST, tokens) for cost, tokens in continuations]
            exit_cost = _NESTED_EXIT_COST if is_nested else 0
            self.work += _WORK_PER_EXIT * int(np.count_nonzero(mask[vocab.string_characters]))
            exits = _exits(state, mask, vocab)
            continuations += [
                (exit_cost + _EXIT_COST * i, [candidate]) for i, candidate in enumerate(exits)
            ]
        return continuations

    def _from_hints(self, state: ConstraintState, in_string: bool) -> list[list[int]]:
        """Values from the hints that are allowed here (the rest of a string inside one); if there
        are none, property names (the rest of a name inside one)."""
        assert self._hints is not None
        result: list[list[int]] = []
        for value in self._hints.values:
            texts = [] if in_string else [value]
            if value[:1] == b'"':
                texts.append(value[1:])
            for text in texts:
                tokens = self._vocab.bytewise(text)
                if tokens and self._ends_value(state, tokens):
                    result.append(tokens)
            if len(result) >= _MAX_VALUES or self.work > self._max_work:
                return result
        return result or self._names(state)

    def _string_ends(self, state: ConstraintState) -> list[list[int]]:
        """The texts from the hints that end the string without quotes in which `state` is."""
        result = []
        for text in () if self._hints is None else self._hints.string_ends:
            tokens = self._vocab.bytewise(text)
            if tokens and self._allows(state, tokens):
                branch = state.fork()
                for token in tokens:
                    branch.advance(token)
                self.work += self._work_per_mask
                mask = branch.mask()
                if mask is not None and not self._vocab.in_string(mask):
                    result.append(tokens)
        return result

    def _ends_value(self, state: ConstraintState, tokens: list[int]) -> bool:
        """Whether `tokens` are allowed next and complete a value: a comma, a closing bracket or the
        end of the text may follow."""
        if not self._allows(state, tokens):
            return False
        if any(
            self._allows(state, [*tokens, *self._vocab.bytewise(candidate)])
            for candidate in (b",", b"}", b"]")
        ):
            return True
        branch = state.fork()
        for token in tokens:
            branch.advance(token)
        return branch.can_stop

    def _names(self, state: ConstraintState) -> list[list[int]]:
        """Allowed property names with the missing quotes and a colon, the best first."""
        assert self._hints is not None
        is_open = not self._allows(state, self._vocab.bytewise(b'"'))
        allowed: dict[str, list[int]] = {}
        for name, text in self._hints.names.items():
            tokens = self._vocab.bytewise(text[1:] if is_open else text)
            if tokens and self._allows(state, tokens):
                allowed[name] = tokens
            if self.work > self._max_work:
                break
        return [allowed[name] for name in self._hints.ordered(allowed.keys())] if allowed else []

    def _allows(self, state: ConstraintState, tokens: list[int]) -> bool:
        self.work += _WORK_PER_CHECK + len(tokens)
        return state.allows_sequence(tokens)


def _exits(state: ConstraintState, mask: np.ndarray, vocab: _Vocabulary) -> list[int]:
    """Up to four printable characters that change the mask, such as "." after digits."""
    result = []
    for token in vocab.string_characters[mask[vocab.string_characters]].tolist():
        branch = state.fork()
        branch.advance(token)
        after = branch.mask()
        if after is None or not np.array_equal(after, mask):
            result.append((_rank(vocab.token_bytes(token)), token))
    return [token for _, token in sorted(result)[:4]]


def _candidates(mask: np.ndarray, vocab: _Vocabulary) -> list[int]:
    """Up to four tokens allowed by `mask` that are most likely to lead to a completion; tokens of
    one byte if there are any."""
    if vocab.in_string(mask):  # a closing quote comes first
        quotes = [token for token in vocab.quotes if mask[token]]
        if quotes:
            return quotes
    allowed = vocab.single_byte[mask[vocab.single_byte]]
    if not len(allowed):
        allowed = np.flatnonzero(mask)
    entries = [(vocab.token_bytes(int(token)), int(token)) for token in allowed]
    ranked = sorted((_rank(token_bytes), token) for token_bytes, token in entries if token_bytes)
    return [token for _, token in ranked[:4]]


class _Vocabulary:
    """A tokenizer's tokens by their bytes: those of one byte, the quotes that close a string, and
    the printable characters that are not escaped in a JSON string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = vocabulary(tokenizer, tokenizer.vocab_size)
        self.token_bytes = self._vocabulary.token_bytes.__getitem__
        self.eos_ids = sorted(tokenizer.eos_ids)
        entries = list(enumerate(self._vocabulary.token_bytes))
        self._tokens = {
            token_bytes: token for token, token_bytes in reversed(entries) if token_bytes
        }
        self.single_byte = np.array(
            [token for token, token_bytes in entries if len(token_bytes) == 1], np.int64
        )
        characters = {bytes([byte]) for byte in range(32, 127)} - {b'"', b"\\"}
        self.string_characters = np.array(
            [token for token, token_bytes in entries if token_bytes in characters], np.int64
        )
        self.quotes = [token for token, token_bytes in entries if token_bytes == b'"']
        self.bytewise = byte_cached(_MAX_BYTEWISE_BYTES)(self._bytewise)

    def in_string(self, mask: np.ndarray) -> bool:
        """Whether `mask` is that of a position inside a string."""
        return int(np.count_nonzero(mask[self.string_characters])) > _MAX_OUTSIDE_STRING

    def _bytewise(self, text: bytes) -> list[int]:
        """One token per byte; empty if a byte has no token."""
        tokens = [self._tokens.get(text[i : i + 1], -1) for i in range(len(text))]
        return [] if -1 in tokens else tokens

    def fewest_tokens(self, text: bytes) -> list[int]:
        """The shortest tokenization of `text`; among equal lengths, the one with the longest last
        token."""
        none = (len(text) + 1, 0, -1)
        best = [(0, 0, -1), *[none] * len(text)]  # number of tokens, start of the last, the last
        for start in range(len(text)):
            num_tokens = best[start][0] + 1
            for end in range(start + 1, len(text) + 1):
                token_bytes = text[start:end]
                token = self._tokens.get(token_bytes)
                if token is not None and num_tokens < best[end][0]:
                    best[end] = (num_tokens, start, token)
                if not self._vocabulary.has_longer(token_bytes):
                    break
        tokens, position = [], len(text)
        while position:
            _, position, token = best[position]
            tokens.append(token)
        return tokens[::-1]


_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    if tokenizer not in _vocabularies:
        _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return _vocabularies[tokenizer]


def _rank(token_bytes: bytes) -> tuple[int, int]:
    first = _CLOSING_BYTES.find(token_bytes[:1])
    return (len(_CLOSING_BYTES) if first < 0 else first, len(token_bytes))
