"""The canvas: the prompt, committed tokens and masks of a text that a diffusion decoder generates.

It is plain data that lives in `sequence.state`, so a restart at any yield continues with the same
text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.decoders.framework.canvas_spans import visible_positions

#: Values of `Canvas.committed`: a mask, and a token that is not generated.
MASKED, FIXED = -1, -2


@dataclass
class Meter:
    """Counts the work done for a text, without what a restart computes again (`Stats` counts that).

    Attributes:
        passes: The number of forward passes by kind: "full" computes every row of the canvas,
            "slice" some of them, "verify" several canvases at once.
        rows: The number of computed rows.
        committed: The number of unmasked tokens, without those that were masked again.
    """

    passes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    committed: int = 0

    def record_pass(self, kind: str, rows: int) -> None:
        """Count one forward pass of `rows` rows."""
        self.passes[kind] += 1
        self.rows += rows

    @property
    def num_passes(self) -> int:
        """The number of forward passes of all kinds."""
        return sum(self.passes.values())

    def to_dict(self) -> dict[str, Any]:
        """All counters, as plain JSON."""
        return {
            "passes": dict(self.passes),
            "rows": self.rows,
            "committed": self.committed,
            "tokens_per_pass": self.committed / self.num_passes if self.num_passes else 0.0,
        }


@dataclass(eq=False)
class Canvas:
    """Prompt, committed tokens and masks, by absolute position.

    Attributes:
        tokens: int32 `[length]`.
        mask: The mask token; -1 for a model without one.
        logit_shift: Row r of the model predicts position r + `logit_shift`.
        block_size: The size of the blocks in which rows see each other; None: every row sees the
            whole canvas.
        origin: The position from which blocks are counted.
        later_blocks: From the first of these positions on, blocks have the second as their size.
        has_causal_context: Whether rows before the block that is being unmasked see up to
            themselves only.
        context_predicts_next: See `ModelSpec.context_predicts_next`.
        has_prompt_block: Whether the positions before `origin` are one block.
        max_length: The largest number of positions.
        is_fixed_length: No masks may be appended, as in infilling.
        block: The positions `first..stop` that are being unmasked; None between two blocks.
        step: The number of finished denoising steps.
        block_step: The number of finished denoising steps in this block.
        block_masks: The number of masks that the block had when it was opened.
        committed: int32 `[length]`: the step in which a position was unmasked, or `MASKED`, or
            `FIXED` (the prompt, priors, and tokens between infilled regions).
        confidence: float64 `[length]`: the model's probability of the token in that step.
        logprobs: Log-probabilities by position, until the token is emitted.
        policy_state: State of the policies: plain data by name.
        cached_rows: (positions, tokens, visible) of each pass whose rows are in the cache.
        meter: Counts forward passes and rows.
    """

    tokens: np.ndarray
    mask: int
    logit_shift: int = 0
    block_size: int | None = None
    origin: int = 0
    later_blocks: tuple[int, int] | None = None
    has_causal_context: bool = False
    context_predicts_next: bool = False
    has_prompt_block: bool = False
    max_length: int = 1 << 31
    is_fixed_length: bool = False
    block: tuple[int, int] | None = None
    step: int = 0
    block_step: int = 0
    block_masks: int = 0
    committed: np.ndarray = field(init=False)
    confidence: np.ndarray = field(init=False)
    logprobs: dict[int, Any] = field(default_factory=dict)
    policy_state: dict[str, Any] = field(default_factory=dict)
    cached_rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens, np.int32)
        self.committed = np.where(self.tokens == self.mask, MASKED, FIXED).astype(np.int32)
        self.confidence = np.where(self.tokens == self.mask, 0.0, 1.0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def masks(self) -> np.ndarray:
        """The masked positions, ascending."""
        return np.flatnonzero(self.committed == MASKED)

    @property
    def frontier(self) -> int:
        """The position of the first mask; the canvas length if there is none."""
        masks = self.masks
        return int(masks[0]) if len(masks) else len(self)

    def masked(self, first: int, stop: int) -> np.ndarray:
        """The masked positions in `first..stop`, ascending."""
        masks = self.masks
        inside: np.ndarray = masks[(masks >= first) & (masks < stop)]
        return inside

    def visible(self, positions: np.ndarray) -> np.ndarray:
        """How many positions each row at `positions` sees: all, or those up to its block's end, or
        up to itself in a causal context."""
        context_stop = 0
        if self.has_causal_context:
            first = self.frontier if self.block is None else self.block[0]
            context_stop = self.block_start(first)
        visible = visible_positions(
            positions, len(self), self.block_size, self.origin, context_stop
        )
        if self.has_prompt_block:
            visible = np.where(positions < self.origin, self.origin, visible)
        if self.later_blocks is not None:
            first, size = self.later_blocks
            later = visible_positions(positions, len(self), size, first)
            visible = np.where(positions < first, np.minimum(visible, first), later)
        return visible

    def block_start(self, position: int) -> int:
        """The first position of the model's block that `position` is in."""
        origin, size = self._grid(position)
        return origin + (position - origin) // size * size

    def block_end(self, position: int) -> int:
        """The end of the model's block that `position` is in."""
        end = self.block_start(position) + self._grid(position)[1]
        if self.later_blocks is not None and position < self.later_blocks[0]:
            end = min(end, self.later_blocks[0])
        return end

    def _grid(self, position: int) -> tuple[int, int]:
        """The position from which the blocks around `position` are counted, and their size."""
        assert self.block_size is not None, "a model with blocks"
        if self.later_blocks is not None and position >= self.later_blocks[0]:
            return self.later_blocks
        if self.has_prompt_block and position < self.origin:
            return 0, self.origin
        return self.origin, self.block_size

    def input_positions(self, first: int, stop: int) -> np.ndarray:
        """The positions of the rows to compute in order to predict `first..stop`.

        If the model's logits are shifted, this includes the row before `first`, even if it is
        cached.
        """
        return np.arange(max(0, first - self.logit_shift), stop, dtype=np.int32)

    def open(self, first: int, stop: int) -> None:
        """Open the block `first..stop`."""
        self.block = first, stop
        self.block_step = 0
        self.block_masks = len(self.masked(first, stop))

    def commit(
        self, positions: Iterable[int], tokens: Iterable[int], confidence: Iterable[float]
    ) -> None:
        """Replace masks by tokens.

        Raises:
            ValueError: A position holds no mask, or a token is the mask token.
        """
        for position, token, probability in zip(positions, tokens, confidence, strict=True):
            if self.committed[position] != MASKED or token == self.mask:
                raise ValueError(
                    f"position {position} cannot take token {token}: the position holds no mask,"
                    " or the token is the mask token"
                )
            self.tokens[position] = token
            self.committed[position] = self.step
            self.confidence[position] = probability
            self.meter.committed += 1

    def edit(
        self, positions: Iterable[int], tokens: Iterable[int], confidence: Iterable[float]
    ) -> None:
        """Replace unmasked tokens by others.

        Raises:
            ValueError: A position holds a mask or a fixed token, or a token is the mask token.
        """
        for position, token, probability in zip(positions, tokens, confidence, strict=True):
            if self.committed[position] < 0 or token == self.mask:
                raise ValueError(f"position {position} cannot be edited to token {token}")
            self.tokens[position] = token
            self.committed[position] = self.step
            self.confidence[position] = probability

    def renoise(self, positions: Iterable[int], tokens: Iterable[int]) -> None:
        """Change what masked positions hold, for models whose noise is random tokens.

        Raises:
            ValueError: A position holds a token that is unmasked or fixed.
        """
        for position, token in zip(positions, tokens, strict=True):
            if self.committed[position] != MASKED:
                raise ValueError(f"position {position} holds no noise")
            self.tokens[position] = token

    def remask(self, positions: Iterable[int]) -> None:
        """Replace unmasked tokens by masks.

        Raises:
            ValueError: A position holds a mask or a fixed token.
        """
        for position in positions:
            if self.committed[position] < 0:
                raise ValueError(f"position {position} holds no token that can be masked again")
            self.tokens[position], self.committed[position] = self.mask, MASKED
            self.confidence[position] = 0.0
            self.logprobs.pop(int(position), None)
            self.meter.committed -= 1

    def fix(self, position: int, token: int) -> None:
        """Put a fixed token (a prior) in place of a mask: it is neither ranked nor predicted."""
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
        """Drop the positions from `length` on; no masks are appended any more."""
        self.tokens = self.tokens[:length].copy()
        self.committed = self.committed[:length].copy()
        self.confidence = self.confidence[:length].copy()
        self.is_fixed_length = True
        self.logprobs = {
            position: entry for position, entry in self.logprobs.items() if position < length
        }
        if self.block is not None:
            self.block = (self.block[0], min(self.block[1], length))

    def splice(self, first: int, stop: int, masks: int) -> None:
        """Replace the positions `first..stop` by `masks` masks; later positions move."""
        new_tokens = np.full(masks, self.mask, np.int32)
        before = self.tokens, self.committed, self.confidence
        inserted = new_tokens, np.full(masks, MASKED, np.int32), np.zeros(masks)
        self.tokens, self.committed, self.confidence = (
            np.concatenate([old[:first], new, old[stop:]])
            for old, new in zip(before, inserted, strict=True)
        )
        offset = masks - (stop - first)
        self.logprobs = {
            position if position < first else position + offset: entry
            for position, entry in self.logprobs.items()
            if not first <= position < stop
        }
        if self.block is not None:
            self.block = (self.block[0], self.block[1] + offset)

    def rearrange(self, first: int, sources: Seq[int | None]) -> None:
        """Let the positions from `first` on hold what `sources` hold now; None: a mask.

        Sources are positions of the same range, each at most once; what is no source is dropped.
        """
        stop = first + len(sources)
        moved = {source: p for p, source in enumerate(sources, first) if source is not None}
        kept, positions = list(moved), list(moved.values())
        dropped = [position for position in range(first, stop) if position not in moved]
        self.meter.committed -= int((self.committed[dropped] >= 0).sum())
        for values, empty in (
            (self.tokens, self.mask),
            (self.committed, MASKED),
            (self.confidence, 0.0),
        ):
            kept_values = values[kept]
            values[first:stop] = empty
            values[positions] = kept_values
        self.logprobs = {
            moved.get(position, position): entry
            for position, entry in self.logprobs.items()
            if position not in dropped
        }

    def copy_tokens(self, positions: Iterable[int] = (), tokens: Iterable[int] = ()) -> np.ndarray:
        """A copy of the tokens with `tokens` at `positions`: a draft canvas."""
        changed: np.ndarray = self.tokens.copy()
        changed[list(positions)] = list(tokens)
        return changed
