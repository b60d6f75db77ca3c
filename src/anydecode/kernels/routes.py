"""Routes: a pass in which each row's states decide which layers, or parts of layers, it runs.

A `Route` is a variant of the layers. It runs ranges of layers for some of its rows, looks at their
states in between, and stops or skips for each row. So a layer that no row needs takes no time, and
the rows of a batch need not agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anydecode.kernels.host import to_host
from anydecode.kernels.interface import PROPAGATE, KeyValues, Rows, Variant

#: Runs some rows of a pass, by index, through the layers `[first, last)`: from their states
#: `[m, hidden_size]` to the states behind these layers.
RunLayers = Callable[[np.ndarray, np.ndarray, int, int, Variant | None], np.ndarray]
Head = Callable[[np.ndarray], np.ndarray]
#: Starts a pass of rows over a key-value cache: layers that run from then on belong to it.
Begin = Callable[[Rows, KeyValues], None]


@dataclass(eq=False)
class Guide:
    """What a route knows of one row; methods add what they need.

    Attributes:
        num_layers: Result: how many of the first layers have stored the row's keys and values.
        num_mixers: Result: attention (or recurrent) sublayers that have run.
        num_mlps: Result: MLPs that have run.
        num_heads: Result: rows of the whole head that were computed in between.
    """

    num_layers: int = 0
    num_mixers: int = 0
    num_mlps: int = 0
    num_heads: int = 0


class RoutedPass:
    """The rows of a pass that follow one route.

    Args:
        states: The rows' inputs, float32 `[rows, hidden_size]`; replaced by their states as layers
            run.
        guides: One per row.
        num_layers: Layers of the model.
        run_layers: Runs layers.
        run_head: Logits `[m, vocab_size]` of states `[m, hidden_size]`.
        begin: Starts the pass; called before the first layers run.
        rows: The metadata of the rows.
        cache: The key-value cache.
        captured: Numbers of layers behind which states are read; see `hidden`.
    """

    def __init__(
        self,
        states: np.ndarray,
        guides: list[Any],
        num_layers: int,
        run_layers: RunLayers,
        run_head: Head,
        begin: Begin,
        rows: Rows,
        cache: KeyValues,
        captured: Iterable[int] = (),
    ) -> None:
        self.states, self.guides, self.num_layers = states, guides, num_layers
        # NaN where a row has not come through so many layers.
        self._captured = {layers: np.full_like(states, np.nan) for layers in sorted(captured)}
        if 0 in self._captured:
            self._captured[0] = states.copy()
        self._run_layers, self._run_head, self._begin = run_layers, run_head, begin
        self.rows, self.cache, self._has_begun = rows, cache, False

    def begin(self, rows: Rows, cache: KeyValues) -> None:
        """Let the layers that run from now on read and store keys and values in `cache`, with these
        rows, which differ from those before in their slots and tables."""
        self.rows, self.cache, self._has_begun = rows, cache, True
        self._begin(rows, cache)

    def run(
        self, active: np.ndarray, first: int, last: int, variant: Variant | None = None
    ) -> None:
        """Run the rows `active` (their indices) through the layers `[first, last)`."""
        if not len(active) or first >= last:
            return
        for stop in (*(layers for layers in self._captured if first < layers < last), last):
            states = self._layers(active, first, stop, variant)
            self.states[active] = states
            if stop in self._captured:
                self._captured[stop][active] = states
            first = stop

    def _layers(
        self, active: np.ndarray, first: int, last: int, variant: Variant | None
    ) -> np.ndarray:
        if not self._has_begun:
            self.begin(self.rows, self.cache)
        return self._run_layers(self.states[active], active, first, last, variant)

    def hidden(self, layers: int) -> np.ndarray:
        """The rows' states after so many layers, float32 `[rows, hidden_size]`, once they have run;
        of a row that has left before, its last ones. `layers` must be among the captured."""
        captured = self._captured[layers]
        return np.where(np.isnan(captured[:, :1]), self.states, captured)

    def count(self, active: np.ndarray, mixers: int, mlps: int) -> None:
        """Record that the rows `active` have run so many sublayers."""
        for row in active.tolist():
            self.guides[row].num_mixers += mixers
            self.guides[row].num_mlps += mlps

    def head(self, active: np.ndarray) -> np.ndarray:
        """The logits `[m, vocab_size]` of the states of the rows `active`, as if each had run
        through its last layer."""
        for row in active.tolist():
            self.guides[row].num_heads += 1
        return self._run_head(self.states[active])

    def stop(self, active: np.ndarray, layer: int) -> None:
        """Record that the rows `active` store nothing of their own from `layer` on."""
        for row in active.tolist():
            self.guides[row].num_layers = layer

    def propagate(self, active: np.ndarray, first: int, last: int) -> None:
        """Store, in the layers `[first, last)`, what each makes of the states of the rows `active`
        as they are (Schuster et al., CALM, arXiv:2207.07061). The states stay."""
        if len(active) and first < last:
            self._layers(active, first, last, PROPAGATE)

    def copy(self, active: np.ndarray, first: int, last: int) -> None:
        """Store, in the layers `[first, last)`, what layer `first - 1` has stored of the rows
        `active`."""
        slots = self.rows.slots[active]
        slots = slots[slots >= 0]
        for arrays in (self.cache.keys, self.cache.values):
            for layer in range(first, last):
                if arrays[layer].shape[1:] != arrays[first - 1].shape[1:]:
                    raise ValueError(f"layer {layer} stores other shapes than layer {first - 1}")
                arrays[layer][slots] = arrays[first - 1][slots]


class Route(Variant, ABC):
    """Decides, inside a pass, which layers each of its rows runs."""

    #: Whether rows have no keys and values where they did not run: later rows do not see them
    #: there. Otherwise the route stores something in every layer.
    leaves_holes = False
    #: Whether a row's guide must have the results of the rows before it, so that the rows of a text
    #: run one by one.
    is_sequential = False
    #: Whether tokens store what they store without the route.
    keeps_states = False
    #: Whether all rows run the layers as they are, so that rows may have adapters.
    takes_adapters = False

    @abstractmethod
    def run(self, routed: RoutedPass) -> None:
        """Run the rows. Their states afterwards are those that the head reads."""


class TreeRoute(Route):
    """A route of the rows of a draft tree and of the text's tokens before it."""

    @abstractmethod
    def guides(self, num_tokens: int, tokens: Seq[int], parents: Seq[int]) -> list[Any]:
        """The guides of the last `num_tokens` tokens of a text, then of the nodes of a tree behind
        them, which has these tokens, -1 for none, and parents, -1 for the text's last token."""


def part_of(rows: Rows, index: np.ndarray) -> Rows:
    """The rows of `index`, without variants."""
    if rows.inputs is not None:
        rows = replace(rows, inputs=to_host(rows.inputs))
    part = replace(rows.select(index), variant=None, variants=[])
    if part.adapters is not None and (part.adapters < 0).all():
        part.adapters = None
    return part
