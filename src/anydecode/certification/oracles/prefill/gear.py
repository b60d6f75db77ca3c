"""Oracle test of GEAR: the compressed keys and values of the prompt and of each full buffer,
recomputed from those before the compression."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, Restarts, measure, oracle_test
from anydecode.certification.oracles.prefill.dense_pass import TEXT, open_llm
from anydecode.certification.oracles.prefill.planted_model import distance
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.gear import Gear
from anydecode.memory.codecs.gear import compress
from anydecode.models.transformer import Transformer
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

BITS, RANK, TAIL_RANK, SPARSE, BUFFER, GROUP = 4, 4, 2, 0.02, 64, 64

#: Keys and values, float64 `[2 * layers, positions, kv_heads, head_dim]`, keys first.
Cached = np.ndarray


@oracle_test("gear")
def gear() -> Iterator[Check]:
    """The default build compresses the prompt with rank 4, then every 64 generated tokens with rank
    2, and changes nothing else in the cache."""
    text = TEXT + TEXT[:24]
    states = _cached(text, 2 * BUFFER + 12)
    first = len(text) - 1
    blocks = [range(first), *(range(first + n, first + n + BUFFER) for n in (0, BUFFER))]
    changes: list[tuple[Cached, Cached]] = []
    found: list[tuple[int, int]] = []
    for before, after in states:
        changed = np.flatnonzero((before != after).any(axis=(0, 2, 3)))
        if len(changed):
            changes.append((before, after))
            found.append((int(changed[0]), int(changed[-1]) + 1))
    expected = [(block.start, block.stop) for block in blocks]
    yield Check(
        "the prompt and each full buffer are compressed once", found == expected, f"{found}"
    )
    kept = [np.array_equal(b[1], n[0][:, : b[1].shape[1]]) for b, n in pairwise(states)]
    yield Check("passes change nothing that is cached", all(kept))
    for block, (before, after) in zip(blocks, changes, strict=False):
        rank = TAIL_RANK if block.start else RANK
        errors = [
            np.abs(after[i, block] - _parts(before[i, block], i < len(before) // 2, rank)).max()
            for i in range(len(before))
        ]
        name = f"positions {block.start} to {block.stop} equal D + L + S of rank {rank}"
        yield Check(name, max(errors) < 1e-3, f"largest difference {max(errors):.1g}")
    yield from _in_company()
    yield from _sizes()


def _model() -> Transformer:
    return tiny_model(layers=2)


def _cached(prompt: str, length: int) -> list[tuple[Cached, Cached]]:
    """The cache after each pass, and when the decoder asks for the next one."""
    states: list[tuple[Cached, Cached]] = []
    method = catalogue.build("gear")
    decode = method.decode

    def cached(sequence: Sequence) -> Cached:
        kv_cache = sequence.kv_cache()
        slots, cache = kv_cache.table, kv_cache.pool.cache
        return np.array([store[slots] for store in (*cache.keys, *cache.values)], np.float64)

    def watched(sequence: Sequence) -> Decoding:
        inner, answer, after_pass = decode(sequence), None, None
        while True:
            try:
                action = inner.send(answer)
            except StopIteration:
                return
            if after_pass is not None:
                states.append((after_pass, cached(sequence)))
            answer = yield action
            after_pass = cached(sequence)

    method.decode = watched
    with open_llm(_model()) as llm:
        llm.generate(prompt, decoder=method, max_tokens=length, ignore_eos=True)
    return states


def _parts(x: np.ndarray, keys: bool, rank: int) -> np.ndarray:
    """D + L + S of x `[rows, heads, head_dim]`, vector by vector."""
    flat = x.reshape(len(x), -1)
    vectors = flat.T if keys else flat
    codes, filled, outliers = [], [], []
    for vector in vectors:
        count = int(SPARSE / 2 * len(vector) + 0.5)
        order = np.argsort(vector, kind="stable")
        is_outlier = np.isin(np.arange(len(vector)), [*order[:count], *order[len(order) - count :]])
        rest = np.where(is_outlier, vector.mean(), vector)
        levels = []
        for start in range(0, len(rest), GROUP):
            part = rest[start : start + GROUP]
            step = (part.max() - part.min()) / (2**BITS - 1)
            levels.append(np.round((part - part.min()) / step) * step + part.min())
        codes.append(np.concatenate(levels))
        filled.append(rest)
        outliers.append(is_outlier)
    quantized, rest, exact = (
        (np.array(one).T if keys else np.array(one)).reshape(x.shape)
        for one in (codes, filled, outliers)
    )
    return np.where(exact, x, quantized + _low_rank(rest - quantized, rank))


def _low_rank(residual: np.ndarray, rank: int) -> np.ndarray:
    """Per head, the residual projected on the columns of R (R^T R)^2 G, where G is random: three
    rounds of power iteration."""
    heads, size = residual.shape[1:]
    start = np.random.default_rng(0).standard_normal((heads, size, rank), np.float32)
    result = np.empty_like(residual)
    for head in range(heads):
        r = residual[:, head]
        basis = np.linalg.qr(r @ (r.T @ r) @ (r.T @ r) @ start[head])[0]
        result[:, head] = basis @ basis.T @ r
    return result


def _in_company() -> Iterator[Check]:
    """The default build in a batch with restarts, beyond the first buffer."""
    options: dict[str, Any] = {"max_tokens": 70, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    prompts, model = [TEXT[:20], "ab"], _model()
    with open_llm(model) as llm:
        alone = [llm.generate(p, decoder="gear", **options).tokens for p in prompts]
    with open_llm(model) as llm, Restarts(llm.engine, seed=4, share=0.05):
        batch = llm.generate(prompts, decoder="gear", **options)
        llm.engine.check_integrity()
    yield Check("a batch with restarts gives the same text", [one.tokens for one in batch] == alone)


def _sizes() -> Iterator[Check]:
    """2048 numbers: 32 channels with a scale, a minimum and two outliers (position and value) each;
    per head 64 rows and 16 columns of rank 2. As 16-bit numbers they would take 4096 bytes."""
    x = np.random.default_rng(2).standard_normal((64, 2, 16), np.float32)
    for bits, size in ((2, 512 + 128 + 640 + 256), (4, 1024 + 128 + 640 + 256)):
        taken = compress(x, keys=True, bits=bits, rank=2, sparse=0.02).num_bytes
        yield Check(f"{bits} bits take {size} bytes", taken == size, str(taken))


@measure("gear", "error relative to plain 2-bit numbers of the same layout", samples=8, margin=0.9)
def gear_error(samples: int) -> float:
    """The claim: the low-rank part and the outliers recover much of the quantization error."""
    normal, ratio = np.random.default_rng(5).standard_normal, 0.0
    for _ in range(samples):
        x = normal((128, 2, 32), np.float32) + normal((1, 2, 32), np.float32)
        plain, ours = (
            float(np.linalg.norm(x - compress(x, keys=True, bits=2, rank=rank, sparse=sparse)
                                 .reconstruct()))
            for rank, sparse in ((0, 0.0), (4, 0.02))
        )  # fmt: skip
        ratio += ours / plain / samples
    return ratio


@measure("gear", "total variation of the next token at 4 bits", samples=12, margin=0.1)
def gear_loss(samples: int) -> float:
    """The claim: 4 bits are nearly lossless."""
    return distance(Gear, samples)
