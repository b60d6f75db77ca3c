"""DYNAMAX: early exits of Transformers and Mamba, with each layer's state filled from the exit
("DYNAMAX: Dynamic computing for Transformers and Mamba based architectures", arXiv:2504.20922)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.routed_exits import RoutedExit, RoutedExits
from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.routes import RoutedPass
from anydecode.models.exit_routers import ExitRouters


class CopiedExit(RoutedExit):
    """As `RoutedExit`, but the layers behind an exit store the keys and values of the layer before
    it."""

    def leave(self, routed: RoutedPass, active: np.ndarray, exit: int) -> None:
        routed.copy(active, exit, routed.num_layers)


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
        missing=(
            "classifiers with attention or a Mamba block; the one here has one hidden layer",
            "Mamba layers whose state is left as it is: the engine's recurrences read every earlier"
            " position",
        ),
        deviations=(
            "the threshold, and how many of the full model's tokens count as right, are guesses:"
            " 0.9 and 3",
            "each classifier is trained alone, without the weights that fall with the depth",
            "the repetition penalty is the request's",
            "prompts run through all layers",
        ),
        remote={"threshold": Range(0, 1)},
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
        routers: The file of `anydecode train routers --label token --top-k 3`; by default that of
            the model's folder, exit_routers.safetensors.
    """

    def __init__(self, threshold: float = 0.9, routers: str | Path | None = None) -> None:
        super().__init__(threshold, routers)

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
        if any(layer.recurrence is not None for layer in spec.layers):
            return RoutedExit(trained, exits, self.threshold)
        if len(set(spec.cache_shapes[exits[0] - 1 :])) > 1:
            raise UnsupportedCombinationError(
                "dynamax copies keys and values, and the layers of this model store different ones"
            )
        return CopiedExit(trained, exits, self.threshold)
