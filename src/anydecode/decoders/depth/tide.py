"""TIDE: each token leaves the model at the first exit whose router says that the layers behind
would change its state little ("TIDE: Token-Informed Depth Execution")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.fewer_layers import FewerLayers
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Variant
from anydecode.kernels.routes import Route, RoutedPass
from anydecode.models.exit_routers import ExitRouters
from anydecode.scoring.sequence import Sequence


class RoutedExit(Route):
    """Rows leave at the first exit whose router is sure, and store what the layers behind make of
    their states."""

    def __init__(self, routers: ExitRouters, exits: list[int], threshold: float) -> None:
        self.routers, self.exits, self.threshold = routers, exits, threshold

    def run(self, routed: RoutedPass) -> None:
        active, layer, depth = np.arange(len(routed.states)), 0, routed.num_layers
        for exit in self.exits:
            routed.run(active, layer, exit)
            routed.count(active, exit - layer, exit - layer)
            layer = exit
            is_sure = self.routers(exit, routed.states[active]) > self.threshold
            # Later rows read the keys and values of those that leave, in the same pass too.
            routed.propagate(active[is_sure], exit, depth)
            active = active[~is_sure]
        routed.run(active, layer, depth)
        routed.count(active, depth - layer, depth - layer)
        routed.stop(np.arange(len(routed.states)), depth)


@register(
    Card(
        "tide",
        "depth",
        paper="TIDE: Token-Informed Depth Execution",
        exactness="lossy",
        summary="Small routers decide at every fourth layer whether a token needs the layers"
        " behind it.",
        needs=("exit routers",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "a token that leaves runs no further layer; the released code runs all layers and then"
            " chooses which state the head reads",
            "the layers behind an exit store what they make of the state there (CALM's rule), which"
            " the released code does not need",
            "routers read the states as they are, in training and later; the released code trains"
            " them on such states and gives them normed ones",
            "routers learn on the model's own answers, not on 2000 texts of WikiText, and the last"
            " state that states are compared with is not normed",
            "routers may also learn whether the most probable token is the last layer's"
            " (`anydecode train routers --label token`)",
            "prompts run through all layers",
        ),
        remote={"threshold": Range(0, 1), "min_layers": Range(0, 1024)},
    )
)
class Tide(FewerLayers):
    """Leaves the model at the first exit whose router's probability is above a threshold.

    Args:
        threshold: See above.
        min_layers: Exits before this layer, counted from 0, are not used.
        routers: The file of `anydecode train routers`; by default that of the model's folder,
            exit_routers.safetensors.
    """

    requirements = Requirements(reads_exit_routers=True)

    def __init__(
        self, threshold: float = 0.85, min_layers: int = 8, routers: str | Path | None = None
    ) -> None:
        self.threshold, self.min_layers = threshold, min_layers
        self._own = None if routers is None else ExitRouters.load(Path(routers))
        self._routes: dict[int, RoutedExit] = {}

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.variant(sequence, 0)

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        model: Any = sequence.kv_cache().pool.model
        routers = self._own or getattr(model, "exit_routers", None)
        if routers is None:
            raise UnsupportedCombinationError(
                "tide needs exit routers: `anydecode train routers --out FILE` makes them, and"
                " tide:routers=FILE reads them"
            )
        if id(routers) not in self._routes:
            network = getattr(model, "network", None)
            if network is None:
                raise UnsupportedCombinationError(
                    f"{model.name} has no layers to leave: tide needs a transformer"
                )
            routers.check(network)
            exits = [exit for exit in routers.exits if exit > self.min_layers]
            if not exits or exits[-1] >= sequence.num_layers:
                raise InvalidRequestError(
                    f"min_layers={self.min_layers} leaves no exit: the routers have some after"
                    f" {', '.join(map(str, routers.exits))} of {sequence.num_layers} layers"
                )
            self._routes[id(routers)] = RoutedExit(routers, exits, self.threshold)
        return self._routes[id(routers)]
