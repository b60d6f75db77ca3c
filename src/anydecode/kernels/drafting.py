"""Drafts in multi-step passes (`interface.BurstDrafts`) as the C kernels take them."""

from __future__ import annotations

import ctypes

import numpy as np

from anydecode.kernels.interface import (
    MAX_BURST_DRAFTS,
    MAX_MATCH,
    NUM_BINS,
    BurstDrafter,
    BurstDrafts,
    CopyText,
)
from anydecode.kernels.library import Capture, Drafter, Drafting
from anydecode.kernels.library import CopyText as NativeText
from anydecode.kernels.mapped import address_of


class BoundDrafts:
    """The memory of the drafts of one multi-step pass.

    Args:
        drafts: The texts, the drafter and the costs. Their results are set by `store`.
        num_steps: Maximum number of tokens of the pass.

    Raises:
        ValueError: An array has the wrong type or size, or a match is outside its text.
    """

    def __init__(self, drafts: BurstDrafts, num_steps: int) -> None:
        max_drafts, max_passes = len(drafts.costs) - 1, drafts.max_passes
        if not 0 <= max_drafts <= MAX_BURST_DRAFTS or max_passes < 1 or not drafts.texts:
            raise ValueError("drafts in a burst need a text, a pass and the costs of passes")
        for index, text in enumerate(drafts.texts):
            _check(text, 0 if index else num_steps)
        self._drafts = drafts
        self._texts = (NativeText * len(drafts.texts))()
        for native, text in zip(self._texts, drafts.texts, strict=True):
            native.tokens, native.chances = address_of(text.tokens), address_of(text.chances)
            native.length, native.position, native.match = text.length, text.position, text.match
        self._costs = np.ascontiguousarray(drafts.costs, np.float64)
        self._rows, self._sources = np.zeros((2, max_passes), np.int32)
        self._seconds = np.zeros(max_passes)
        self._tokens = np.zeros(max(1, max_passes * max_drafts), np.int32)
        self._probabilities = np.zeros(len(self._tokens), np.float32)
        self._drafter = None
        if drafts.drafter is not None:
            self._drafter = _BoundDrafter(drafts.drafter, num_steps, max_passes)
        self._native = Drafting(
            texts=ctypes.addressof(self._texts),
            costs=address_of(self._costs),
            drafter=None if self._drafter is None else ctypes.addressof(self._drafter.native),
            min_gain=drafts.min_gain,
            min_probability=drafts.min_probability,
            num_texts=len(drafts.texts),
            max_drafts=max_drafts,
            max_passes=max_passes,
            rows=address_of(self._rows),
            sources=address_of(self._sources),
            seconds=address_of(self._seconds),
            drafts=address_of(self._tokens),
            probabilities=address_of(self._probabilities),
        )
        self.address = ctypes.addressof(self._native)

    def store(self) -> None:
        """Set the results after the pass."""
        drafts, count, first = self._drafts, self._native.num_passes, 0
        drafts.rows = self._rows[:count].tolist()
        drafts.sources = self._sources[:count].tolist()
        drafts.seconds = self._seconds[:count].tolist()
        drafts.drafts, drafts.probabilities = [], []
        for rows in drafts.rows:
            part = slice(first, first + rows - 1)
            drafts.drafts.append(self._tokens[part].tolist())
            drafts.probabilities.append(self._probabilities[part].tolist())
            first += rows - 1
        if self._drafter is not None:
            self._drafter.store(count)


class _BoundDrafter:
    """The memory of the drafter of one multi-step pass."""

    def __init__(self, drafter: BurstDrafter, num_steps: int, max_passes: int) -> None:
        num_known, width = drafter.states.shape
        capacity = num_known + num_steps
        slots = drafter.table[drafter.first : drafter.first + capacity]
        chances = drafter.chances
        if drafter.states.dtype != np.float32 or num_known != len(drafter.tokens):
            raise ValueError("a drafter needs the float32 states before each of its tokens")
        if len(slots) < capacity:
            raise ValueError("a drafter has no room for the tokens of the pass")
        if chances.dtype != np.float64 or chances.shape != (len(drafter.mean_chances), NUM_BINS):
            raise ValueError("a drafter needs the float64 chances of every depth and probability")
        if not len(chances) or drafter.mean_chances.dtype != np.float64:
            raise ValueError("a drafter needs the float64 mean chances of every depth")
        self._drafter = drafter
        self._states = np.empty((capacity, width), np.float32)
        self._states[:num_known] = drafter.states
        self._chances = np.ascontiguousarray(chances)
        self._mean_chances = np.ascontiguousarray(drafter.mean_chances)
        self._num_drafted, self._num_unread = np.zeros((2, max_passes), np.int32)
        self._seconds = np.zeros(max_passes)
        self._order = np.arange(MAX_BURST_DRAFTS + 1, dtype=np.int32)
        self._captures = (Capture * len(drafter.layers))()
        for capture, layer in zip(self._captures, drafter.layers, strict=True):
            capture.layer, capture.rows, capture.stride = layer, address_of(self._order), width
        chain, projection, tokens = drafter.chains.bind(drafter, capacity, slots)
        self.native = Drafter(
            pass_=chain,
            projection=projection,
            captures=ctypes.addressof(self._captures),
            tokens=tokens,
            states=address_of(self._states),
            chances=address_of(self._chances),
            mean_chances=address_of(self._mean_chances),
            rate=drafter.rate,
            seconds=drafter.seconds,
            num_captures=len(drafter.layers),
            num_depths=len(chances),
            max_drafts=drafter.max_drafts,
            num_due=drafter.num_due,
            num_known=num_known,
            num_drafted=address_of(self._num_drafted),
            num_unread=address_of(self._num_unread),
            draft_seconds=address_of(self._seconds),
        )

    def store(self, num_passes: int) -> None:
        drafter = self._drafter
        drafter.num_read = self.native.num_read
        drafter.known_states = self._states[: self.native.num_known]
        drafter.num_drafted = self._num_drafted[:num_passes].tolist()
        drafter.num_unread = self._num_unread[:num_passes].tolist()
        drafter.draft_seconds = self._seconds[:num_passes].tolist()


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
