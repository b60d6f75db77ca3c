"""Oracle test of lookahead (Lookahead Decoding, arXiv:2402.02057): window, n-gram pool and guesses,
from a replay of the two-dimensional window."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")


@oracle_test("lookahead")
def lookahead() -> Iterator[Check]:
    """Window, n-gram pool and guesses equal a replay of the two-dimensional window."""
    for key, window, ngram, max_ngrams in (
        ("lookahead", 5, 4, 5),
        ("lookahead:window=3,ngram=3,max_ngrams=2", 3, 3, 2),
    ):
        total = 0
        with scripted(wordy()) as llm:
            for prompt in PROMPTS:
                trace = rounds(llm, key, prompt)
                equal = _replays(trace, window, ngram, max_ngrams)
                yield Check(f"{key}: {prompt!r} equals the replay", equal)
                total += accepted(trace)
        yield Check(f"{key}: drafts are accepted", total > 0, f"{total}")


def _replays(trace: list[TracedRound], width: int, ngram: int, max_ngrams: int) -> bool:
    """Whether the rounds equal the replay, in which a level is the tokens that it predicts for
    positions of the text; those of the r-th level, from 0, begin r positions behind it."""
    logits = wordy()
    pool: list[tuple[int, ...]] = []
    levels: list[dict[int, int]] = [{}]
    spare = _spread(trace[0].text, width)
    for one in trace:
        text, end = one.text, len(one.text)
        window: list[list[int]] = []
        for row, level in enumerate(levels):
            known = [level[at] for at in range(end + row, end + row + width) if at in level]
            window.append([*known, *spare[: width - len(known)]])
        guesses = [gram[1:] for gram in reversed(pool) if gram[0] == text[-1]][:max_ngrams]
        guessed = {path[:n] for path in guesses for n in range(1, ngram)}
        inputs = [
            [
                (*window[0][: column + 1], *(level[column] for level in window[1 : row + 1]))
                for column in range(width)
            ]
            for row in range(len(window))
        ]
        paths = [path for row in inputs for path in row]
        if set(one.paths) != guessed | set(paths) or one.paths[-len(paths) :] != paths:
            return False
        fresh = [int(logits((*text, *path)).argmax()) for path in inputs[-1]]
        if len(levels) == ngram - 1:
            for column, token in enumerate(fresh):
                gram = (*(level[column] for level in window), token)
                pool = [other for other in pool if other != gram]
                same = [other for other in pool if other[0] == gram[0]]
                if len(same) == max_ngrams:
                    pool.remove(same[0])
                pool.append(gram)
        rows = [*window, fresh]
        levels = [dict(enumerate(tokens, end + row)) for row, tokens in enumerate(rows)][
            1 - ngram :
        ]
        spare = _spread(text, width)
    return True


def _spread(text: list[int], count: int) -> list[int]:
    """Tokens of a text, as many as there are columns."""
    return [text[number * 7919 % len(text)] for number in range(count)]
