"""A forward pass without some sublayers, and the record of the passes of a model."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from anydecode.certification.oracles.speculative.forward_pass import Forward

AnyForward = TypeVar("AnyForward", bound=Forward)


class PartialForward(Forward):
    """A Llama without some of its sublayers."""

    def step_without(
        self, token: int, attention: Collection[int] = (), mlps: Collection[int] = ()
    ) -> np.ndarray:
        """Adds a position; returns its logits. The layers `attention` store nothing of it."""
        x = self._embedding(token)
        for layer in range(len(self.weights.layers)):
            if layer not in attention:
                x = x + self._attention(x, layer)
            if layer not in mlps:
                x = x + self._mlp(x, layer)
        return self._logits(x)


def copied(forward: AnyForward) -> AnyForward:
    """A forward pass that goes on from the same positions."""
    other = copy(forward)
    other.keys = [list(rows) for rows in forward.keys]
    other.values = [list(rows) for rows in forward.values]
    return other


@dataclass(frozen=True)
class RecordedPass:
    """Rows of a pass that run in one way: their positions and tokens, and the variant of the
    layers."""

    positions: list[int]
    tokens: list[int]
    variant: Any


def record_passes(model: Any) -> list[RecordedPass]:
    """The passes that the model runs from now on."""
    passes: list[RecordedPass] = []
    run = model.run

    def recording(rows: Any, *rest: Any) -> Any:
        chosen = np.full(len(rows), -1) if rows.variant is None else rows.variant
        for number in np.unique(chosen).tolist():
            index = np.flatnonzero(chosen == number)
            variant = rows.variants[number] if number >= 0 else None
            passes.append(
                RecordedPass(rows.positions[index].tolist(), rows.tokens[index].tolist(), variant)
            )
        return run(rows, *rest)

    model.run = recording
    return passes
