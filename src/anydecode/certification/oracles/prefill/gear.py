"""Oracle test of GEAR: what each layer reads of the prompt and of each full buffer, recomputed from
the keys and values before the compression, and the memory that is held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, Restarts, measure, oracle_test
from anydecode.certification.oracles.prefill.dense_pass import TEXT, open_llm
from anydecode.certification.oracles.prefill.planted_model import distance
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.gear import Gear
from anydecode.kernels.interface import KeyValues, Rows
from anydecode.kernels.mapped import address_of
from anydecode.memory.codecs.gear import GearBlock
from anydecode.models.transformer import Transformer
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

BITS, RANK, TAIL_RANK, SPARSE, BUFFER, GROUP = 4, 4, 2, 0.02, 64, 64

#: Keys and values, float64 `[2 * layers, positions, kv_heads, head_dim]`, keys first.
Cached = np.ndarray


@dataclass
class _Step:
    """A pass, and what the decoder did then.

    Attributes:
        slots: The slot of each position after the pass, -1 for none.
        kept: The same when the decoder asks for the next pass.
        cached: The keys and values in `slots`.
        read: Those that the layers of the pass had before them; None if they read the cache.
        num_slots: Slots in use when the decoder asks for the next pass.
        working: Bytes of the keys and values that the pass has made for its layers.
    """

    slots: np.ndarray
    cached: Cached
    read: Cached | None
    working: int
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, int))
    num_slots: int = 0


@oracle_test("gear")
def gear() -> Iterator[Check]:
    """The default build compresses the prompt with rank 4, then every 64 generated tokens with rank
    2. It holds the compressed form alone, from which each layer reads D + L + S."""
    text = TEXT + TEXT[:24]
    steps = _steps(text, 2 * BUFFER + 12)
    first, length = len(text) - 1, len(steps[-1].slots)
    blocks = [range(first), *(range(first + n, first + n + BUFFER) for n in (0, BUFFER))]
    gone = [np.flatnonzero((step.slots >= 0) & (step.kept < 0)) for step in steps]
    found = [(int(one[0]), int(one[-1]) + 1) for one in gone if len(one)]
    yield Check(
        "the prompt and each full buffer leave the cache once",
        found == [(block.start, block.stop) for block in blocks],
        f"{found}",
    )
    exact = np.full((len(steps[0].cached), length, *steps[0].cached.shape[2:]), np.nan)
    unchanged, as_cached = True, True
    for step in steps:
        is_held = np.flatnonzero(step.slots >= 0)
        cached, before = step.cached[:, is_held], exact[:, is_held]
        unchanged &= bool(((before == cached) | np.isnan(before)).all())
        as_cached &= step.read is None or np.array_equal(step.read[:, is_held], cached)
        exact[:, is_held] = cached
    yield Check("passes change nothing that is cached", unchanged)
    yield Check("layers read what is cached bit for bit", as_cached)
    for block, rank in zip(blocks, (RANK, TAIL_RANK, TAIL_RANK), strict=True):
        expected = [
            _parts(one, index < len(exact) // 2, rank) for index, one in enumerate(exact[:, block])
        ]
        reads = [s.read[:, block] for s in steps if s.read is not None and _is_gone(s, block)]
        error = max((float(np.abs(read - expected).max()) for read in reads), default=np.inf)
        name = f"layers read D + L + S of positions {block.start} to {block.stop}"
        yield Check(name, error < 1e-3, f"largest difference {error:.1g} in {len(reads)} passes")
    yield from _held_bytes(steps, blocks, exact)
    yield from _in_company()
    yield from _sizes()


def _is_gone(step: _Step, block: range) -> bool:
    return len(step.slots) >= block.stop and bool((step.slots[block] < 0).all())


def _held_bytes(steps: list[_Step], blocks: list[range], exact: Cached) -> Iterator[Check]:
    """The slots in use are those of the newest positions, and as many as the compressed form of the
    larger of keys and values takes. A pass makes room for one layer."""
    heads, head_dim = exact.shape[2:]
    last, row = steps[-1], heads * head_dim * 4
    sizes = [
        max(_num_bytes((len(block), heads, head_dim), k, BITS, rank, 4) for k in (True, False))
        for block, rank in zip(blocks, (RANK, TAIL_RANK, TAIL_RANK), strict=True)
    ]
    count = sum(-(-size // row) for size in sizes) + len(last.slots) - blocks[-1].stop
    yield Check(
        f"{count} slots hold {len(last.slots)} positions",
        last.num_slots == count,
        f"{last.num_slots * row * len(exact)} bytes, not {len(last.slots) * row * len(exact)}",
    )
    largest = max(step.working - 2 * row * len(step.slots) for step in steps if step.working)
    yield Check("passes restore one layer at a time", largest == 0, f"{largest} more bytes")


def _model() -> Transformer:
    return tiny_model(layers=2)


def _steps(prompt: str, length: int) -> list[_Step]:
    """The passes of one text and their effects."""
    steps: list[_Step] = []
    method, model = catalogue.build("gear"), _model()
    decode, executor = method.decode, model.executor
    begin, layers = executor.begin, executor.layers  # type: ignore[attr-defined]
    begun: list[tuple[Rows, KeyValues]] = []
    read: list[np.ndarray] = []

    def begin_noted(rows: Rows, cache: KeyValues) -> None:
        begun[:] = [(rows, cache)]
        begin(rows, cache)

    def layers_noted(x: np.ndarray, active: np.ndarray, start: int, stop: int) -> np.ndarray:
        result: np.ndarray = layers(x, active, start, stop)
        rows, cache = begun[0]
        slots = rows.tables[rows.table[0]]
        read.extend((cache.keys[start][slots], cache.values[start][slots]))
        return result

    executor.begin, executor.layers = begin_noted, layers_noted  # type: ignore[attr-defined]

    def watched(sequence: Sequence) -> Decoding:
        inner, answer = decode(sequence), None
        while True:
            try:
                action = inner.send(answer)
            except StopIteration:
                return
            pool, kv_cache = sequence.pool(), sequence.kv_cache()
            if steps:
                steps[-1].kept, steps[-1].num_slots = kv_cache.table.copy(), pool.num_used
            begun.clear()
            read.clear()
            answer = yield action
            cache, slots = pool.cache, kv_cache.table.copy()
            cached = np.array([x[slots] for x in (*cache.keys, *cache.values)], np.float64)
            made = [] if not begun else [*begun[0][1].keys, *begun[0][1].values]
            bytes_of = {address_of(array): array.nbytes for array in made}
            seen = np.array(read[::2] + read[1::2], np.float64) if read else None
            steps.append(_Step(slots, cached, seen, sum(bytes_of.values())))

    method.decode = watched
    with open_llm(model) as llm:
        llm.generate(prompt, decoder=method, max_tokens=length, ignore_eos=True)
    return steps[:-1]


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


def _num_bytes(shape: tuple[int, int, int], keys: bool, bits: int, rank: int, width: int) -> int:
    """Codes, a scale and a minimum per group, two matrices per head, and outliers with an index of
    a byte; numbers have `width` bytes."""
    rows, heads, head_dim = shape
    channels = heads * head_dim
    vectors, length = (channels, rows) if keys else (rows, channels)
    count = 2 * int(SPARSE / 2 * length + 0.5)
    groups = vectors * -(-length // GROUP)
    low_rank = heads * (rows + head_dim) * rank
    codes = bits * rows * channels // 8
    return codes + width * (2 * groups + low_rank + vectors * count) + vectors * count


def _sizes() -> Iterator[Check]:
    """2048 numbers of 16 bits, 4096 bytes, in compressed form."""
    x = np.random.default_rng(2).standard_normal((64, 2, 16)).astype(np.float16)
    for bits in (2, 4):
        for keys in (True, False):
            size = _num_bytes((64, 2, 16), keys, bits, TAIL_RANK, 2)
            taken = len(GearBlock(64, 2, 16, keys, bits, TAIL_RANK, SPARSE, x.dtype).encode(x))
            name = f"{bits}-bit {'keys' if keys else 'values'} take {size} bytes"
            yield Check(name, taken == size, str(taken))


@measure("gear", "error relative to plain 2-bit numbers of the same layout", samples=8, margin=0.9)
def gear_error(samples: int) -> float:
    """The claim: the low-rank part and the outliers recover much of the quantization error."""
    normal, ratio = np.random.default_rng(5).standard_normal, 0.0
    for _ in range(samples):
        x = normal((128, 2, 32), np.float32) + normal((1, 2, 32), np.float32)
        plain, ours = (
            GearBlock(128, 2, 32, True, 2, rank, sparse, x.dtype)
            for rank, sparse in ((0, 0.0), (4, SPARSE))
        )
        errors = [np.linalg.norm(x - one.decode(one.encode(x))) for one in (plain, ours)]
        ratio += float(errors[1] / errors[0]) / samples
    return ratio


@measure("gear", "total variation of the next token at 4 bits", samples=12, margin=0.1)
def gear_loss(samples: int) -> float:
    """The claim: 4 bits are nearly lossless."""
    return distance(Gear, samples)
