"""Oracle test of aggressive (Input-guided Aggressive Decoding, arXiv:2205.10350): the position in
the input, recomputed from the whole output."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import compare_chains


@oracle_test("aggressive")
def aggressive() -> Iterator[Check]:
    """Copies while the output follows the input; restarts at a suffix that occurs once in the
    input."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        source, output = text[:prompt], text[prompt:]
        position: int | None = None
        for end in range(1, len(output) + 1):
            if position is not None and source[position : position + 1] == [output[end - 1]]:
                position += 1
                continue
            position = None
            for n in range(1, end + 1):
                tail = output[end - n : end]
                ends = [e for e in range(n, prompt + 1) if source[e - n : e] == tail]
                if len(ends) == 1:
                    position = ends[0]
                if len(ends) <= 1:
                    break
        return [] if position is None else source[position : position + 16]

    prompts = ("abcdefghijkl", "kacadaeafalb", "aabbccddabcd")
    yield from compare_chains("aggressive", oracle, prompts, echo=12)
