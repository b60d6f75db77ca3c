"""A scripted model that records what it runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.certification.rounds import Logits
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ScriptedModel


class RecordingModel(ScriptedModel):
    """Records (position, first layer, last layer) of every row it runs, and counts the cache slots
    that change between two passes."""

    def __init__(self, script: Logits, **options: Any) -> None:
        super().__init__(script, **options)
        self.ran: list[tuple[int, int, int]] = []
        self.copied = 0
        self._after: list[np.ndarray] = []

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        positions = zip(
            rows.positions.tolist(), rows.start.tolist(), rows.stop.tolist(), strict=True
        )
        self.ran += positions
        for before, keys in zip(self._after, cache.keys, strict=False):
            self.copied += int((before != keys).sum())
        output = super().run(rows, cache, output_spec)
        self._after = [keys.copy() for keys in cache.keys]
        return output
