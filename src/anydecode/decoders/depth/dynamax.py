"""DYNAMAX: early exits of Transformers and Mamba, with each layer's state filled from the exit
("DYNAMAX: Dynamic computing for Transformers and Mamba based architectures", arXiv:2504.20922)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.depth.routed_exits import RoutedExit, RoutedExits
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from anydecode.kernels.recurrent import path_slots
from anydecode.kernels.routes import RoutedPass
from anydecode.models.exit_routers import ExitRouters

#: What recurrent layers behind an exit do with their state.
STATES = ("update", "keep")


class CopiedExit(RoutedExit):
    """As `RoutedExit`, but the layers behind an exit store the keys and values of the layer before
    it."""

    def leave(self, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        routed.copy(active, exit, routed.num_layers)
        routed.stop(active, routed.num_layers)


class KeptExit(RoutedExit):
    """As `RoutedExit`, for layers with recurrences alone: those behind an exit keep the state that
    they have, so that later rows see nothing of the row there."""

    is_sequential = True

    def leave(self, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        routed.stop(active, exit)

    def enter(
        self, routed: RoutedPass, rows: Rows, active: np.ndarray, first: int, last: int
    ) -> None:
        tables = []
        for row, guide in enumerate(routed.guides):
            ran = [*(one.num_layers > first for one in guide.past), True]
            slots = path_slots(rows, row)
            is_seen = np.ones(len(slots), bool)
            is_seen[len(slots) - len(ran) :] = ran
            tables.append(slots[is_seen])
        start = np.full(len(rows), last, np.int32)  # of those that have left
        start[active] = first
        lengths = np.array([len(table) for table in tables], np.int32)
        seen = replace(
            rows,
            tables=tables,
            table=np.arange(len(rows), dtype=np.int32),
            positions=lengths - 1,
            prefix=lengths,
            tail_length=np.zeros_like(lengths),
            start=start,
            stop=np.full(len(rows), last, np.int32),
        )
        routed.begin(seen, routed.cache)


@register(
    Card(
        "dynamax",
        "depth",
        paper="DYNAMAX (arXiv:2504.20922)",
        exactness="lossy",
        summary="Tokens leave a transformer or a Mamba in its upper half, where a classifier says"
        " that the token will not change; the layers behind copy the keys and values.",
        needs=("exit routers",),
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "0.71 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 43.8%"
            " of tokens as the full model (AMD EPYC, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
        ),
        deviations=(
            "the threshold, and how many of the full model's tokens count as right, are guesses:"
            " 0.9 and 3",
            "each classifier is trained alone, without the weights that fall with the depth",
            "the repetition penalty is the request's",
            "prompts run through all layers; a classifier that is a block of Mamba (`--body mamba`)"
            " starts behind them and reads the generated tokens that come to its exit, in training"
            " all of them; its sizes, and a hidden layer in the place of the head behind it, are"
            " guesses",
        ),
        remote={"threshold": Range(0, 1), "state": Words(STATES)},
    )
)
class Dynamax(RoutedExits):
    """Leaves the model at the first exit in its upper half whose classifier's score is above a
    threshold.

    Attention layers behind the exit store copies of the keys and values of the last layer that
    ran. In a model with recurrences, every layer behind it stores what it makes of the state at the
    exit, so that recurrent states are updated without the rest of the layer (the paper's partial
    forward pass).

    Args:
        threshold: See above.
        state: "update": as above; "keep": in a model whose layers are all recurrent, those behind
            the exit keep the state that they have.
        routers: The file of `anydecode train depth --recipe tide --label token --top-k 3`; by
            default that of the model's folder, exit_routers.safetensors.
    """

    def __init__(
        self, threshold: float = 0.9, state: str = "update", routers: str | Path | None = None
    ) -> None:
        if state not in STATES:
            raise InvalidRequestError(f"state is {state!r}; choose from {', '.join(STATES)}")
        super().__init__(threshold, routers)
        self.state = state

    targets, training = ("token ",), "--label token --top-k 3"

    def route(self, model: Any, trained: ExitRouters) -> RoutedExit:
        self.check_target(trained)
        spec = model.spec
        exits = [exit for exit in trained.exits if 2 * exit >= spec.num_layers]
        if not exits or exits[-1] >= spec.num_layers:
            raise UnsupportedCombinationError(
                f"dynamax needs routers behind layers of the upper half of {spec.num_layers}: these"
                f" are behind {', '.join(map(str, trained.exits))}"
            )
        if self.state == "keep":
            if any(
                layer.recurrence is None or layer.attention is not None for layer in spec.layers
            ):
                raise UnsupportedCombinationError(
                    "state='keep' needs a model whose layers are all recurrent, without attention"
                )
            return KeptExit(trained, exits, self.threshold)
        if any(layer.recurrence is not None for layer in spec.layers):
            return RoutedExit(trained, exits, self.threshold)
        if len(set(spec.cache_shapes[exits[0] - 1 :])) > 1:
            raise UnsupportedCombinationError(
                "dynamax copies keys and values, and the layers of this model store different ones"
            )
        return CopiedExit(trained, exits, self.threshold)
