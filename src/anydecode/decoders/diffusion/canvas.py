"""A diffusion decoder's text in progress. Plain data, so that it lives in `sequence.state` and a
restart at any yield goes on with the same text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: In `Canvas.committed`: a mask, and a token that was there from the start.
MASKED, FIXED = -1, -2


@dataclass
class Meter:
    """What a text has cost: `passes` by kind ("full": every row of the canvas; "slice": some of
    them; "verify": several canvases at once), and all `rows` computed. What a restart computes
    again is not counted; `Stats` counts what really ran."""

    passes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    committed: int = 0

    def note(self, kind: str, rows: int) -> None:
        """One pass of `rows` rows."""
        self.passes[kind] += 1
        self.rows += rows

    @property
    def total(self) -> int:
        """Passes of every kind."""
        return sum(self.passes.values())

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain JSON."""
        return {
            "passes": dict(self.passes),
            "rows": self.rows,
            "committed": self.committed,
            "tokens_per_pass": self.committed / self.total if self.total else 0.0,
        }


@dataclass(eq=False)
class Canvas:
    """Prompt, committed tokens and masks, by absolute position.

    `tokens` int32 `[length]`; `committed` int32 `[length]`: the step at which a position got its
    token, or `MASKED`, or `FIXED` (the prompt, priors, and what stands between infilled regions);
    `confidence` float64 `[length]`: how sure the model was of it then. `block` is the stretch being
    filled, None between two. `memory` is for what policies must remember: plain data by their name.
    """

    tokens: np.ndarray
    mask: int
    shift: int = 0  # row r of the model predicts position r + shift
    size: int | None = None  # of the blocks in which rows see each other; None: all see all
    limit: int = 1 << 31  # most positions
    whole: bool = False  # an infilling: nothing comes behind the end
    block: tuple[int, int] | None = None
    step: int = 0  # passes that committed something
    block_step: int = 0  # the same within this block
    block_masks: int = 0  # masks in this block when it was opened
    committed: np.ndarray = field(init=False)
    confidence: np.ndarray = field(init=False)
    notes: dict[int, Any] = field(default_factory=dict)  # log-probabilities until they are said
    memory: dict[str, Any] = field(default_factory=dict)
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, np.int32)
        self.committed = np.where(self.tokens == self.mask, MASKED, FIXED).astype(np.int32)
        self.confidence = np.where(self.tokens == self.mask, 0.0, 1.0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def masks(self) -> np.ndarray:
        """The positions that hold masks, ascending."""
        return np.flatnonzero(self.committed == MASKED)

    @property
    def frontier(self) -> int:
        """The first mask; the length if there is none."""
        masks = self.masks
        return int(masks[0]) if len(masks) else len(self)

    def masked(self, first: int, stop: int) -> np.ndarray:
        """The masks in `first..stop`, ascending."""
        masks = self.masks
        found: np.ndarray = masks[(masks >= first) & (masks < stop)]
        return found

    def visible(self, positions: np.ndarray) -> np.ndarray:
        """How many positions rows at `positions` see: all, or those up to the end of their
        block."""
        if self.size is None:
            return np.full(len(positions), len(self), np.int32)
        ends = (positions // self.size + 1) * self.size
        seen: np.ndarray = np.minimum(ends, len(self)).astype(np.int32)
        return seen

    def slice(self, first: int, stop: int) -> np.ndarray:
        """The rows that predict `first..stop`: where a model's logits are shifted, one row more on
        the left, whatever is cached."""
        return np.arange(max(0, first - self.shift), stop, dtype=np.int32)

    def open(self, first: int, stop: int) -> None:
        """Begin to fill `first..stop`."""
        self.block = first, stop
        self.block_step = 0
        self.block_masks = len(self.masked(first, stop))

    def commit(
        self, positions: Iterable[int], tokens: Iterable[int], confidence: Iterable[float]
    ) -> None:
        """Write tokens over masks. Raises ValueError where there is none, or for a mask."""
        for position, token, sure in zip(positions, tokens, confidence, strict=True):
            if self.committed[position] != MASKED or token == self.mask:
                raise ValueError(f"position {position} cannot take token {token}")
            self.tokens[position] = token
            self.committed[position] = self.step
            self.confidence[position] = sure
            self.meter.committed += 1

    def fix(self, position: int, token: int) -> None:
        """Put a prior in place of a mask: it is never ranked nor predicted."""
        if self.committed[position] != MASKED:
            raise ValueError(f"position {position} holds a token already")
        self.tokens[position], self.committed[position], self.confidence[position] = (
            token,
            FIXED,
            1.0,
        )

    def extend(self, count: int) -> None:
        """Append `count` masks."""
        self.tokens = np.append(self.tokens, np.full(count, self.mask, np.int32))
        self.committed = np.append(self.committed, np.full(count, MASKED, np.int32))
        self.confidence = np.append(self.confidence, np.zeros(count))

    def truncate(self, length: int) -> None:
        """Drop what stands from `length` on; no canvas follows this one."""
        self.tokens = self.tokens[:length].copy()
        self.committed = self.committed[:length].copy()
        self.confidence = self.confidence[:length].copy()
        self.whole = True
        self.notes = {position: note for position, note in self.notes.items() if position < length}
        if self.block is not None:
            self.block = (self.block[0], min(self.block[1], length))

    def splice(self, first: int, stop: int, masks: int) -> None:
        """Put `masks` masks in place of what stands at `first..stop`; what is behind moves."""
        fresh = np.full(masks, self.mask, np.int32)
        held = self.tokens, self.committed, self.confidence
        put = fresh, np.full(masks, MASKED, np.int32), np.zeros(masks)
        self.tokens, self.committed, self.confidence = (
            np.concatenate([old[:first], new, old[stop:]])
            for old, new in zip(held, put, strict=True)
        )
        moved = masks - (stop - first)
        self.notes = {
            position if position < first else position + moved: note
            for position, note in self.notes.items()
            if not first <= position < stop
        }
        if self.block is not None:
            self.block = (self.block[0], self.block[1] + moved)

    def copy_tokens(self, positions: Iterable[int] = (), tokens: Iterable[int] = ()) -> np.ndarray:
        """The tokens, with others at `positions`: a canvas to be verified."""
        changed: np.ndarray = self.tokens.copy()
        changed[list(positions)] = list(tokens)
        return changed
