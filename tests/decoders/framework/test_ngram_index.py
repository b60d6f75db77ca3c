"""The n-gram index against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from anydecode.decoders.framework.ngram_index import SEPARATOR, NgramIndex
from anydecode.decoders.speculative.match_cursor import (
    MAX_MATCH_LENGTH,
    NGRAM_SIZES,
    MatchCursor,
)


def search(tokens: list[int], text: list[int], sizes: list[int], first: bool) -> tuple[int, int]:
    """What `NgramIndex.find` returns, by comparing every position."""
    for size in sorted(sizes, reverse=True):
        ends = [
            end
            for end in range(size, len(tokens))
            if size <= len(text) and tokens[end - size : end] == text[len(text) - size :]
        ]
        if ends:
            return (ends[0] if first else ends[-1]), size
    return 0, 0


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("sizes", [[1], [3], [1, 2, 3], [2, 3], [4, 2, 1], [1, 5]])
def test_finds_what_a_search_finds(sizes: list[int], first: bool) -> None:
    rng = random.Random(f"{sizes}{first}")
    for vocab in (2, 5, 40):
        index = NgramIndex(sizes, keep_first=first)
        tokens: list[int] = []
        for _ in range(120):
            token = rng.randrange(vocab)
            index.append(token)
            tokens.append(token)
            assert index.find(tokens) == search(tokens, tokens, sizes, first)
            other = [rng.randrange(vocab) for _ in range(rng.randrange(7))]
            assert index.find(other) == search(tokens, other, sizes, first)
        assert index.tokens == tokens and len(index) == len(tokens)


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("sizes", [[1], [3], [4, 2, 1], [1, 5]])
def test_appending_many_tokens_is_appending_each(sizes: list[int], first: bool) -> None:
    rng = random.Random(f"{sizes}{first}")
    for _ in range(30):
        one, many = NgramIndex(sizes, keep_first=first), NgramIndex(sizes, keep_first=first)
        for _ in range(6):
            tokens = [rng.randrange(3) for _ in range(rng.choice([0, 1, 2, 3, 9]))]
            many.extend(tokens)
            for token in tokens:
                one.append(token)
            assert one.tokens == many.tokens
            for _ in range(20):
                text = [rng.randrange(3) for _ in range(rng.randrange(7))]
                assert one.find(text) == many.find(text)


def test_cursor_follows_the_match_that_a_search_finds() -> None:
    """The cursor stays on its match while it predicts the text and has the longest n-gram's length;
    else it moves to a longer match, if the index has one."""
    rng = random.Random(3)
    for vocab in (3, 12):
        past = [rng.randrange(vocab) for _ in range(60)] + [SEPARATOR]
        past += [rng.randrange(vocab) for _ in range(60)] + [SEPARATOR]
        history = NgramIndex(NGRAM_SIZES)
        history.extend(past)
        cursor, position, length = MatchCursor(history), 0, 0
        text: list[int] = []
        for _ in range(300):
            start = rng.randrange(len(past))
            for token in past[start : start + rng.randrange(1, 9)]:
                if token == SEPARATOR:
                    break
                predicted = past[position] if length else SEPARATOR
                text.append(token)
                if predicted == token:
                    position, length = position + 1, length + 1
                else:
                    length = 0
                if length < max(NGRAM_SIZES):
                    end, size = search(past, text, list(NGRAM_SIZES), first=False)
                    while (
                        1 < size < min(end, len(text), MAX_MATCH_LENGTH)
                        and past[end - 1 - size] == text[-1 - size]
                    ):
                        size += 1
                    if size > length:
                        position, length = end, size
                is_hit = cursor.step(text)
                assert is_hit == (None if predicted == SEPARATOR else predicted == token)
                assert (cursor.position, cursor.length) == (position, length)
