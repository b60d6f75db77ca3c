"""What methods share whose tokens leave the model at the first exit whose router is sure."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.fewer_layers import FewerLayers
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.interface import Variant
from anydecode.kernels.routes import Route, RoutedPass
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.network import Network
from anydecode.scoring.sequence import Sequence


class RoutedExit(Route):
    """Rows leave at the first exit whose router is sure, and store what the layers behind make of
    their states."""

    def __init__(self, routers: ExitRouters, exits: list[int], threshold: float) -> None:
        self.routers, self.exits, self.threshold = routers, exits, threshold

    def leave(self, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        """Store the rows `active` in the layers behind `exit`."""
        routed.propagate(active, exit, routed.num_layers)

    def run(self, routed: RoutedPass) -> None:
        active, layer, depth = np.arange(len(routed.states)), 0, routed.num_layers
        for exit in self.exits:
            routed.run(active, layer, exit)
            routed.count(active, exit - layer, exit - layer)
            layer = exit
            is_sure = self.routers(exit, routed.states[active]) > self.threshold
            # Later rows read the keys and values of those that leave, in the same pass too.
            self.leave(routed, active[is_sure], exit)
            active = active[~is_sure]
        routed.run(active, layer, depth)
        routed.count(active, depth - layer, depth - layer)
        routed.stop(np.arange(len(routed.states)), depth)


class RoutedExits(FewerLayers):
    """A decoder whose tokens follow a `RoutedExit`.

    Args:
        threshold: The probability above which a router is sure.
        routers: The file of `anydecode train routers`; by default that of the model's folder,
            exit_routers.safetensors.
    """

    requirements = Requirements(reads_exit_routers=True)

    def __init__(self, threshold: float, routers: str | Path | None) -> None:
        self.threshold = threshold
        self._own = None if routers is None else ExitRouters.load(Path(routers))
        self._routes: dict[int, RoutedExit] = {}

    @abstractmethod
    def route(self, network: Network, routers: ExitRouters) -> RoutedExit:
        """How the rows of generated tokens run through `network`, whose routers these are.

        Raises:
            AnydecodeError: There is no exit, or the network has no such passes.
        """

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        self.variant(sequence, 0)

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        model: Any = sequence.kv_cache().pool.model
        routers, key = self._own or getattr(model, "exit_routers", None), self.card.key
        if routers is None:
            raise UnsupportedCombinationError(
                f"{key} needs exit routers: `anydecode train routers --out FILE` makes them, and"
                f" {key}:routers=FILE reads them"
            )
        if id(routers) not in self._routes:
            network = getattr(model, "network", None)
            if network is None:
                raise UnsupportedCombinationError(
                    f"{model.name} has no layers to leave: {key} needs a transformer"
                )
            routers.check(network)
            self._routes[id(routers)] = self.route(network, routers)
        return self._routes[id(routers)]
