"""TIDE: each token leaves the model at the first exit whose router says that the layers behind
would change its state little ("TIDE: Token-Informed Depth Execution")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.routed_exits import RoutedExit, RoutedExits
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_routers import ExitRouters


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
        measured=(
            "0.83 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 82.3%"
            " of tokens as the full model: a full head costs as much as 8.0 of its layers (AMD"
            " EPYC, 2 cores; `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "a token that leaves runs no further layer; the released code runs all layers and then"
            " chooses which state the head reads",
            "each text of a batch leaves on its own; in the released code all leave or none",
            "the layers behind an exit store what they make of the state there (CALM's rule), which"
            " the released code does not need",
            "routers read the states as they are, in training and later; the released code trains"
            " them on such states and gives them normed ones",
            "routers learn on the model's own answers, not on 2000 texts of WikiText, and the last"
            " state that states are compared with is not normed",
            "routers may also learn whether the most probable token is the last layer's"
            " (`anydecode train depth --recipe tide --label token`)",
            "prompts run through all layers",
        ),
        remote={"threshold": Range(0, 1), "min_layers": Range(0, 1024)},
    )
)
class Tide(RoutedExits):
    """Leaves the model at the first exit whose router's probability is above a threshold.

    Args:
        threshold: See above.
        min_layers: Exits before this layer, counted from 0, are not used.
        routers: The file of `anydecode train depth --recipe tide`; by default that of the model's
            folder, exit_routers.safetensors.
    """

    def __init__(
        self, threshold: float = 0.85, min_layers: int = 8, routers: str | Path | None = None
    ) -> None:
        super().__init__(threshold, routers)
        self.min_layers = min_layers

    targets, training = ("cosine ", "token 1 "), "[--label token]"

    def route(self, model: Any, trained: ExitRouters) -> RoutedExit:
        self.check_target(trained)
        depth = model.spec.num_layers
        exits = [exit for exit in trained.exits if exit > self.min_layers]
        if not exits or exits[-1] >= depth:
            raise InvalidRequestError(
                f"min_layers={self.min_layers} leaves no exit: the routers have some after"
                f" {', '.join(map(str, trained.exits))} of {depth} layers"
            )
        return RoutedExit(trained, exits, self.threshold)
