"""What methods share whose tokens leave the model at the first exit whose router is sure."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.trained_routes import TrainedRoutes
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Rows, Variant
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.exit_routers import ExitRouters, RouterStates
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import Sequence


@dataclass(eq=False)
class TextGuide(Guide):
    """What a route knows of a row of the generated text.

    Attributes:
        past: While the row runs, the guides of the generated tokens before it.
        router_states: Result: what the routers remember of the text up to the row.
    """

    past: list[Guide] = field(default_factory=list)
    router_states: RouterStates = field(default_factory=dict)


class RoutedExit(Route):
    """Rows leave at the first exit whose router is sure, and store what the layers behind make of
    their states. A router that remembers the text reads the rows that come to its exit."""

    def __init__(self, routers: ExitRouters, exits: list[int], threshold: float) -> None:
        self.routers, self.exits, self.threshold = routers, exits, threshold
        self.is_sequential = self.is_sequential or routers.mamba is not None

    def _probabilities(self, routed: RoutedPass, active: np.ndarray, exit: int) -> np.ndarray:
        """Those of the routers of `exit` for the rows `active`."""
        states = routed.states[active]
        if self.routers.mamba is None:
            return self.routers(exit, states)
        guides: list[TextGuide] = [routed.guides[row] for row in active]
        return np.array(
            [
                self.routers.read(exit, state, guide.router_states)
                for state, guide in zip(states, guides, strict=True)
            ]
        )

    def leave(self, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        """Store the rows `active` in the layers behind `exit`."""
        routed.propagate(active, exit, routed.num_layers)
        routed.stop(active, routed.num_layers)

    def enter(
        self, routed: RoutedPass, rows: Rows, active: np.ndarray, first: int, last: int
    ) -> None:
        """Called before the rows `active` of the pass's `rows` run the layers `[first, last)`."""

    def run(self, routed: RoutedPass) -> None:
        active, layer, depth = np.arange(len(routed.states)), 0, routed.num_layers
        rows = routed.rows
        if self.routers.mamba is not None:
            for guide in routed.guides:
                guide.router_states = dict(guide.past[-1].router_states) if guide.past else {}
        for exit in self.exits:
            self.enter(routed, rows, active, layer, exit)
            routed.run(active, layer, exit)
            routed.count(active, exit - layer, exit - layer)
            layer = exit
            is_sure = self._probabilities(routed, active, exit) > self.threshold
            # Later rows read the keys and values of those that leave, in the same pass too.
            self.leave(routed, active[is_sure], exit)
            active = active[~is_sure]
        self.enter(routed, rows, active, layer, depth)
        routed.run(active, layer, depth)
        routed.count(active, depth - layer, depth - layer)
        routed.stop(active, depth)


class RoutedExits(TrainedRoutes):
    """A decoder whose tokens follow a `RoutedExit`.

    Args:
        threshold: The probability above which a router is sure.
        routers: The file of `anydecode train depth --recipe tide`; by default that of the model's
            folder, exit_routers.safetensors.
    """

    #: What the routers may have learned (`ExitRouters.target`), as beginnings, and how to train
    #: such ones.
    targets: ClassVar[tuple[str, ...]]
    training: ClassVar[str]

    requirements = Requirements(reads_exit_routers=True)
    part, command = "exit_routers", "depth --recipe tide"

    def __init__(self, threshold: float, routers: str | Path | None) -> None:
        super().__init__(None if routers is None else ExitRouters.load(Path(routers)))
        self.threshold = threshold

    def check_target(self, routers: ExitRouters) -> None:
        """Raise InvalidRequestError if the routers have learned something else than the method
        needs."""
        if f"{routers.target} ".startswith(self.targets):
            return
        raise InvalidRequestError(
            f"these routers have learned {routers.target or 'an unknown label'!r};"
            f" {self.card.key} needs those of `anydecode train depth --recipe tide {self.training}`"
        )

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        route: RoutedExit = self.trained_route(sequence)
        return route

    def guides(
        self, sequence: Sequence, variant: Variant | None, tokens: list[int], past: list[Guide]
    ) -> Generator[DecoderAction, Any, list[Guide]]:
        if not isinstance(variant, RoutedExit):
            return (yield from super().guides(sequence, variant, tokens, past))
        for guide in past[-2:-1]:  # the next row reads the last one's alone
            assert isinstance(guide, TextGuide), "made below"
            guide.router_states = {}
        return [TextGuide(past=past) for _ in tokens]
