"""A planned forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np

from anydecode.engine.schedule import ScheduledSpan
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.scoring.score import ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import MultiStepSpan


@dataclass(eq=False)
class Plan:
    """One forward pass.

    Args:
        scheduled: The spans that run, with their number of rows.
        rows: Metadata of all rows, the input of `Model.run`.
        output_spec: The outputs to compute.
        output_rows: `output_rows[i]`: the rows of span i to return, as indices into the span.
        first_output: `first_output[i]`: where these rows begin in the logits of the pass.
        captured: `captured[layer][i]`: the rows of span i in the hidden states of `layer`.
        states: `states[i]`: the first row of span i whose states are captured for a drafter, and
            the rows of its states in the hidden states of each layer.
        seconds: Duration of the pass, set after it.
        multi_step: The spans with which the backend may run further steps.
        num_passes: Number of steps that the backend has run.
        further_rows: Rows of all steps but the first, of each of `scheduled`; empty: none.
        arrivals: Called between two ranges of layers; returns the sequences that were submitted
            since the pass began.
        is_alone: Whether no other pass runs, so that this one may use all threads.
        left: The spans that have left the pass between two layers.
    """

    scheduled: list[ScheduledSpan]
    rows: Rows
    output_spec: OutputSpec
    output_rows: list[list[int]]
    first_output: list[int]
    captured: dict[int, dict[int, slice]]
    states: dict[int, tuple[int, list[slice]]] = field(default_factory=dict)
    seconds: float = 0.0
    multi_step: list[MultiStepSpan] = field(default_factory=list)
    num_passes: int = 1
    further_rows: list[int] = field(default_factory=list)
    arrivals: Callable[[], Collection[Sequence]] = tuple
    is_alone: bool = True
    left: list[ScheduledSpan] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Number of rows computed, including those of further steps."""
        return len(self.rows) + sum(self.further_rows)

    def remove(self, requests: Collection[ScoreRequest]) -> np.ndarray:
        """Remove the rows of `requests` from the pass; their spans go to `left`.

        Returns:
            The indices of the other rows, int64 `[rows]`, as they were before.
        """
        stays = [request not in requests for request, _, _ in self.scheduled]
        kept_rows = np.repeat(stays, [count for _, _, count in self.scheduled])
        new_row = np.cumsum(kept_rows, dtype=np.int32) - 1
        index = np.flatnonzero(kept_rows)
        spec = self.output_spec
        kept_logits = kept_rows[spec.logits]
        new_logit = np.cumsum(kept_logits) - 1
        kept_hidden = {layer: kept_rows[rows] for layer, rows in spec.hidden.items()}
        self.output_spec = replace(
            spec,
            logits=new_row[spec.logits[kept_logits]],
            hidden={
                layer: new_row[index[kept_hidden[layer]]] for layer, index in spec.hidden.items()
            },
            samples=[
                one._replace(row=int(new_logit[one.row]))
                for one in spec.samples
                if kept_logits[one.row]
            ],
        )
        # Positions among the captured rows of each layer, before and after.
        moved = {layer: np.cumsum([0, *kept]) for layer, kept in kept_hidden.items()}

        def shifted(layer: int, part: slice) -> slice:
            return slice(int(moved[layer][part.start]), int(moved[layer][part.stop]))

        numbers = [i for i, stay in enumerate(stays) if stay]
        self.captured = {
            layer: {
                new: shifted(layer, parts[old]) for new, old in enumerate(numbers) if old in parts
            }
            for layer, parts in self.captured.items()
        }
        states = {}
        for new, old in enumerate(numbers):
            if old in self.states:
                first, parts = self.states[old]
                layers = self.scheduled[old][1].state_layers
                states[new] = first, [shifted(*one) for one in zip(layers, parts, strict=True)]
        self.states = states
        before = np.cumsum([0, *kept_logits])
        self.first_output = [int(before[self.first_output[old]]) for old in numbers]
        self.output_rows = [self.output_rows[old] for old in numbers]
        self.left += [item for item, stay in zip(self.scheduled, stays, strict=True) if not stay]
        self.scheduled = [self.scheduled[old] for old in numbers]
        self.rows = self.rows.select(index)
        return index

    def unreserve_left(self) -> None:
        """Undo the reservations of the spans that have left the pass."""
        for _, span, count in reversed(self.left):
            span.unreserve(count)
