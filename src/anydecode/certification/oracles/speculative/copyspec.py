"""Oracle test of copyspec (CopySpec, arXiv:2502.08923): the tokens after the first occurrence of
the last three tokens, and the index that finds it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import compare_chains
from anydecode.decoders.framework.ngram_index import NgramIndex


@oracle_test("copyspec")
def copyspec() -> Iterator[Check]:
    """The first earlier occurrence of the last three tokens."""

    def oracle(text: list[int], prompt: int) -> list[int]:
        for start in range(len(text) - 3):
            if text[start : start + 3] == text[-3:]:
                return text[start + 3 : start + 13]
        return []

    yield from compare_chains("copyspec", oracle)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, 200).tolist()
    index, agree = NgramIndex([3], keep_first=True), True
    for position, token in enumerate(text):
        index.append(token)
        prefix = text[: position + 1]
        earlier = [s for s in range(len(prefix) - 3) if prefix[s : s + 3] == prefix[-3:]]
        agree &= index.find(prefix) == ((earlier[0] + 3, 3) if earlier else (0, 0))
    yield Check("the index finds the right positions", agree)
