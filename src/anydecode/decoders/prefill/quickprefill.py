"""QuickPrefill: long media group by group, of each only the keys of small norm.

Schneider et al., "QuickVideo: Real-Time Long Video Understanding with System Algorithm Co-Design",
arXiv:2505.16175.
"""

from __future__ import annotations

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.prefill.prefilled import (
    WORKS,
    Prefilled,
    check_thinnable,
    compact,
    given,
    plain,
)
from anydecode.errors import InvalidRequestError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def smallest(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` rows of keys `[rows, kv_heads, head_dim]` with the smallest norm over all heads,
    ties to the first, ascending."""
    norms = keys.float().flatten(1).norm(dim=1)
    return torch.sort(norms, stable=True).indices[:count].sort().values


@register(
    Card(
        "quickprefill",
        "serving",
        paper="Schneider et al. 2025, QuickVideo, arXiv:2505.16175",
        exactness="lossy",
        summary="Media in groups; of each group every layer keeps the keys of smallest norm.",
        works_with=WORKS,
        deviations=(
            "media are embeddings given with the prompt, or without them all of a text but its end;"
            " decoding of video beside the prefill is the caller's",
            "a group is a number of rows, not of frames",
        ),
    )
)
class QuickPrefill(Prefilled):
    """The media go through the model in groups of `group` rows, and of each group every layer keeps
    the share `keep`. Without embeddings the media are the prompt up to its last `query` tokens."""

    def __init__(
        self,
        group: int = 256,
        keep: float = 0.5,
        query: int = 64,
        decoder: str = "autoregressive",
    ) -> None:
        super().__init__(decoder)
        if group < 1 or not 0 < keep <= 1 or query < 1:
            raise InvalidRequestError("quickprefill needs group, query >= 1 and 0 < keep <= 1")
        self.group, self.keep, self.query = group, keep, query

    def prefill(self, sequence: Sequence, context: SequenceCache) -> Decoding:
        length = len(sequence.prompt) - 1
        media = given(sequence)
        first, last = (0, length + 1 - self.query) if media is None else (media.first, media.stop)
        if first < last:
            check_thinnable(context)
            if first:
                yield plain(sequence, context, 0, first)
            for start in range(first, last, self.group):
                stop = min(start + self.group, last)
                yield plain(sequence, context, start, stop)
                self._thin(context, start)
        if max(0, last) < length:
            yield plain(sequence, context, max(0, last), length)

    def _thin(self, context: SequenceCache, start: int) -> None:
        slots = torch.from_numpy(context.table[start:].astype(np.int64))
        count = max(1, int(self.keep * len(slots)))
        kept = []
        for keys in context.pool.cache.keys:
            rows = smallest(keys[slots.to(keys.device)].cpu(), count)
            kept.append(rows.expand(keys.shape[1], -1))
        compact(context, start, kept)
