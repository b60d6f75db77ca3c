"""The Triton kernels: each operation against the torch reference, and batch invariance.

Without a GPU they run in Triton's interpreter, and are compiled for a GPU as well.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.cuda import attention, packing, pointwise, sampling
from anydecode.kernels.cuda.available import is_interpreted, kernel_device, unavailable_reason
from anydecode.kernels.cuda.backend import TritonBackend
from anydecode.kernels.cuda.executor import SampleState, TritonExecutor
from anydecode.kernels.cuda.graphs import Launch, NoGraphs, Recorder
from anydecode.kernels.cuda.packing import Packed, Tile, pack
from anydecode.kernels.cuda.products import product
from anydecode.kernels.cuda.rows import to_device
from anydecode.kernels.formats import BITSANDBYTES_VALUES, BLOCKS, QUANTIZABLE, row_bytes
from anydecode.kernels.interface import (
    Attention,
    ExpertWeights,
    KeyValues,
    LowRank,
    Output,
    OutputSpec,
    Rope,
    Routing,
    Rows,
    Weight,
)
from anydecode.kernels.reference import ReferenceBackend
from anydecode.kernels.torch_arrays import as_tensor
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.sampling.noise import Noise, stream_id
from block_formats import set_scales
from tiny_models import chain, hf_model, make_rows, own_model, whole
from torch_weights import dequantize, plain_weight, quantize

problem = unavailable_reason()
pytestmark = pytest.mark.skipif(problem is not None, reason=str(problem))

DEVICE = torch.device(kernel_device())
#: Error bound of a product, in units of |x| @ |w|, by weight format: activations and dequantised
#: weights are rounded to bfloat16, and inputs of float16 weights to tf32. The interpreter truncates
#: where a GPU rounds, and does not round to tf32.
STEP = 2.0**-7 if is_interpreted() else 2.0**-8
ALLOWED = {"F32": 1e-6, "F16": 1e-6 if is_interpreted() else 1.1e-3, "BF16": 1.02 * STEP}
ROUNDED = 2.05 * STEP

quick = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True, scope="module")
def fast_interpreter() -> Iterator[None]:
    """Large tiles, because each program is slow in the interpreter, and no overflow checks."""
    if not is_interpreted():
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    options, columns = builder.options, packing.COLUMNS
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    packing.COLUMNS = ((64, 1),)
    yield
    builder.options, packing.COLUMNS = options, columns


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised memory with NaN or -99."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def make(*args: Any, real: Callable[..., torch.Tensor] = real, **kw: Any) -> torch.Tensor:
            tensor = real(*args, **kw)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-99)

        monkeypatch.setattr(torch, name, make)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def random_weight(format: str, rows: int, columns: int, seed: int = 0) -> Weight:
    """A random matrix in any format; those that `quantize` cannot write from random bytes and small
    scales.
    """
    values = randn(rows, columns, seed=seed).cpu()
    if format in ("F32", "F16", "BF16"):
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return plain_weight(values.to(kinds[format]), f"{format}.{seed}")
    if format in QUANTIZABLE:
        return quantize(values, format, f"{format}.{seed}")
    generator = torch.Generator().manual_seed(seed)
    size = (rows, row_bytes(format, columns))
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    blocks = data.view(-1, BLOCKS[format][1])
    if format == "MXFP4":  # biased exponents
        blocks[:, 0] = torch.randint(116, 122, (len(blocks),), generator=generator)
    scales = torch.rand(len(blocks), generator=generator) * 0.01
    set_scales(format, blocks.numpy(), scales.numpy())
    return Weight(format, rows, columns, data.numpy(), f"{format}.{seed}")


def width_of(format: str, min_width: int) -> int:
    values = BLOCKS[format][0]
    return -(-min_width // values) * values


def packed(format: str, rows: int, columns: int, seed: int = 0, **options: Any) -> Packed:
    return pack([random_weight(format, rows, columns, seed)], DEVICE, **options)


# --- weights


@pytest.mark.parametrize("format", sorted(BLOCKS))
def test_embeddings_are_the_dequantised_rows(format: str) -> None:
    """Packing is exact, except for the scales within super-blocks, which have 11 bits, and for
    formats without codes on this device, which become bfloat16."""
    weight = random_weight(format, 9, width_of(format, 96))
    tokens = torch.tensor([3, 0, 8, -1], dtype=torch.int32, device=DEVICE)
    result = pointwise.embed(tokens, pack([weight], DEVICE), 2.0).cpu()
    expected = dequantize(weight)[[3, 0, 8, 0]] * 2
    if BLOCKS[format][0] == 256:
        assert ((result - expected).abs() <= 2.0**-10 * dequantize(weight).abs().max() * 2).all()
    elif format in BITSANDBYTES_VALUES:
        assert torch.equal(result, expected.bfloat16().float())
    else:
        assert torch.equal(result, expected)


def test_a_part_of_a_matrix_has_the_tile_of_the_whole() -> None:
    whole_weight = packed("Q4_1", 300, 512)
    part, x = whole_weight.rows(37, 101), randn(3, 512)
    assert part.tile == whole_weight.tile
    assert torch.equal(product(x, part), product(x, whole_weight)[:, 37:101])


def test_tiles_depend_on_the_weight_shape_alone() -> None:
    """Matrices with few rows are split, others are not."""
    columns = packing.COLUMNS
    packing.COLUMNS = ((64, 512), (32, 128), (16, 1))
    try:
        assert Tile.of(4096, 4096, 16) == Tile(32, 128, 1)
        assert Tile.of(128256, 4096, 16) == Tile(64, 128, 1)
        assert Tile.of(1024, 4096, 16) == Tile(16, 128, 2)
        assert Tile.of(576, 576, 16).splits == 1
    finally:
        packing.COLUMNS = columns


# --- products


def exact_product(
    x: torch.Tensor, weight: Weight, norm: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x @ w.T in float64 and |x| @ |w|.T."""
    x = x.double().cpu()
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double().cpu()
    matrix = dequantize(weight).double()
    return x @ matrix.T, x.abs() @ matrix.abs().T


