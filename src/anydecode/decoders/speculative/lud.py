"""Lexical Unit Decoding: a pass generates a contiguous run of tokens, a lexical unit, as far as the
model is sure of it.

Sun et al., "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units for
LLMs", arXiv:2405.15208. The model was trained with placeholders for the tokens of a unit behind its
first one (`anydecode train masks --units`).

A pass has the last token and `masks` placeholders. The first token is always kept, the others from
left to right up to the first whose probability is too small. Nothing is verified: the next pass
computes keys and values of the tokens in place of the placeholders' (`mars.py`).
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.speculative.mars import Mars


@register(
    Card(
        "lud",
        "speculative",
        paper="Lexical Unit Decoding, LUD (arXiv:2405.15208)",
        exactness="lossy",
        summary="A pass generates a unit of tokens of which the model is sure.",
        needs=("mask token",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the paper's thresholds and number of placeholders were not found: 0.9 and 3 by"
            " default",
            "its rule against repetition was not found in full: a pass ends before a placeholder's"
            " token that equals the one before it, and the next pass generates this token from the"
            " text alone, where it may repeat (repeats=true: no such rule)",
            "placeholders are the model's mask token, which no placeholder's row gives",
            "nothing is verified, so that no acceptance= applies",
            "a sampler's token at T > 0 has the noise of plain decoding at its position",
            "anydecode train masks --units trains an adapter on the model's own answers, in which"
            " each token of a unit behind the first has at least a given probability; the paper"
            " trains all weights",
        ),
        missing=("the whole rule against repetition, which is not published",),
        bounds={"masks": Range(0, 255)},
        remote={"masks": Range(0, 15), "threshold": Range(0, 1)},
    )
)
class Lud(Mars):
    """Lexical Unit Decoding.

    Args:
        masks: Number of placeholders: a unit has at most one token more.
        threshold: The probability below which a token, and those after it, are not kept, in the
            model's distribution at temperature 1.
        repeats: Whether a placeholder's token that equals the token before it may be kept.
    """

    def __init__(self, masks: int = 3, threshold: float = 0.9, repeats: bool = False) -> None:
        super().__init__(masks + 1, threshold)
        self.repeats = repeats

    def keeps(self, logits: np.ndarray, token: int, before: int) -> bool:
        is_repeated = token == before and not self.repeats
        return not is_repeated and super().keeps(logits, token, before)
