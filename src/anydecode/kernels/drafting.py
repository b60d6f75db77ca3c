"""Drafts in multi-step passes (`interface.BurstDrafts`) as the C kernels take them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from anydecode.kernels.interface import (
    MAX_BURST_DRAFTS,
    MAX_MATCH,
    NUM_BINS,
    BurstDrafter,
    BurstDrafts,
    CopyMatch,
    CopyText,
)
from anydecode.kernels.library import Capture, Drafter, Drafting, SequenceDrafts
from anydecode.kernels.library import CopyText as NativeText
from anydecode.kernels.mapped import address_of

_TEXT_BYTES = ctypes.sizeof(NativeText)


class BoundDrafts:
    """The memory of the drafts of one multi-step pass.

    Args:
        drafts: Those of each sequence; a single one may have a drafter. Costs and limits are those
            of the first. Their results are set by `store`.
        step_limits: Maximum number of tokens of each sequence.
        table: The slots by position of a single sequence, int32; without it, or without a drafter,
            there are no siblings.

    Attributes:
        table: The table that the pass is to read, in which accepted siblings change slots with
            other rows; None: the given one.

    Raises:
        ValueError: An array has the wrong type or size, or a match is outside its text.
    """

    def __init__(
        self,
        drafts: Sequence[BurstDrafts],
        step_limits: Sequence[int],
        table: np.ndarray | None = None,
    ) -> None:
        costs = np.ascontiguousarray(drafts[0].costs, np.float64)
        max_drafts, max_passes = len(costs) - 1, drafts[0].max_passes
        num_texts = sum(len(one.texts) for one in drafts)
        if not 0 <= max_drafts <= MAX_BURST_DRAFTS or max_passes < 1 or not num_texts:
            raise ValueError("drafts in a burst need a text, a pass and the costs of passes")
        self._drafts, self._costs, width = drafts, costs, max(1, max_passes * max_drafts)
        # By sequence: the drafts of each pass, their sources, and the tokens of all of them.
        self._results = np.zeros((len(drafts), 2 * max_passes + width), np.int32)
        self._probabilities = np.zeros((len(drafts), width), np.float32)
        self._seconds = np.zeros(max_passes)
        # By text: what its matches have predicted.
        self._outcomes = np.empty((num_texts, max(step_limits)), np.int32)
        self._texts, self._sequences = (NativeText * num_texts)(), (SequenceDrafts * len(drafts))()
        texts, results = ctypes.addressof(self._texts), address_of(self._results)
        probabilities, outcomes = address_of(self._probabilities), address_of(self._outcomes)
        num_bound = 0
        for native, one, limit in zip(self._sequences, drafts, step_limits, strict=True):
            native.counts, native.sources = results, results + 4 * max_passes
            native.drafts, native.probabilities = results + 8 * max_passes, probabilities
            native.weight = one.weight
            results += self._results.strides[0]
            probabilities += self._probabilities.strides[0]
            if not one.texts:
                continue
            native.texts, native.num_texts = texts + num_bound * _TEXT_BYTES, len(one.texts)
            for index, text in enumerate(one.texts):
                _check(text, 0 if index else limit)
                bound = self._texts[num_bound]
                bound.outcomes = outcomes + num_bound * self._outcomes.strides[0]
                bound.tokens, bound.chances = address_of(text.tokens), address_of(text.chances)
                bound.length, bound.position, bound.match = text.length, text.position, text.match
                num_bound += 1
        self._drafter, self.table = None, None
        drafter = drafts[0].drafter if len(drafts) == 1 else None
        if drafter is not None:
            if drafter.sibling_chances is not None and table is not None:
                self.table = np.array(table, np.int32)
            self._drafter = _BoundDrafter(drafter, step_limits[0], max_passes, self.table)
        self._native = Drafting(
            sequences=ctypes.addressof(self._sequences),
            costs=address_of(self._costs),
            drafter=None if self._drafter is None else ctypes.addressof(self._drafter.native),
            min_gain=drafts[0].min_gain,
            min_probability=drafts[0].min_probability,
            max_drafts=max_drafts,
            max_passes=max_passes,
            seconds=address_of(self._seconds),
        )
        self.address = ctypes.addressof(self._native)

    def store(self) -> None:
        """Set the results after the pass."""
        num_passes, max_passes = self._native.num_passes, len(self._seconds)
        seconds, num_bound = self._seconds[:num_passes].tolist(), 0
        for index, (one, counts) in enumerate(
            zip(self._drafts, self._results[:, :num_passes].tolist(), strict=True)
        ):
            one.rows, one.seconds = [count + 1 for count in counts], seconds
            one.siblings, one.table = [None] * num_passes, self.table
            one.sources, one.drafts, one.probabilities = self._of_passes(index, counts, max_passes)
            one.matches = []
            for text in range(num_bound, num_bound + len(one.texts)):
                native = self._texts[text]
                outcomes = self._outcomes[text, : native.num_outcomes].tolist()
                one.matches.append(CopyMatch(native.position, native.match, outcomes))
            if one.texts:
                one.num_read = self._texts[num_bound].length - one.texts[0].length
            num_bound += len(one.texts)
        if self._drafter is not None:
            self._drafter.store(num_passes)
            self._drafts[0].siblings = siblings = self._drafter.scored_siblings(num_passes)
            for number, sibling in enumerate(siblings):
                self._drafts[0].rows[number] += sibling is not None

    def _of_passes(
        self, index: int, counts: list[int], max_passes: int
    ) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """By pass: the source of a sequence's draft, the draft, and the probabilities that a
        drafter gives its tokens."""
        if not any(counts):
            return [0] * len(counts), [[] for _ in counts], [[] for _ in counts]
        results, chances = self._results[index], self._probabilities[index].tolist()
        tokens = results[2 * max_passes :].tolist()
        ends = list(accumulate(counts, initial=0))
        parts = [slice(first, last) for first, last in pairwise(ends)]
        sources = results[max_passes : max_passes + len(counts)].tolist()
        return sources, [tokens[part] for part in parts], [chances[part] for part in parts]


class _BoundDrafter:
    """The memory of the drafter of one multi-step pass."""

    def __init__(
        self,
        drafter: BurstDrafter,
        num_steps: int,
        max_passes: int,
        table: np.ndarray | None,
    ) -> None:
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
        siblings = drafter.sibling_chances
        if siblings is not None and (siblings.dtype != np.float64 or siblings.shape != (NUM_BINS,)):
            raise ValueError("a drafter needs the float64 sibling chances of every probability")
        self._drafter = drafter
        self._states = np.empty((capacity, width), np.float32)
        self._states[:num_known] = drafter.states
        self._chances = np.ascontiguousarray(chances)
        self._mean_chances = np.ascontiguousarray(drafter.mean_chances)
        self._sibling_chances = None
        if siblings is not None and table is not None:
            self._sibling_chances = np.ascontiguousarray(siblings)
        counts = np.zeros((4, max_passes), np.int32)
        self._num_drafted, self._num_unread, self._siblings, self._num_siblings = counts
        self._sibling_probabilities = np.zeros(max_passes, np.float32)
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
            sibling_chances=_address(self._sibling_chances),
            table=_address(table),
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
            siblings=address_of(self._siblings),
            num_siblings=address_of(self._num_siblings),
            sibling_probabilities=address_of(self._sibling_probabilities),
        )

    def store(self, num_passes: int) -> None:
        drafter = self._drafter
        drafter.num_read = self.native.num_read
        drafter.known_states = self._states[: self.native.num_known]
        drafter.num_drafted = self._num_drafted[:num_passes].tolist()
        drafter.num_unread = self._num_unread[:num_passes].tolist()
        drafter.draft_seconds = self._seconds[:num_passes].tolist()
        drafter.siblings = self._siblings[:num_passes].tolist()
        drafter.sibling_probabilities = self._sibling_probabilities[:num_passes].tolist()

    def scored_siblings(self, num_passes: int) -> list[int | None]:
        """The sibling that each pass has scored; None: none."""
        tokens = zip(self._siblings.tolist(), self._num_siblings.tolist(), strict=True)
        return [token if count else None for token, count in tokens][:num_passes]


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else address_of(array)


def _check(text: CopyText, room: int) -> None:
    tokens, chances = text.tokens, text.chances
    if tokens.dtype != np.int32 or chances.dtype != np.float64 or len(chances) != MAX_MATCH + 1:
        raise ValueError("a text needs int32 tokens and the float64 chances of every match length")
    if not (tokens.flags.c_contiguous and chances.flags.c_contiguous):
        raise ValueError("the tokens and chances of a text must be contiguous")
    if not 0 < text.length <= len(tokens) - room:
        raise ValueError("a text is empty, or has no room for the tokens of the pass")
    if text.match < 0 or (text.match and not 0 <= text.position <= text.length):
        raise ValueError("a match is outside its text")
