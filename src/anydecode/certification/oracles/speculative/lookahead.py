"""Oracle test of lookahead (Lookahead Decoding, arXiv:2402.02057): window, n-gram pool and guesses,
from a replay of the two-dimensional window."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import TracedRound, accepted, rounds, scripted, wordy
from anydecode.constraints.languages import Regex

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
    forced = "bad cab had"
    with scripted(wordy()) as llm:
        trace = rounds(llm, "lookahead", "h", constraint=Regex(f"[a-l]{{9}}{forced}[a-l]{{28}}"))
    forced_drafts = [one.tokens == list(forced.encode()) for one in trace]
    is_within = any(forced_drafts[2:-2])
    equal = _replays(trace, 5, 4, 5, list(forced.encode()))
    yield Check("the window moves with tokens that a constraint forces", equal and is_within)


def _replays(
    trace: list[TracedRound], width: int, ngram: int, max_ngrams: int, forced: Seq[int] = ()
) -> bool:
    """Whether the rounds equal the replay, in which a level is the tokens that it predicts for
    positions of the text; those of the r-th level, from 0, begin r positions behind it. A round
    that drafts just the tokens `forced` has no window."""
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
        if one.tokens != forced:
            guesses = [gram[1:] for gram in reversed(pool) if gram[0] == text[-1]][:max_ngrams]
            guessed = {path[:n] for path in guesses for n in range(1, ngram)}
            paths = [
                (*window[0][: column + 1], *(level[column] for level in window[1 : row + 1]))
                for row in range(len(window))
                for column in range(width)
            ]
            if set(one.paths) != guessed | set(paths) or one.paths[-len(paths) :] != paths:
                return False
            fresh = [int(logits((*text, *path)).argmax()) for path in paths[-width:]]
            if len(levels) == ngram - 1:
                for gram in zip(*window, fresh, strict=True):
                    pool = [other for other in pool if other != gram]
                    same = [other for other in pool if other[0] == gram[0]]
                    if len(same) == max_ngrams:
                        pool.remove(same[0])
                    pool.append(gram)
            window.append(fresh)
            spare = _spread(text, width)
        levels = [dict(enumerate(row, end + number)) for number, row in enumerate(window)]
        levels = levels[1 - ngram :]
    return True


def _spread(text: list[int], count: int) -> list[int]:
    """Tokens of a text, as many as there are columns."""
    return [text[number * 7919 % len(text)] for number in range(count)]
