"""QuickPrefill (Schneider et al., "QuickVideo: Real-Time Long Video Understanding with System
Algorithm Co-Design", arXiv:2505.16175).

Long media are prefilled in groups. After each group, every layer keeps only the positions of the
group whose keys have the smallest norm.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.prefill.prefilled import (
    WORKS_WITH,
    Prefilled,
    check_compressible,
    compact,
    prompt_embeds_of,
    score_prompt,
)
from anydecode.errors import InvalidRequestError
from anydecode.kernels.host import select
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


def smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """The indices of the `count` keys with the smallest norm over all heads, ascending.

    `keys` is `[rows, kv_heads, head_dim]`. Of equal norms the first row is taken.
    """
    norms = np.linalg.norm(keys.astype(np.float32).reshape(len(keys), -1), axis=1)
    return np.sort(np.argsort(norms, kind="stable")[:count])


@register(
    Card(
        "quickprefill",
        "serving",
        paper="Schneider et al. 2025, QuickVideo, arXiv:2505.16175",
        exactness="lossy",
        summary="Prefills media in groups; every layer keeps the keys of smallest norm of a group.",
        works_with=WORKS_WITH,
        deviations=(
            "media are the embeddings given with the prompt, or else the prompt without its end;"
            " the caller decodes the video",
            "the size of a group is counted in rows, not in frames",
        ),
        remote={
            "group": Range(1, 4096),
            "keep": Range(0, 1),
            "query": Range(1, 4096),
            "decoder": Nested(),
        },
    )
)
class QuickPrefill(Prefilled):
    """Prefills media in groups, and keeps a share of each group's keys and values.

    Args:
        group: The number of rows in a group.
        keep: The share of a group's positions that every layer keeps.
        query: Without embeddings in the prompt, the media are the prompt without its last `query`
            tokens.
        decoder: The catalogue key of the decoder that generates.
    """

    def __init__(
        self,
        group: int = 256,
        keep: float = 0.5,
        query: int = 64,
        decoder: str = "autoregressive",
    ) -> None:
        super().__init__(decoder)
        if group < 1 or not 0 < keep <= 1 or query < 1:
            raise InvalidRequestError("quickprefill needs group >= 1, query >= 1 and 0 < keep <= 1")
        self.group, self.keep, self.query = group, keep, query

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        first, last = self._media(sequence)
        if first < last:
            check_compressible(sequence.pool())

    def prefill(self, sequence: Sequence, kv_cache: SequenceCache) -> Decoding:
        length = len(sequence.prompt) - 1
        first, last = self._media(sequence)
        if first < last:
            if first:
                yield score_prompt(sequence, kv_cache, 0, first)
            for start in range(first, last, self.group):
                stop = min(start + self.group, last)
                yield score_prompt(sequence, kv_cache, start, stop)
                self._compress(kv_cache, start)
        if max(0, last) < length:
            yield score_prompt(sequence, kv_cache, max(0, last), length)

    def _media(self, sequence: Sequence) -> tuple[int, int]:
        """The first of the positions that are compressed, and the one after the last."""
        media = prompt_embeds_of(sequence)
        if media is None:
            return 0, len(sequence.prompt) - self.query
        return media.first, media.stop

    def _compress(self, kv_cache: SequenceCache, start: int) -> None:
        slots = kv_cache.table[start:]
        count = max(1, int(self.keep * len(slots)))
        kept_positions = []
        for keys in kv_cache.pool.cache.keys:
            rows = smallest(select(keys, slots), count)
            kept_positions.append(np.tile(rows, (keys.shape[1], 1)))
        compact(kv_cache, start, kept_positions)
