"""Oracle test of Jacobi decoding: the iteration recomputed from whole texts."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.rounds import (
    TracedRound,
    accepted,
    plain_token,
    rounds,
    scripted,
    wordy,
)

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")
LENGTH = 24


@oracle_test("jacobi")
def jacobi() -> Iterator[Check]:
    """Blocks of five start as copies of the last token; every iterate is y_i = sample(x, y before
    i) for the whole block at once."""
    for name, decoder, block, length, pad in (
        ("default", "jacobi", 5, None, None),
        ("one block", "jacobi:block=0,pad=97", LENGTH, None, 97),
        ("hybrid", "jacobi:length=12", 5, 12, None),
    ):
        for temperature in (0.0, 0.8):
            wrong, total = 0, 0
            with scripted(wordy()) as llm:
                for prompt in PROMPTS:
                    trace = rounds(llm, decoder, prompt, LENGTH, temperature=temperature)
                    wrong += not _iterates(trace, len(prompt), block, length, pad, temperature)
                    total += accepted(trace)
            yield Check(f"{name}, T={temperature}: the rounds equal the iteration", wrong == 0)
            yield Check(f"{name}, T={temperature}: drafts are accepted", total > 0, f"{total}")
    yield from rejection_checks("jacobi")


def _iterates(
    trace: list[TracedRound],
    prompt: int,
    block: int,
    length: int | None,
    pad: int | None,
    temperature: float,
) -> bool:
    """Whether each round drafts the part of the block's iterate that is not final yet, and no block
    takes more rounds than it has tokens."""
    logits, rest = wordy(), list(trace)
    while rest:
        seen, start = rest[0].text, len(rest[0].text)
        size = min(block, prompt + LENGTH - start)
        if length is not None:
            size = max(1, min(size, prompt + length - start))
        iterate = [seen[-1] if pad is None else pad] * size
        num_final = num_rounds = 0
        while num_final < size:
            if not rest or num_rounds == size:
                return False
            one = rest.pop(0)
            num_rounds += 1
            if one.tokens != iterate[num_final : size - 1]:
                return False
            iterate = [
                plain_token(logits((*seen, *iterate[:i])), start + i, temperature)
                for i in range(size)
            ]
            num_final += len(one.generated)
            if iterate[:num_final] != [*one.text, *one.generated][start:][:num_final]:
                return False
    return True