@pytest.mark.one_in(3)
@quick
@given(st.data())
@pytest.mark.parametrize("format", sorted(BLOCKS))
def test_products_match_float64(format: str, data: st.DataObject) -> None:
    rows, out = data.draw(st.integers(1, 19)), data.draw(st.integers(1, 90))
    columns = width_of(format, data.draw(st.integers(1, 300)))
    seed = data.draw(st.integers(0, 99))
    weight, x = random_weight(format, out, columns, seed), randn(rows, columns, seed=seed + 1)
    norm = randn(columns, seed=3) if data.draw(st.booleans()) else None
    bias = randn(out, seed=4) if data.draw(st.booleans()) else None
    residual = randn(rows, out, seed=5) if data.draw(st.booleans()) else None
    device_rows = pack([weight], DEVICE)
    if norm is not None and device_rows.tile.splits > 1:
        norm = None
    expected, size = exact_product(x, weight, norm, 1e-5)
    for extra in (bias, residual):
        if extra is not None:
            expected = expected + extra.double().cpu()
    result = product(x, device_rows, norm=norm, eps=1e-5, bias=bias, residual=residual).cpu()
    assert ((result - expected).abs() <= ALLOWED.get(format, ROUNDED) * size + 1e-5).all()


@pytest.mark.parametrize(
    ("format", "splits", "activation"),
    [("F32", 1, "gelu_tanh"), ("BF16", 3, "silu"), ("Q4_1", 1, "silu"), ("Q8_0", 3, "gelu_tanh")],
)
def test_gated_products_equal_two_products_and_a_gate(
    format: str, splits: int, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for gate and up has the bits of two products and a gate."""
    monkeypatch.setattr(packing, "PROGRAMS", splits)
    width = 1536 if splits > 1 else 256
    gate, up = (random_weight(format, 40, width, seed) for seed in (1, 2))
    both, x, norm = pack([gate, up], DEVICE, gated=True), randn(3, width) * 0.1, None
    assert both.tile.splits == splits
    if splits == 1:
        norm = randn(width, seed=9)
    fused = product(x, both, norm=norm, eps=1e-6, activation=activation)
    parts = (
        product(x, part, norm=norm, eps=1e-6) for part in (both.rows(0, 40), both.rows(40, 80))
    )
    assert torch.equal(fused, pointwise.gated(*parts, activation))
    exact = [exact_product(x, w, norm, 1e-6)[0].float() for w in (gate, up)]
    expected = ReferenceBackend().gated(*exact, activation)
    assert (fused.cpu() - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize(
    ("format", "splits"),
    [("F32", 1), ("F16", 4), ("BF16", 1), ("BF16", 4), ("Q4_0", 1), ("Q4_K", 4), ("Q8_0", 1)],
)
def test_products_are_batch_invariant(
    format: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the same bits alone, at every index of a tile and in the next tile."""
    monkeypatch.setattr(packing, "PROGRAMS", splits)
    width = 2048 if splits > 1 else 512
    weight = packed(format, 48, width)
    assert weight.tile.splits == splits
    row, norm = randn(1, width, seed=1), randn(width, seed=2)
    options: dict[str, Any] = {"norm": norm, "eps": 1e-5} if splits == 1 else {}
    alone = product(row, weight, **options)[0]
    same = product(row.expand(18, -1).contiguous(), weight, **options)
    assert torch.equal(same, alone.expand_as(same))
    mixed = randn(18, width, seed=7)
    mixed[17] = row[0]
    assert torch.equal(product(mixed, weight, **options)[17], alone)


def reordered(weight: Weight, seed: int) -> Weight:
    """The same matrix with its stored inputs in another order."""
    order = np.random.default_rng(seed).permutation(weight.in_features).astype(np.int32)
    return dataclasses.replace(weight, order=order)


@pytest.mark.parametrize(("format", "splits"), [("Q4_0", 1), ("Q8_0", 3)])
def test_products_read_inputs_in_the_order_of_their_matrix(
    format: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PROGRAMS", splits)
    width = 1536 if splits > 1 else 256
    weight = reordered(random_weight(format, 40, width), 1)
    both, x, norm = pack([weight], DEVICE), randn(3, width), None
    assert both.tile.splits == splits and both.bits < 16
    if splits == 1:
        norm = randn(width, seed=9)
    expected, size = exact_product(x, weight, norm, 1e-5)
    result = product(x, both, norm=norm, eps=1e-5).cpu()
    assert ((result - expected).abs() <= ROUNDED * size + 1e-5).all()
    for wrong in (dataclasses.replace(both, order=None), pack([reordered(weight, 2)], DEVICE)):
        other = product(x, wrong, norm=norm, eps=1e-5).cpu()
        assert ((other - expected).abs() > ROUNDED * size + 1e-5).any()


def test_another_number_of_splits_changes_bits() -> None:
    """Counterexample: the same product with another number of splits has other bits."""
    weight, x = packed("F32", 48, 2048), randn(1, 2048)
    resplit = dataclasses.replace(weight, tile=dataclasses.replace(weight.tile, splits=7))
    assert not torch.equal(product(x, weight), product(x, resplit))


# --- row-wise operations


@quick
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 700), st.integers(0, 99))
def test_pointwise_operations_match_the_reference(
    rows: int, groups: int, part: int, seed: int
) -> None:
    width = groups * part
    x, y = randn(rows, width, seed=seed) * 3, randn(rows, width, seed=seed + 1)
    backend, reference = TritonBackend(DEVICE), ReferenceBackend()
    for weight in (None, randn(part, seed=5), randn(width, seed=6)):
        vector = None if weight is None else weight.cpu().numpy()
        ours = backend.force(backend.rms_norm(x, vector, 1e-5, groups)).cpu()
        assert (ours - reference.rms_norm(x.cpu(), vector, 1e-5, groups)).abs().max() < 1e-4
    for name, arguments in {
        "add": (y,),
        "scale": (0.3,),
        "softcap": (1.5,),
        "gated": (y, "gelu"),
        "activate": ("gelu_tanh",),
    }.items():
        ours = getattr(backend, name)(x, *arguments).cpu()
        theirs = (a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
        expected = getattr(reference, name)(x.cpu(), *theirs)
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)
    alone = backend.force(backend.rms_norm(x[-1:], None, 1e-5, groups))
    assert torch.equal(alone[0], backend.force(backend.rms_norm(x, None, 1e-5, groups))[-1])


