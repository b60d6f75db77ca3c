"""DoLa: decoding by contrasting layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import numpy as np

from anydecode.catalogue import Card, Text, register
from anydecode.errors import InvalidRequestError
from anydecode.sampling.contrast import contrasted
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.truncation import log_probabilities

#: Candidate layers by name: the lower or upper half of the model.
LAYER_HALVES = ("low", "high")


@dataclass(frozen=True)
class DoLa:
    """Contrast of the last layer with an early one: ln p(last layer) - ln p(early layer) (Chuang et
    al., 2023, arXiv 2309.03883).

    This holds for tokens at least `relative_top` times as probable as the best one in the last
    layer. The others are dropped (`Plausible`). The early layer is the one of `capture_layers` with
    the largest Jensen-Shannon divergence from the last layer, ties to the lower layer.

    Args:
        capture_layers: The candidate early layers.
        relative_top: Minimum probability of a token relative to the best one.
    """

    capture_layers: tuple[int, ...]
    relative_top: float = 0.1

    companions: ClassVar[int] = 0

    def combine(
        self,
        logits: np.ndarray,
        companions: list[np.ndarray],
        capture_layers: dict[int, np.ndarray],
    ) -> np.ndarray:
        """The contrasted row, float32 `[vocab_size]`."""
        last, p = log_probabilities(logits)
        early = {
            layer: log_probabilities(capture_layers[layer]) for layer in sorted(self.capture_layers)
        }
        layer = max(early, key=lambda layer: divergence(last, p, *early[layer]))
        return contrasted(last, early[layer][0], self.relative_top)


def divergence(log_p: np.ndarray, p: np.ndarray, log_q: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon divergence in nats."""
    middle = np.logaddexp(log_p, log_q) - np.float32(np.log(2))
    return 0.5 * float(
        (p * (log_p - middle)).sum(dtype=np.float64) + (q * (log_q - middle)).sum(dtype=np.float64)
    )


def candidate_layers(choice: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers to contrast with, each once in ascending order, numbered by how many layers have
    run (0: the embeddings).

    Args:
        choice: Layer numbers, or "low" or "high" for every second layer of that half.
        num_layers: Number of layers of the model.

    Raises:
        InvalidRequestError: If `choice` is not valid for the model.
    """
    half = num_layers // 2
    if choice == "low":
        return tuple(range(2 if half > 2 else 0, half, 2)) or (0,)
    if choice == "high":
        return tuple(range(half, num_layers, 2))
    if isinstance(choice, str):
        raise InvalidRequestError(f"dola_layers must be low, high or layers, not {choice!r}")
    for layer in choice:
        if isinstance(layer, bool) or not isinstance(layer, Integral):
            raise InvalidRequestError(f"dola_layers must be low, high or layers, not {layer!r}")
        if not 0 <= int(layer) < num_layers:
            raise InvalidRequestError(
                f"dola_layers names layer {layer}; this model has layers 0 to {num_layers - 1}"
                " before its last"
            )
    return tuple(sorted({int(layer) for layer in choice}))


@register(
    Card(
        "dola",
        "sampling",
        paper="DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models"
        " (arXiv:2309.03883)",
        exactness="lossy",
        summary="Prefers tokens whose probability grows from an early layer to the last one.",
        needs=("a model whose early layers can be read",),
        works_with=tuple(one for one in WORKS_WITH if one != "guidance"),
        deviations=(
            "no repetition penalty is added; the paper's 1.2 is repetition_penalty=1.2",
            "early states pass the final norm before the head; the authors' code leaves it out",
            "if a constraint allows no plausible token, the last layer alone decides",
            "candidates are every second layer of one half; the paper selects one of two to four"
            " buckets with a validation set",
        ),
        remote={"layers": Text(32)},
    )
)
def dola(layers: str = "high") -> SamplerPreset:
    """Decoding by contrasting layers.

    Args:
        layers: "low", "high", or layer numbers joined with "+".
    """
    chosen: str | list[int] = layers
    if layers not in LAYER_HALVES:
        try:
            chosen = [int(layer) for layer in str(layers).split("+")]
        except ValueError:
            raise InvalidRequestError(
                f"dola: layers must be low, high or numbers joined with +, not {layers!r}"
            ) from None
    return SamplerPreset("dola", {"dola_layers": chosen}, needs_temperature=False)
