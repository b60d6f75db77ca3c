"""GEAR (Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative
Inference of LLM", arXiv:2403.05527).

Keys and values are quantized to a few bits. A low-rank matrix approximates the quantization error,
and the largest outliers are stored exactly.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.attention_probe import check_float
from anydecode.decoders.prefill.gear_cache import (
    CompressedGuide,
    CompressedPass,
    CompressedPositions,
)
from anydecode.decoders.prefill.prefilled import Prefilled, score_prompt
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

_ROUTE = CompressedPass()


@register(
    Card(
        "gear",
        "serving",
        paper="Kang et al. 2024, GEAR, arXiv:2403.05527",
        exactness="lossy",
        summary="Quantizes keys and values; corrects them by a low-rank part and exact outliers.",
        works_with=("samplers", "constraints", "batches"),
        deviations=(
            "one token per forward pass: a draft tree across the end of a buffer would see keys"
            " that are not compressed yet",
            "there are 2^bits levels; all numbers but codes and indices have the format of the"
            " key-value cache",
            "each pass restores the keys and values of one layer at a time, in main memory, instead"
            " of a kernel that reads the compressed form: it runs on CPUs, and costs time",
            "a block that the compressed form would not make smaller stays as it is",
        ),
        remote={
            "bits": Range(2, 8),
            "rank": Range(0, 16),
            "tail": Range(0, 64),
            "sparse": Range(0, 1),
            "buffer": Range(1, 4096),
        },
    )
)
class Gear(Prefilled):
    """Compresses the prompt's keys and values after prefill, then each `buffer` generated tokens.

    Args:
        bits: Bits per quantized number, 1 to 8.
        rank: The rank of the prompt's error correction.
        tail: The rank of each buffer's error correction.
        sparse: The share of outliers that are stored exactly.
        buffer: How many generated tokens are compressed together.
    """

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
        kv_cache = sequence.kv_cache()
        kv_cache.release()
        kv_cache.reusable = False
        yield from self.prefill(sequence, kv_cache)
        compressed = CompressedPositions(kv_cache, self.bits, self.sparse)
        compressed.add(0, kv_cache.length, self.rank)
        boundary = kv_cache.length + self.buffer
        while not sequence.finished:
            tokens = sequence.unscored()
            num_free = boundary - kv_cache.length
            guides = [CompressedGuide(positions=compressed) for _ in tokens[:num_free]]
            scores = yield sequence.score(tokens[:num_free], variant=_ROUTE, guides=guides)
            if len(tokens) <= num_free:
                sequence.emit([scores.sampled[-1]])
            if kv_cache.length == boundary:
                compressed.add(boundary - self.buffer, boundary, self.tail)
                boundary += self.buffer

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        pool = sequence.pool()
        check_float(pool)
        layers = pool.model.spec.layers
        has_others = any(layer.latent is not None or layer.indexer is not None for layer in layers)
        if has_others or any(not values.shape[-1] for values in pool.cache.values):
            raise UnsupportedCombinationError(
                "gear compresses the keys and values of every layer; this model has layers that"
                " store one row for both, that share those of another layer, or that store the keys"
                " of an indexer too"
            )

    def prefill(self, sequence: Sequence, kv_cache: SequenceCache) -> Decoding:
        if len(sequence.prompt) > 1:
            yield score_prompt(sequence, kv_cache, 0, len(sequence.prompt) - 1)