def rows_at(positions: list[int], slots: list[int]) -> Rows:
    count = len(positions)
    return make_rows(
        [0] * count, positions, slots, [np.zeros(0, np.int32)], [0] * count, [0] * count
    )


@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 12, 8), (4, 16, 16), (1, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_fused_rotation_norm_and_cache_write_match_the_reference(
    heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    """From strided parts of one product into slots; a row without a slot stores nothing."""
    shape, width = Attention(2 * heads, heads, head_dim, 1.0), heads * head_dim
    q, k, v = randn(3, 4 * width).split([2 * width, width, width], 1)
    frequencies = 10000.0 ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    rope = Rope(frequencies.astype(np.float32), 1.2)
    rows = rows_at([0, 7, 1200], [4, -1, 2])
    weights = [randn(head_dim, seed=2), randn(head_dim, seed=3)]
    keys, values = (
        torch.full((6, heads, head_dim), 9.0, dtype=dtype, device=DEVICE) for _ in range(2)
    )
    backend, reference = TritonBackend(DEVICE), ReferenceBackend()
    for each in (backend, reference):
        each.bind(rows, np.arange(3), KeyValues([keys], [values]))
    device_rows = backend.rows
    assert device_rows is not None
    norms = [(weight, 1e-6) if normed else None for weight in weights]
    tables = backend.rotary_table(rope)
    queries = attention.store(
        q, k, v, keys, values, device_rows, shape, rope=tables, q_norm=norms[0], k_norm=norms[1]
    )
    expected = []
    for x, count, weight in ((q, 2 * heads, weights[0]), (k, heads, weights[1])):
        x = x.cpu().contiguous()
        if normed:
            x = reference.rms_norm(x, weight.cpu().numpy(), 1e-6, count)
        expected.append(reference.rope(x, count, rope))
    assert (queries.cpu() - expected[0]).abs().max() < 1e-4
    if not normed:
        again = backend.force(backend.rope(q, 2 * heads, rope))
        assert torch.equal(again, queries)
    margin = 1.01 * STEP if dtype == torch.bfloat16 else 1e-4
    for stored, row_values in ((keys, expected[1]), (values, v.cpu())):
        for slot, row in ((4, 0), (2, 2)):
            result = stored[slot].flatten().float().cpu()
            assert torch.allclose(result, row_values[row], rtol=margin, atol=1e-5)
        assert (stored[[0, 1, 3, 5]] == 9).all()


# --- attention


@st.composite
def visible_rows(draw: st.DrawFn) -> Rows:
    """Rows with prefixes of two tables, tails, and masked positions in both."""
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    tables = [generator.integers(-1, 120, draw(st.integers(1, 100))) for _ in range(2)]
    count = draw(st.integers(1, 3))
    which = [draw(st.integers(0, 1)) for _ in range(count)]
    prefix = [draw(st.integers(0, len(tables[t]))) for t in which]
    tails = [generator.integers(-1, 120, draw(st.integers(0, 40))).tolist() for _ in range(count)]
    positions = [max(0, p + len(tail) - 1) for p, tail in zip(prefix, tails, strict=True)]
    return make_rows([0] * count, positions, [-1] * count, tables, which, prefix, tails)


def one_cache(dtype: torch.dtype, seed: int = 3) -> KeyValues:
    keys, values = (randn(120, 2, 12, seed=seed + i).to(dtype) for i in range(2))
    return KeyValues([keys], [values])


def attend(
    rows: Rows, cache: KeyValues, q: torch.Tensor, shape: Attention, layer: int = 0
) -> torch.Tensor:
    device_rows = to_device(rows, np.arange(len(rows)), DEVICE)
    return attention.attend(
        q, cache.keys[layer], cache.values[layer], device_rows, layer, shape, splits=3
    )


@settings(max_examples=12, deadline=None)
@given(
    visible_rows(),
    st.sampled_from([None, 7, 40]),
    st.sampled_from([None, 1.5]),
    st.sampled_from([(torch.float32, 1e-5), (torch.bfloat16, 0.08), (torch.float16, 0.01)]),
)
def test_attention_matches_the_reference(
    rows: Rows, window: int | None, cap: float | None, cached: tuple[torch.dtype, float]
) -> None:
    """With NaN and infinity in every slot that no row attends to."""
    shape, cache = Attention(6, 2, 12, 0.3, window, cap), one_cache(torch.float32)
    visible = np.concatenate([*rows.tables, rows.tails])
    others = torch.from_numpy(np.setdiff1d(np.arange(120), visible)).to(DEVICE)
    cache.keys[0][others], cache.values[0][others] = float("nan"), float("inf")
    q = randn(len(rows), 72, seed=1)
    reference = ReferenceBackend()
    on_cpu = KeyValues([cache.keys[0].cpu()], [cache.values[0].cpu()])
    reference.bind(rows, np.arange(len(rows)), on_cpu)
    zeros = torch.zeros(len(rows), 24)
    expected = reference.attention(q.cpu(), zeros, zeros, 0, shape)
    dtype, margin = cached
    rounded = KeyValues([cache.keys[0].to(dtype)], [cache.values[0].to(dtype)])
    assert (attend(rows, rounded, q, shape).cpu() - expected).abs().max() < margin


@quick
@given(visible_rows(), st.integers(0, 99))
def test_attention_is_batch_invariant(rows: Rows, seed: int) -> None:
    """A row has the same bits among others and alone, with other slots and another split into table
    and tail.
    """
    shape, cache = Attention(4, 2, 12, 0.3, 50), one_cache(torch.float32)
    q, row = randn(len(rows), 48, seed=seed), len(rows) - 1
    mixed = attend(rows, cache, q, shape)[row]
    start = int(rows.tail_start[row])
    tail = rows.tails[start : start + int(rows.tail_length[row])]
    visible = np.concatenate([rows.tables[rows.table[row]][: rows.prefix[row]], tail])
    order = np.random.default_rng(seed).permutation(120)
    moved = np.where(visible >= 0, order[visible], -1)
    prefix = len(moved) // 3
    alone = make_rows(
        [0],
        [int(rows.positions[row])],
        [-1],
        [moved[:prefix]],
        [0],
        [prefix],
        [moved[prefix:].tolist()],
    )
    index = torch.from_numpy(np.argsort(order)).to(DEVICE)
    elsewhere = KeyValues([cache.keys[0][index]], [cache.values[0][index]])
    assert torch.equal(attend(alone, elsewhere, q[row:], shape)[0], mixed)


def test_attention_reads_the_layers_own_table() -> None:
    tables = np.arange(80, dtype=np.int32).reshape(2, 40)
    rows = make_rows([0], [39], [-1], [np.zeros(0, np.int32)], [0], [40])
    rows.tables = [tables]
    cache = one_cache(torch.float32)
    shape, q = Attention(2, 2, 12, 0.3), randn(1, 24)
    both = KeyValues(cache.keys * 2, cache.values * 2)
    flat = make_rows([0], [39], [-1], [tables[1]], [0], [40])
    assert torch.equal(attend(rows, both, q, shape, 1), attend(flat, both, q, shape, 1))


def test_another_number_of_attention_splits_changes_bits() -> None:
    """Counterexample: a number of splits that depends on the row's length would change bits."""
    rows = make_rows([0], [99], [-1], [np.arange(100)], [0], [100])
    cache, shape, q = one_cache(torch.float32), Attention(2, 2, 12, 0.3), randn(1, 24)
    device_rows = to_device(rows, np.arange(1), DEVICE)
    results = [
        attention.attend(q, cache.keys[0], cache.values[0], device_rows, 0, shape, splits=splits)
        for splits in (1, 4)
    ]
    assert not torch.equal(*results)


# --- sampling


def test_argmax_and_ties() -> None:
    logits = torch.zeros(4, 9001, device=DEVICE)
    logits[1, [7, 8000]] = 2.0
    logits[2, 9000] = 1.0
    logits[3] = -5.0
    assert sampling.argmax(logits).tolist() == [0, 7, 9000, 0]


@pytest.mark.parametrize(("size", "count"), [(5, 5), (300, 1), (9000, 3), (20000, 17)])
def test_top_k_equals_a_stable_sort(size: int, count: int) -> None:
    scores = (randn(2, size) * 4).round()  # with many ties
    values, ids = sampling.top(scores, count)
    expected = torch.sort(scores, descending=True, stable=True)
    assert torch.equal(ids.long(), expected.indices[:, :count])
    assert torch.equal(values, expected.values[:, :count])


def test_gumbel_samples_equal_those_of_the_host() -> None:
    """With the noise of `scoring.noise`, and without noise where the inverse temperature is 0."""
    seeds = [5, 2**63 + 11, 7, 5]
    noises = [Noise(seed, stream_id(i, 0)) for i, seed in enumerate(seeds)]
    logits = randn(4, 5003) * 2
    inverse = torch.tensor([1.0, 0.7, 3.0, 0.0], dtype=torch.float64, device=DEVICE)
    positions = np.zeros((4, 4), np.int64)
    for row, noise in enumerate(noises):
        positions[row] = np.array([noise.seed, noise.stream, 90 + row, row], np.uint64).view(
            np.int64
        )
    result = sampling.gumbel(logits, inverse, torch.from_numpy(positions).to(DEVICE)).tolist()
    for row, noise in enumerate(noises):
        score = logits[row].double().cpu().numpy() * float(inverse[row])
        score += noise.gumbel(range(5003), 90 + row, row)
        expected = score.argmax() if row < 3 else int(logits[3].argmax())
        assert result[row] == expected


# --- experts and adapters


def test_experts_match_the_reference() -> None:
    x, router = randn(5, 32), randn(5, 4, seed=1)
    gate, up = ([random_weight("BF16", 24, 32, s + e) for e in range(4)] for s in (10, 20))
    down = [random_weight("BF16", 32, 24, 30 + e) for e in range(4)]
    arguments = (ExpertWeights(gate, up, down), Routing(2), "silu")
    y = TritonBackend(DEVICE).experts(x, router, *arguments)
    expected = ReferenceBackend().experts(x.cpu(), router.cpu(), *arguments)
    assert (y.cpu() - expected).abs().max() < 0.02 * expected.abs().max()
    alone = TritonBackend(DEVICE).experts(x[3:4], router[3:4], *arguments)
    assert torch.equal(alone[0], y[3])


def test_experts_with_orders_of_their_own_match_the_reference() -> None:
    """Each matrix of each expert has another order of inputs."""
    x, router = randn(5, 128), randn(5, 4, seed=1)
    matrices = [
        [reordered(random_weight("Q4_0", 128, 128, seed + e), seed + e) for e in range(4)]
        for seed in (10, 20, 30)
    ]
    arguments = (ExpertWeights(*matrices), Routing(2), "silu")
    backend = TritonBackend(DEVICE)
    y = backend.experts(x, router, *arguments)
    expected = ReferenceBackend().experts(x.cpu(), router.cpu(), *arguments)
    assert (y.cpu() - expected).abs().max() < 0.02 * expected.abs().max()
    assert backend.num_bytes < 4 * 3 * 128 * 128 * 2 * 0.31  # of float16


# --- a whole model

_MODELS: dict[str, Any] = {}


class CountingRecorder:
    """A stand-in for CUDA graphs that counts captures and replays by calling the function."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Launch) -> Launch:
        self.num_captured += 1
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def executor(network: Network, recorder: Recorder | None = None) -> TritonExecutor:
    return TritonExecutor(
        network.weights.embedding,
        network.spec.vocab_size,
        network.layer,
        network.head,
        [layer.attention for layer in network.spec.layers],
        matrices=network.matrices(),
        embedding_scale=network.spec.embedding_scale,
        adapters=network.adapters,
        backend=TritonBackend(DEVICE, splits=2),
        recorder=recorder or (NoGraphs() if is_interpreted() else None),
    )


_SETTINGS: dict[str, dict[str, int]] = {
    "HunYuanDenseV1": {"head_dim": 24},
    "Qwen2Moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def tiny(family: str = "Llama", dtype: str | None = "bfloat16") -> tuple[Any, Any]:
    """A random model in torch and in Triton."""
    if (family, dtype) not in _MODELS:
        model = hf_model(
            family,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=61,
            **_SETTINGS.get(family, {}),
        )
        _MODELS[family, dtype] = own_model(model, dtype), own_model(model, dtype, executor=executor)
    return _MODELS[family, dtype]  # type: ignore[no-any-return]


def on_cpu(output: Output) -> torch.Tensor:
    """A copy of the logits."""
    return as_tensor(output.logits).cpu().clone()


def all_logits(model: Any, rows: Rows, cache: Any = None) -> torch.Tensor:
    cache = cache if cache is not None else model.new_cache(64)
    output_spec = OutputSpec(np.arange(len(rows), dtype=np.int32))
    return on_cpu(model.run(whole(rows, model), cache, output_spec))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Qwen3", "Gemma2", "HunYuanDenseV1", "Ministral3"),
        *("GPTNeoX", "GPT2", "Qwen2Moe"),
    ],
)
def test_a_models_logits_match_the_reference(family: str) -> None:
    """Norms of heads, soft caps, windows, norms after layers and after rotations, layer norms,
    parallel residuals, position embeddings and shared experts, in every possible fusion."""
    reference, ours = tiny(family, "float32")
    rows = chain([5, 9, 33, 7])
    expected = all_logits(reference, rows)
    assert (all_logits(ours, rows) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_quantised_models_divergence_is_small(dtype: str) -> None:
    """The Kullback-Leibler divergence from the reference with the same weights."""
    reference, ours = tiny("Llama", dtype)
    rows = chain([5, 9, 33, 7, 21])
    expected, result = (all_logits(m, rows).double().log_softmax(-1) for m in (reference, ours))
    divergence = (expected.exp() * (expected - result)).sum(-1)
    assert divergence.max() < 0.01


@pytest.mark.slow
def test_single_rows_batches_and_trees_have_the_same_bits() -> None:
    """Sixteen greedy tokens equal the reference's. The same rows in one pass, with another sequence
    and as a path of a tree have the same bits.
    """
    reference, ours = tiny("Llama", "float32")
    cache, theirs = ours.new_cache(64), reference.new_cache(64)
    text, alone = [5, 9, 33], []
    step, first = list(text), 0
    for _ in range(16):
        rows = chain(step, first)
        row = all_logits(ours, rows, cache)[-1]
        assert int(row.argmax()) == int(all_logits(reference, rows, theirs)[-1].argmax())
        alone.append(row)
        first += len(step)
        step = [int(row.argmax())]
        text += step
    at_once = all_logits(ours, chain(text[:-1]))
    assert torch.equal(at_once[2:], torch.stack(alone))
    # Two sequences, of which the second is this text from position 2 on.
    cache = ours.new_cache(64)
    all_logits(ours, chain(text[:2], 0, np.arange(32, 64)), cache)
    table = np.arange(32, 64, dtype=np.int32)
    rows = make_rows(
        [7, text[2], text[3]],
        [0, 2, 3],
        [0, 34, 35],
        [np.zeros(1, np.int32), table],
        [0, 1, 1],
        [1, 3, 4],
    )
    assert torch.equal(all_logits(ours, rows, cache)[1:], torch.stack(alone[:2]))
    # A tree after three tokens: a wrong branch, and the right one with twice the depth.
    cache = ours.new_cache(64)
    all_logits(ours, chain(text[:3]), cache)
    wrong = (text[3] + 1) % 61
    tree = make_rows(
        [wrong, text[3], text[4]],
        [3, 3, 4],
        [40, 50, 45],
        [np.arange(3)],
        [0, 0, 0],
        [3, 3, 3],
        [[40], [50], [50, 45]],
    )
    assert torch.equal(all_logits(ours, tree, cache)[1:], torch.stack(alone[1:3]))


@pytest.mark.slow
def test_captured_passes_and_multi_step_passes() -> None:
    """Captured passes are replayed per size; multi-step passes sample the host's tokens.

    Padded passes are captured once per size. Multi-step passes are greedy and with noise.
    """
    model = hf_model("Llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    recorder = CountingRecorder()
    ours = own_model(model, "float32", executor=lambda network: executor(network, recorder))
    cache = ours.new_cache(64)
    eager = ours.executor
    assert isinstance(eager, TritonExecutor)
    prompt = chain([5, 9, 33])
    padded = all_logits(ours, prompt, cache)
    assert (recorder.num_captured, recorder.num_replayed) == (1, 0)
    assert torch.equal(all_logits(ours, prompt, cache), padded)
    assert (recorder.num_captured, recorder.num_replayed) == (1, 1)
    # Regrouped layers have separate graphs.
    eager.regroup(lambda backend, x, index: x)
    bare = all_logits(ours, prompt, cache)
    eager.regroup(None)
    prompt.stop[:] = 0
    assert torch.equal(on_cpu(ours.run(prompt, cache, OutputSpec(np.arange(3)))), bare)
    assert torch.equal(all_logits(ours, prompt, cache), padded)
    # The same rows without padding, layer by layer.
    output_spec = OutputSpec(np.arange(3, dtype=np.int32), {1: np.arange(3)})
    assert torch.equal(on_cpu(ours.run(prompt, cache, output_spec)), padded)

    noise = Noise(77, stream_id(3, 0))
    for state in (SampleState(), SampleState(0.8, noise.seed, noise.stream)):
        expected: list[int] = []
        step, first = [int(padded[-1].argmax())], 3
        for _ in range(5):
            row = all_logits(ours, chain(step, first), cache)[-1].double().numpy()
            if state.inverse_temperature:
                row = row * state.inverse_temperature + noise.gumbel(range(len(row)), first + 1)
            first += 1
            step = [int(row.argmax())]
            expected += step
        rows = whole(chain([int(padded[-1].argmax())], 3), ours)
        slots = np.arange(4, 8, dtype=np.int32)[None]
        tokens = eager.multi_step(rows, cache, slots, [state])
        assert tokens.tolist() == [expected]
    two = make_rows(
        [int(padded[-1].argmax()), 9], [3, 1], [3, 60], [np.arange(4), np.array([0, 60])],
        [0, 1], [4, 2],
    )  # fmt: skip
    slots = np.array([[4, 5], [61, 62]], np.int32)
    tokens = eager.multi_step(whole(two, ours), cache, slots, [state, SampleState()])
    assert tokens[0].tolist() == expected[:3]
    two.positions[:] = 0
    with pytest.raises(InvalidRequestError, match="see all of their sequence"):
        eager.multi_step(two, cache, slots, [state, SampleState()])


def test_an_adapter_does_not_change_other_rows() -> None:
    reference, ours = tiny("Llama", "float32")
    rows = whole(chain([5, 9, 33]), ours)
    plain = all_logits(ours, rows)
    names = [f"model.layers.0.{n}" for n in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")]
    sizes = {"self_attn.v_proj": (24, 48), "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80)}
    adapter = {}
    for name in names:
        out, width = next(size for end, size in sizes.items() if name.endswith(end))
        adapter[name] = LowRank(
            plain_weight(randn(2, width).cpu()), plain_weight(randn(out, 2, seed=1).cpu()), 0.5
        )
    rows.adapters = np.array([-1, -1, 0], np.int32)
    results = []
    for model in (reference, ours):
        model.network.adapters.append(adapter)
        results.append(all_logits(model, rows))
        model.network.adapters.clear()
    assert torch.equal(results[1][:2], plain[:2])
    assert not torch.equal(results[1][2], plain[2])
    assert (results[0] - results[1]).abs().max() < 2e-5 * results[0].abs().max()


# --- options


def test_the_backend_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    make = choose_executor("triton")
    assert make is not None
    model = own_model(hf_model("Llama", num_hidden_layers=1), executor=make)
    assert isinstance(model.executor, TritonExecutor)
    with pytest.raises(InvalidRequestError, match="device 'tpu' is unknown"):
        choose_executor(device="tpu")
    with pytest.raises(UnsupportedCombinationError, match="run on the CPU"):
        choose_executor("native", device="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedCombinationError, match="torch finds no CUDA device"):
        choose_executor("triton")
    with pytest.raises(UnsupportedCombinationError, match="torch finds no CUDA device"):
        choose_executor(device="cuda")  # the reference backend on the GPU


_COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from anydecode.kernels.cuda import attention, packing, products
from anydecode.kernels.cuda.rows import DeviceRows
from anydecode.kernels.interface import Attention

class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Driver())
real, made = jit.JITFunction.run, {}

def compiled(self, *args, grid, warmup, **options):
    made[self.__name__] = real(self, *args, grid=grid, warmup=True, **options)

jit.JITFunction.run = compiled
x = torch.empty(1, 4096)
plain = packing.Packed(4096, 4096, 16, torch.empty(4096, 4096, dtype=torch.bfloat16),
                       packing.Tile.of(4096, 4096, 16))
products.product(x, plain, norm=x, eps=1e-5, residual=x)
codes = torch.empty(8192, 2048, dtype=torch.uint8)
scale = torch.empty(8192, 128, dtype=torch.float16)
four = packing.Packed(8192, 4096, 4, codes, packing.Tile.of(4096, 4096, 4), scale, scale)
products.product(x, four, activation="silu", dtype=torch.bfloat16)
rows = DeviceRows(torch.zeros(8, 1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32))
cache = torch.empty(64, 8, 128, dtype=torch.bfloat16)
attention.attend(x, cache, cache, rows, 0, Attention(32, 8, 128, 0.1, 64, 30.0))
product = made["_product_kernel"]
assert "mma.sync.aligned.m16n8k16" in product.asm["ptx"] and "cp.async" in product.asm["ptx"]
assert all(kernel.asm["cubin"] for kernel in made.values())
print(len(made))
"""


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    """Machine code for compute capability 9.0, with tensor cores and asynchronous copies."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3"], done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
def test_graph_replays_equal_single_launches_on_a_gpu() -> None:
    """A replayed graph has the bits of single launches, for one row and for sixteen."""
    _, ours = tiny("Llama", "bfloat16")
    tokens = list(range(3, 19))
    replayed = [all_logits(ours, chain(tokens)) for _ in range(3)]
    cache = ours.new_cache(64)
    one_by_one = [all_logits(ours, chain([t], i), cache)[0] for i, t in enumerate(tokens)]
    output_spec = OutputSpec(np.arange(16, dtype=np.int32), {1: np.arange(16)})
    eager = on_cpu(ours.run(whole(chain(tokens), ours), ours.new_cache(64), output_spec))
    for result in (*replayed, torch.stack(one_by_one)):
        assert torch.equal(result, eager)
