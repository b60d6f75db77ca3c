"""DoLa: decoding by contrasting layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.truncation import log_probabilities

#: The candidate layers a user can name: which half of the model they lie in.
HALVES = ("low", "high")


#: How far the tokens that are too improbable in the last layer stand below all others, in nats.
BELOW = np.float32(1e4)


@dataclass(frozen=True)
class DoLa:
    """ln p(last layer) - ln p(early layer) over tokens at least `relative_top` times as probable as
    the best; the others come `BELOW` them, with ln p(last layer) alone, for `Plausible` to drop.
    The early layer is the one of `taps` whose distribution has the largest Jensen-Shannon
    divergence from the last (Chuang et al., 2023, arXiv 2309.03883); ties fall to the lower layer.
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
        """float32 `[vocab_size]`."""
        last, p = log_probabilities(logits)
        early = {
            layer: log_probabilities(capture_layers[layer]) for layer in sorted(self.capture_layers)
        }
        layer = max(early, key=lambda layer: divergence(last, p, *early[layer]))
        allowed = last >= last.max() + np.float32(np.log(self.relative_top))
        row: np.ndarray = np.where(allowed, last - early[layer][0], last - BELOW)
        return row


class Plausible(LogitsProcessor):
    """Drops what `DoLa` put below the rest. It comes after the constraint, so that where that
    leaves nothing else, the last layer chooses among what is left."""

    def apply(self, candidates: Candidates) -> Candidates:
        candidates = candidates.allowed()
        return candidates.keep(
            np.flatnonzero(candidates.scores >= candidates.scores.max() - BELOW / 2)
        )


def divergence(log_p: np.ndarray, p: np.ndarray, log_q: np.ndarray, q: np.ndarray) -> float:
    """Jensen-Shannon divergence in nats."""
    middle = np.logaddexp(log_p, log_q) - np.float32(np.log(2))
    return 0.5 * float(
        (p * (log_p - middle)).sum(dtype=np.float64) + (q * (log_q - middle)).sum(dtype=np.float64)
    )


def candidate_layers(choice: str | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers to contrast with, counted as how many have run (0: the embeddings): as given, or
    every second one of the "low" or "high" half. Raises `InvalidRequestError`."""
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
    return tuple(int(layer) for layer in choice)


@register(
    Card(
        "dola",
        "sampling",
        paper="DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models"
        " (arXiv:2309.03883)",
        exactness="lossy",
        summary="Says what the last layer knows and an early one did not yet.",
        needs=("a model whose early layers can be read",),
        works_with=tuple(one for one in WORKS_WITH if one != "guidance"),
        deviations=(
            "no repetition penalty is added; the paper's 1.2 is repetition_penalty=1.2",
            "early states pass the final norm before the head; the authors' code leaves it out",
            "where a constraint allows no plausible token, the last layer alone chooses",
            "candidates are every second layer of one half; the paper chooses among two to four"
            " buckets by a validation set",
        ),
    )
)
def dola(layers: str = "high") -> SamplerPreset:
    """`layers`: "low", "high", or numbers of layers joined with "+"."""
    chosen: str | list[int] = layers
    if layers not in HALVES:
        try:
            chosen = [int(layer) for layer in str(layers).split("+")]
        except ValueError:
            raise InvalidRequestError(
                f"dola: layers must be low, high or numbers joined with +, not {layers!r}"
            ) from None
    return SamplerPreset("dola", {"dola_layers": chosen}, needs_temperature=False)
