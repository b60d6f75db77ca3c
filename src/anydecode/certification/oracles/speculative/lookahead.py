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
    """Whether the rounds equal the replay; levels[r][c] is r + c + 1 positions after the text."""
    logits = wordy()
    pool: list[tuple[int, ...]] = []
    levels: list[list[int]] = []
    for one in trace:
        text = one.text
        filler = [text[(i * 7919 + len(text)) % len(text)] for i in range(width)]
        levels = levels or [filler]
        guesses = [gram[1:] for gram in reversed(pool) if gram[0] == text[-1]][:max_ngrams]
        guessed = {path[:n] for path in guesses for n in range(1, ngram)}
        inputs = [
            [
                (*levels[0][: column + 1], *(level[column] for level in levels[1 : row + 1]))
                for column in range(width)
            ]
            for row in range(len(levels))
        ]
        window = [path for row in inputs for path in row]
        if set(one.paths) != guessed | set(window) or one.paths[-len(window) :] != window:
            return False
        fresh = [int(logits((*text, *path)).argmax()) for path in inputs[-1]]
        if len(levels) == ngram - 1:
            for column, token in enumerate(fresh):
                gram = (*(level[column] for level in levels), token)
                pool = [other for other in pool if other != gram]
                same = [other for other in pool if other[0] == gram[0]]
                if len(same) == max_ngrams:
                    pool.remove(same[0])
                pool.append(gram)
        levels = [*levels, fresh][1 - ngram :]
        shift = len(one.generated) - 1
        levels = [(level[shift:] + filler)[:width] for level in levels]
    return True
