"""Copied drafts (`interface.CopiedDrafts`) as the C kernels take them."""

from __future__ import annotations

import ctypes

import numpy as np

from anydecode.kernels.interface import MAX_COPIED, MAX_MATCH, CopiedDrafts, CopyText
from anydecode.kernels.library import Copying
from anydecode.kernels.library import CopyText as NativeText
from anydecode.kernels.mapped import address_of


class BoundCopies:
    """The memory of the copied drafts of one multi-step pass.

    Args:
        copies: The texts and costs. Their results are set by `store`.
        num_steps: Maximum number of tokens of the pass.

    Raises:
        ValueError: An array has the wrong type or size, or a match is outside its text.
    """

    def __init__(self, copies: CopiedDrafts, num_steps: int) -> None:
        max_drafts, max_passes = len(copies.costs) - 1, copies.max_passes
        if not 0 <= max_drafts <= MAX_COPIED or max_passes < 1 or not copies.texts:
            raise ValueError("copied drafts need a text, a pass and the costs of passes")
        for index, text in enumerate(copies.texts):
            _check(text, 0 if index else num_steps)
        self._copies = copies
        self._texts = (NativeText * len(copies.texts))()
        for native, text in zip(self._texts, copies.texts, strict=True):
            native.tokens, native.chances = address_of(text.tokens), address_of(text.chances)
            native.length, native.position, native.match = text.length, text.position, text.match
        self._costs = np.ascontiguousarray(copies.costs, np.float64)
        self._rows = np.zeros(max_passes, np.int32)
        self._seconds = np.zeros(max_passes)
        self._drafts = np.zeros(max(1, max_passes * max_drafts), np.int32)
        self._native = Copying(
            texts=ctypes.addressof(self._texts),
            costs=address_of(self._costs),
            min_gain=copies.min_gain,
            min_probability=copies.min_probability,
            num_texts=len(copies.texts),
            max_drafts=max_drafts,
            max_passes=max_passes,
            rows=address_of(self._rows),
            seconds=address_of(self._seconds),
            drafts=address_of(self._drafts),
        )
        self.address = ctypes.addressof(self._native)

    def store(self) -> None:
        """Set the results after the pass."""
        count, first = self._native.num_passes, 0
        self._copies.rows = self._rows[:count].tolist()
        self._copies.seconds = self._seconds[:count].tolist()
        self._copies.drafts = []
        for rows in self._copies.rows:
            self._copies.drafts.append(self._drafts[first : first + rows - 1].tolist())
            first += rows - 1


def _check(text: CopyText, room: int) -> None:
    tokens, chances = text.tokens, text.chances
    if tokens.dtype != np.int32 or chances.dtype != np.float64 or len(chances) != MAX_MATCH + 1:
        raise ValueError("a text needs int32 tokens and the float64 chances of every match length")
    if not (tokens.flags.c_contiguous and chances.flags.c_contiguous):
        raise ValueError("the tokens and chances of a text must be contiguous")
    if not 0 < text.length <= len(tokens) - room:
        raise ValueError("a text is empty, or has no room for the tokens of the pass")
    if text.match < 0 or (text.match and not 0 <= text.position < text.length):
        raise ValueError("a match is outside its text")
