"""FiRST: routers choose, while the prompt runs, the layers that a sequence skips for good (Jain et
al., "FiRST: Finetuning Router-Selective Transformers for Input-Adaptive Latency Reduction",
arXiv:2410.12513)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.depth.trained_routes import TrainedRoutes
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import SkippedParts, Variant
from anydecode.kernels.routes import Guide, Route, RoutedPass
from anydecode.models.layer_routers import LayerRouters
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: How the scores of a prompt's tokens decide.
POOLINGS = ("mean", "majority", "last")
_SKIPPED: StateKey[list[int]] = StateKey("first-router", "skipped layers")


@dataclass(eq=False)
class PromptGuide(Guide):
    """What a route knows of a row: the layers that its prompt skips, a list that all rows of the
    prompt share."""

    skipped: list[int] = field(default_factory=list)


class RoutedPrompt(Route):
    """Prompts skip the layers whose routers say so of all their tokens together. All tokens of a
    prompt run in one pass."""

    def __init__(self, routers: LayerRouters, threshold: float, pooling: str) -> None:
        self.routers, self.threshold, self.pooling = routers, threshold, pooling

    def run(self, routed: RoutedPass) -> None:
        guides: list[PromptGuide] = routed.guides
        rows_of: dict[int, list[int]] = {}
        for row, guide in enumerate(guides):
            rows_of.setdefault(id(guide.skipped), []).append(row)
        prompts = [np.array(rows) for rows in rows_of.values()]
        for layer in range(routed.num_layers):
            active = []
            for rows in prompts:
                if layer in self.routers.layers and not self.needs(layer, routed.states[rows]):
                    guides[rows[0]].skipped.append(layer)
                else:
                    active += rows.tolist()
            index = np.array(sorted(active), np.int64)
            routed.run(index, layer, layer + 1)
            routed.count(index, 1, 1)
        routed.stop(np.arange(len(guides)), routed.num_layers)

    def needs(self, layer: int, states: np.ndarray) -> bool:
        """Whether a prompt with these inputs of `layer`, float32 `[tokens, hidden_size]`, runs
        it."""
        scores = self.routers.scores(layer, states)
        probabilities = 0.5 + 0.5 * np.tanh(0.5 * scores)
        if self.pooling == "last":
            return bool(probabilities[-1] >= self.threshold)
        if self.pooling == "majority":
            return bool((probabilities >= self.threshold).mean() >= 0.5)
        return bool(probabilities.mean() >= self.threshold)


@register(
    Card(
        "first-router",
        "depth",
        paper="Jain et al. 2024, FiRST (arXiv:2410.12513)",
        exactness="lossy",
        summary="Routers choose by the prompt which layers the whole sequence skips.",
        needs=("layer routers",),
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "1.06 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), within the"
            " noise: the trained routers skip no layer (AMD EPYC, 2 cores; `anydecode bench depth`,"
            " docs/performance.md)",
        ),
        deviations=(
            "how the tokens of a prompt decide together is not published: by the mean of their"
            " probabilities; `pooling` has others",
            "the prompt skips the layers too, so that later routers read what is left",
            "the first two layers and the last have no router by default",
            "the second phase, `anydecode train depth --recipe first-router-adapter`, learns the"
            " model's own answers too; the adapter is merged into the model",
            "routers learn with the loss on the model's own answers and 0.01 nats for each layer"
            " that runs; a third term of the paper's loss is not published",
        ),
        remote={"threshold": Range(0, 1), "pooling": Words(POOLINGS)},
    )
)
class FirstRouter(TrainedRoutes):
    """Skips, for the whole sequence, the layers that its prompt does not need.

    While the prompt runs, a layer's router reads the layer's input at every token. If the pooled
    probability is below the threshold, neither the prompt nor any later token runs the layer.

    Args:
        threshold: See above.
        pooling: "mean": of the tokens' probabilities; "majority": half of the tokens are at or
            above the threshold; "last": that of the last token.
        routers: The file of `anydecode train depth --recipe first-router`; by default that of the
            model's folder, layer_routers.safetensors.
    """

    requirements = Requirements(reads_layer_routers=True, attention_only=("target",))
    part, command = "layer_routers", "depth --recipe first-router"

    def __init__(
        self, threshold: float = 0.5, pooling: str = "mean", routers: str | Path | None = None
    ) -> None:
        if pooling not in POOLINGS:
            raise InvalidRequestError(f"pooling is {pooling!r}; choose from {', '.join(POOLINGS)}")
        super().__init__(None if routers is None else LayerRouters.load(Path(routers)))
        self.threshold, self.pooling = threshold, pooling

    def route(self, model: Any, trained: LayerRouters) -> RoutedPrompt:
        return RoutedPrompt(trained, self.threshold, self.pooling)

    def decode(self, sequence: Sequence) -> Decoding:
        sequence.truncate(0)  # another request's prefix has run other layers
        guides = [PromptGuide() for _ in sequence.prompt]
        for guide in guides:
            guide.skipped = guides[0].skipped
        request = sequence.score(
            sequence.prompt, variant=self.trained_route(sequence), guides=guides
        )
        request.groups[0][-1].divisible = False
        yield request
        sequence.state[_SKIPPED] = guides[0].skipped
        # The loop starts from a token that has not been scored.
        sequence.truncate(len(sequence.prompt) - 1)
        yield from super().decode(sequence)

    def _row_variant(self, sequence: Sequence, index: int) -> Variant | None:
        return self.variant(sequence, index)

    def variant(self, sequence: Sequence, index: int) -> Variant | None:
        layers = sequence.state[_SKIPPED]
        skipped = frozenset(layers)
        return SkippedParts(skipped, skipped) if skipped else None
