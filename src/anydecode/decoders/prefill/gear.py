"""GEAR: a cache of few bits with a low-rank correction and exact outliers.

Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference
of LLM", arXiv:2403.05527.
"""

from __future__ import annotations

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.prefill.prefilled import Prefilled, check_float, plain
from anydecode.errors import InvalidRequestError
from anydecode.memory.codecs.gear import compress
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


@register(
    Card(
        "gear",
        "serving",
        paper="Kang et al. 2024, GEAR, arXiv:2403.05527",
        exactness="lossy",
        summary="Keys and values of few bits, corrected by a low-rank part and exact outliers.",
        works_with=("samplers", "constraints", "batches"),
        deviations=(
            "the row kernels read plain keys and values, so the cache holds what the compressed"
            " form restores to: text and error are GEAR's, the memory is not",
            "one token per pass: what a row sees depends on its position alone, and a draft tree"
            " across the end of a buffer would see more",
            "levels are 2^bits; scales, minima and the low-rank part count as 16-bit numbers",
        ),
    )
)
class Gear(Prefilled):
    """The prompt is compressed when it is in memory, and after it every `buffer` tokens. `rank` is
    that of the prompt's correction, `tail` that of the buffers'; `sparse` the share of outliers."""

    def __init__(
        self, bits: int = 4, rank: int = 4, tail: int = 2, sparse: float = 0.02, buffer: int = 64
    ) -> None:
        super().__init__()
        if not 1 <= bits <= 8 or min(rank, tail) < 0 or not 0 <= sparse < 1 or buffer < 1:
            raise InvalidRequestError(
                "gear needs 1 to 8 bits, rank and tail >= 0, 0 <= sparse < 1 and buffer >= 1"
            )
        self.bits, self.rank, self.tail = bits, rank, tail
        self.sparse, self.buffer = sparse, buffer

    def decode(self, sequence: Sequence) -> Decoding:
        context = sequence.context()
        context.truncate(0)
        context.reusable = False
        yield from self.prefill(sequence, context)
        boundary = context.length + self.buffer
        while not sequence.finished:
            tokens = sequence.unscored()
            room = boundary - context.length
            scores = yield sequence.score(tokens[:room])
            if len(tokens) <= room:
                sequence.emit([scores.sampled[-1]])
            if context.length == boundary:
                self._compress(context, boundary - self.buffer, self.tail)
                boundary += self.buffer

    def prefill(self, sequence: Sequence, context: SequenceCache) -> Decoding:
        check_float(context)
        if len(sequence.prompt) > 1:
            yield plain(sequence, context, 0, len(sequence.prompt) - 1)
            self._compress(context, 0, self.rank)

    def _compress(self, context: SequenceCache, start: int, rank: int) -> None:
        cache = context.pool.cache
        slots = torch.from_numpy(context.make_exclusive(start, context.length).astype(np.int64))
        for stores, keys in ((cache.keys, True), (cache.values, False)):
            for store in stores:
                held = compress(
                    store[slots].cpu(), keys=keys, bits=self.bits, rank=rank, sparse=self.sparse
                )
                store[slots] = held.reconstruct().to(store)
