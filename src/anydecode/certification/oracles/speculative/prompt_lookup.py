"""Oracle test of prompt-lookup (Saxena, 2023): the tokens after the latest occurrence of the
longest suffix, found by search."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS, compare_chains

#: A prompt whose last three tokens occurred later than its last four.
LONGER_MATCH = "abcde xbcdy abcd"
#: A prompt whose last two tokens occurred later than its last three.
SHORTER_MATCH = "abcd xbcy abc"


@oracle_test("prompt-lookup")
def prompt_lookup() -> Iterator[Check]:
    """The longest suffix, its latest earlier occurrence, and the tokens after it."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        for n in (3, 2, 1):
            for start in range(len(text) - n - 1, -1, -1):
                if n < len(text) and text[start : start + n] == text[-n:]:
                    return text[start + n : start + n + 7]
        return []

    yield from compare_chains("prompt-lookup", oracle, (*PROMPTS, LONGER_MATCH, SHORTER_MATCH))
