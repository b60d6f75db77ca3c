"""The reference backend: results against float64, and batch invariance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from anydecode.kernels import elementary
from anydecode.kernels.arithmetic import RowArithmetic, tree_sum
from anydecode.kernels.interface import (
    KEY_BLOCK,
    Attention,
    ExpertWeights,
    KeyValues,
    LowRank,
    Rope,
    Routing,
    Rows,
    Weight,
)
from anydecode.kernels.reference import ReferenceBackend, expert_shares
from anydecode.kernels.tiled import TILES, TiledProduct
from tiny_models import make_rows
from torch_weights import dequantize, plain_weight, quantize

SHAPES = [
    (1, 1),
    (2, 17),
    (3, 33),
    (5, 257),
    (7, 16),
    (16, 48),
    (33, 64),
    (97, 100),
    (131, 48),
    (192, 576),
    (300, 77),
    (1000, 31),
    (576, 1536),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_batch_invariant(shape: tuple[int, int]) -> None:
    """A row has the same bits alone, at every index of a tile, and among up to 149 others."""
    product, weight = TiledProduct(), plain_weight(randn(*shape))
    row = randn(1, shape[1], seed=1)
    alone = product(row, weight)[0]
    for count in (2, 7, 8, 9, 64, 73, 150):
        others = randn(count, shape[1], seed=count)
        for position in {0, 1, count // 2, count - 1, *range(min(count, 8))}:
            x = others.clone()
            x[position] = row[0]
            assert torch.equal(product(x, weight)[position], alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_match_float64(shape: tuple[int, int]) -> None:
    x, matrix = randn(11, shape[1]), randn(*shape, seed=2)
    exact = x.double() @ matrix.double().T
    bound = 1e-6 * (x.abs().double() @ matrix.abs().double().T)
    assert ((TiledProduct()(x, plain_weight(matrix)) - exact).abs() <= bound).all()


def test_a_plain_product_is_not_batch_invariant() -> None:
    """Counterexample: the library's own product gives a row other bits among others than alone."""
    different = 0
    for out_features, in_features in SHAPES:
        matrix, x = randn(out_features, in_features), randn(33, in_features, seed=1)
        different += not torch.equal((x @ matrix.T)[:1], x[:1] @ matrix.T)
    assert different > 0


def test_tiles_that_depend_on_the_row_index_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bits depend on the index in the tile, rows are multiplied one at a time."""
    real = torch.mm

    def position_dependent(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        real(a, b, out=out)
        if len(a) > 1:
            out[-1] = torch.nextafter(out[-1], torch.tensor(float("inf")))
        return out

    monkeypatch.setattr(torch, "mm", position_dependent)
    product, matrix = TiledProduct(), randn(20, 32)
    weight = plain_weight(matrix)
    assert product.tiles(matrix) == (1,)
    x = randn(10, 32, seed=1)
    assert torch.equal(product(x, weight)[9], product(x[9:], weight)[0])


def test_an_ordinary_shape_uses_a_tile() -> None:
    """An ordinary shape has a tile of several rows, so that weights are read once for them."""
    assert TiledProduct().tiles(randn(64, 64))[0] in TILES


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_products_with_packed_weights(format: str) -> None:
    matrix = randn(70, 64)
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    if format in plain:
        weight = plain_weight(matrix.to(plain[format]))
    else:
        weight = quantize(matrix, format)
    x, product = randn(9, 64, seed=1), TiledProduct()
    y = product(x, weight)
    assert (y - x @ dequantize(weight).T).abs().max() < 1e-4
    assert torch.equal(product(x[3:4], weight)[0], y[3])


def test_large_weights_are_dequantised_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from anydecode.kernels import tiled

    weight, x = quantize(randn(300, 64), "Q8_0"), randn(4, 64, seed=1)
    whole = TiledProduct()(x, weight)
    monkeypatch.setattr(tiled, "GROUP_VALUES", 64 * 64)
    sizes: list[int] = []
    real = tiled.dequantize

    def counting(part: Weight) -> np.ndarray:
        sizes.append(part.out_features)
        return real(part)

    monkeypatch.setattr(tiled, "dequantize", counting)
    assert torch.allclose(TiledProduct()(x, weight), whole, atol=1e-4)
    assert sizes == [64, 64, 64, 64, 44]


@pytest.mark.parametrize(
    ("ours", "exact", "low", "high", "margin"),
    [
        (elementary.exp, torch.exp, -86.0, 87.0, 4e-7),
        (elementary.tanh, torch.tanh, -20.0, 20.0, 5e-7),
        (elementary.tanh, torch.tanh, -0.4, 0.4, 5e-7),
        (elementary.silu, torch.nn.functional.silu, -30.0, 30.0, 1e-6),
    ],
)
def test_functions_match_float64(ours, exact, low, high, margin) -> None:  # type: ignore[no-untyped-def]
    x = torch.linspace(low, high, 40001)
    expected = exact(x.double())
    error = (ours(x) - expected).abs() / expected.abs().clamp(min=1e-30)
    assert error[expected != 0].max() < margin


def test_gelu_matches_torch() -> None:
    x = torch.linspace(-12, 12, 10001)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert (elementary.gelu_tanh(x) - expected).abs().max() < 2e-6
    expected = torch.nn.functional.gelu(x.double())
    assert (elementary.gelu(x) - expected).abs().max() < 1e-6


def test_exp_at_its_limits() -> None:
    x = torch.tensor([-float("inf"), -1e9, -87.5, 0.0, 1000.0])
    y = elementary.exp(x)
    assert y[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.isfinite(y).all()


@given(st.integers(1, 70), st.integers(0, 60), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_functions_do_not_depend_on_the_index(length: int, position: int, seed: int) -> None:
    position = position % length
    x = randn(length, seed=seed) * 3
    functions = (elementary.exp, elementary.tanh, elementary.silu)
    for function in (*functions, elementary.gelu_tanh, elementary.gelu):
        assert torch.equal(function(x)[position], function(x[position : position + 1])[0])


@given(st.integers(1, 200), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_tree_sum_matches_float64_and_is_invariant(width: int, rows: int) -> None:
    x = randn(rows, width)
    y = elementary.tree_sum(x)
    assert (y - x.double().sum(-1)).abs().max() < 1e-4
    assert torch.equal(y[rows // 2], elementary.tree_sum(x[rows // 2]))
    assert torch.equal(y, elementary.tree_sum(x.T, 0))


def test_rotary_table_does_not_depend_on_its_growth() -> None:
    frequencies = (1.0 / 10000 ** (np.arange(0, 16, 2) / 16)).astype(np.float32)
    rope = Rope(frequencies, 1.3, growth=0.4, growth_period=50)
    slow = elementary.RotaryTable(rope, torch.device("cpu"))
    fast = elementary.RotaryTable(rope, torch.device("cpu"))
    positions = torch.tensor([0, 3, 500])
    for highest in (3, 100, 101, 500):
        slow.rows(torch.tensor([highest]), highest)
    for one, other in zip(slow.rows(positions, 500), fast.rows(positions, 500), strict=True):
        assert torch.equal(one, other)
    factors = 1.3 * (1 + 0.4 * torch.tensor([1.0, 1.0, 11.0]).log())
    expected = (positions[:, None] * torch.from_numpy(frequencies)).cos() * factors[:, None]
    assert (fast.rows(positions, 500)[0] - expected).abs().max() < 1e-4


def bound(rows: Rows, cache: KeyValues | None = None, adapters=()) -> ReferenceBackend:  # type: ignore[no-untyped-def]
    backend = ReferenceBackend()
    cache = cache or KeyValues([torch.zeros(4, 1, 4)], [torch.zeros(4, 1, 4)])
    backend.bind(rows, np.arange(len(rows)), cache, adapters)
    return backend


def simple_rows(positions: list[int]) -> Rows:
    count = len(positions)
    return make_rows(
        [0] * count, positions, [-1] * count, [np.zeros(0, np.int32)], [0] * count, [0] * count
    )


def test_rms_norm_matches_float64() -> None:
    x, weight = randn(3, 24), randn(8, seed=1)
    parts = x.double().view(3, 3, 8)
    expected = parts / (parts.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (
        ReferenceBackend().rms_norm(x, weight.numpy(), 1e-5, 3) - expected.view(3, 24)
    ).abs().max() < 1e-6
    wide = randn(24, seed=2)
    expected = (expected / weight).view(3, 24) * wide
    assert (ReferenceBackend().rms_norm(x, wide.numpy(), 1e-5, 3) - expected).abs().max() < 2e-6


@pytest.mark.parametrize("count", [1, 5])
def test_row_arithmetic_equals_the_reference(count: int) -> None:
    """Sums have the reference's bits. torch's square root and products round in another way."""
    x, matrix, bias = randn(count, 24), randn(7, 24, seed=1), randn(7, seed=2).numpy()
    rows = simple_rows([3 * row for row in range(count)])
    ours, reference = RowArithmetic(rows.positions), bound(rows)
    for weight, groups in ((None, 1), (randn(24, seed=3), 1), (randn(8, seed=4), 3)):
        vector = None if weight is None else weight.numpy()
        expected = reference.rms_norm(x, vector, 1e-5, groups).numpy()
        found = ours.rms_norm(x.numpy(), vector, 1e-5, groups)
        assert found.shape == (count, 24) and np.allclose(found, expected, rtol=3e-7, atol=0)
    vector, offset = randn(24, seed=5).numpy(), randn(24, seed=6).numpy()
    for either in (None, offset):
        expected = reference.layer_norm(x, vector, either, 1e-5).numpy()
        assert np.allclose(ours.layer_norm(x.numpy(), vector, either, 1e-5), expected, atol=1e-6)
    table = plain_weight(randn(20, 24, seed=7))
    expected = reference.add_positions(x, table).numpy()
    assert np.array_equal(ours.add_positions(x.numpy(), table), expected)
    rope = Rope(np.array([1.0, 0.1], np.float32), 2.0, growth=0.5, growth_period=5)
    rotated = ours.rope(x.numpy(), 4, rope)
    assert np.allclose(rotated, reference.rope(x, 4, rope).numpy(), atol=1e-6)
    product = ours.linear(x.numpy(), plain_weight(matrix), bias)
    assert np.allclose(product, reference.linear(x, plain_weight(matrix), bias).numpy(), atol=1e-5)
    assert rotated.shape == (count, 24) and product.shape == (count, 7)
    assert np.array_equal(tree_sum(x.numpy()), elementary.tree_sum(x).numpy())
    assert ours.rms_norm(x[:0].numpy(), None, 1e-5, 3).shape == (0, 24)


def test_rope_rotates_the_first_dimensions_only() -> None:
    rope = Rope(np.array([1.0, 0.1], np.float32), 2.0)
    backend, x = bound(simple_rows([0, 5])), randn(2, 12)
    y = backend.rope(x, 2, rope).view(2, 2, 6)
    heads = x.view(2, 2, 6)
    assert torch.equal(y[..., 4:], heads[..., 4:])
    assert torch.allclose(y[0, :, :4], heads[0, :, :4] * 2)
    rotated = torch.complex(heads[1, :, :2], heads[1, :, 2:4]) * torch.polar(
        torch.tensor(2.0), torch.tensor([5.0, 0.5])
    )
    assert torch.allclose(y[1, :, :4], torch.cat((rotated.real, rotated.imag), -1), atol=1e-5)


SHAPE = Attention(num_heads=4, num_kv_heads=2, head_dim=6, scale=0.4)


def dense_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: list[int],
    shape: Attention,
    positions: list[int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one row, the last of `positions`, in float64, by the definition."""
    group = shape.num_heads // shape.num_kv_heads
    k = keys[slots].double().repeat_interleave(group, 1)
    v = values[slots].double().repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", q.double().view(shape.num_heads, -1), k) * shape.scale
    if shape.softcap:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    if shape.slopes:
        distance = torch.tensor(positions) - positions[-1]
        scores = scores + torch.tensor(shape.slopes).double()[:, None] * distance
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), -1)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(slots)], v).flatten()


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("sink", [None, -1.0, 9.0])
@pytest.mark.parametrize("slopes", [None, (0.5, 0.01, 1.0, 0.0)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 1.5), (7, 1.0)])
def test_attention_matches_float64(
    length: int,
    window: int | None,
    softcap: float | None,
    slopes: tuple[float, ...] | None,
    sink: float | None,
) -> None:
    """With masked positions, a tail, a window and a soft cap; other slots hold NaN and infinity."""
    shape = Attention(4, 2, 6, 0.4, window, softcap, slopes=slopes)
    generator = np.random.default_rng(length)
    slots = generator.permutation(200)[:length]
    masked = generator.random(length) < 0.2
    masked[-1] = False
    table = np.where(masked, -1, slots)
    split = length // 2
    rows = make_rows(
        [0],
        [length - 1],
        [slots[-1]],
        [table[:split]],
        [0],
        [split],
        [table[split:].tolist()],
    )
    keys, values = randn(200, 2, 6, seed=3), randn(200, 2, 6, seed=4)
    other_slots = np.setdiff1d(np.arange(200), table)
    keys[other_slots], values[other_slots] = float("nan"), float("inf")
    q, k, v = randn(1, 24), randn(1, 12, seed=1), randn(1, 12, seed=2)
    sinks = None if sink is None else np.array([sink, 0.0, 1.0, -200.0], np.float32)
    result = bound(rows, KeyValues([keys], [values])).attention(q, k, v, 0, shape, sinks)[0]
    first = 0 if window is None else max(0, length - window)
    positions = [first + int(i) for i in np.flatnonzero(table[first:] >= 0)]
    visible = table[positions].tolist()
    assert torch.equal(keys[slots[-1]], k.view(2, 6))
    tensor = None if sinks is None else torch.from_numpy(sinks)
    expected = dense_attention(q[0], keys, values, visible, shape, positions, tensor)
    assert (result - expected).abs().max() < 1e-5


def test_a_fully_masked_row_gives_zeros() -> None:
    cache = KeyValues([randn(4, 2, 6)], [randn(4, 2, 6)])
    rows = simple_rows([0, 1])
    rows.tables, rows.prefix = [np.array([-1, -1], np.int32)], np.array([0, 2], np.int32)
    out = bound(rows, cache).attention(randn(2, 24), randn(2, 12), randn(2, 12), 0, SHAPE)
    assert torch.equal(out, torch.zeros(2, 24))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_attention_is_batch_invariant(data: st.DataObject) -> None:
    """A row has the same bits alone and among rows of other lengths, with other slots and another
    split into table and tail; only the contents of its positions matter.
    """
    length = data.draw(st.integers(1, 90))
    others = data.draw(st.lists(st.integers(1, 150), max_size=6))
    position = data.draw(st.integers(0, len(others)))
    seed = data.draw(st.integers(0, 99))
    content_k, content_v = randn(150, 2, 6, seed=seed), randn(150, 2, 6, seed=seed + 1)
    query = randn(1, 24, seed=seed + 2)

    def run(lengths: list[int], at: int, prefix: int) -> torch.Tensor:
        generator = np.random.default_rng(len(lengths) + prefix)
        slots = generator.permutation(300)
        keys, values = torch.full((300, 2, 6), torch.nan), torch.full((300, 2, 6), torch.nan)
        keys[slots[:150]], values[slots[:150]] = content_k, content_v
        count = len(lengths)
        rows = make_rows(
            [0] * count,
            [n - 1 for n in lengths],
            [-1] * count,
            [slots[:150]],
            [0] * count,
            [prefix if r == at else n for r, n in enumerate(lengths)],
            [slots[prefix:n].tolist() if r == at else [] for r, n in enumerate(lengths)],
        )
        q = randn(count, 24, seed=7)
        q[at] = query[0]
        k = torch.zeros(count, 12)
        return bound(rows, KeyValues([keys], [values])).attention(q, k, k, 0, SHAPE)[at]

    alone = run([length], 0, length)
    mixed = [*others[:position], length, *others[position:]]
    prefix = data.draw(st.integers(0, length))
    assert torch.equal(run(mixed, position, prefix), alone)


def test_a_sum_without_blocks_depends_on_padding() -> None:
    """Counterexample: a sum over all columns changes with the padding that another row causes."""
    weights = randn(20, KEY_BLOCK + 5).abs()
    longer = torch.nn.functional.pad(weights, (0, 40))
    assert not torch.equal(elementary.tree_sum(weights), elementary.tree_sum(longer))


def test_ties_of_experts_go_to_the_lower_id() -> None:
    router = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    shares = expert_shares(router, Routing(2))
    assert torch.equal(
        shares > 0, torch.tensor([[False, True, True, False], [True, True] + [False] * 2])
    )
    assert torch.allclose(shares.sum(-1), torch.ones(2))


def test_grouped_scores_match_a_literal_reading() -> None:
    """Groups by the sum of their two largest biased scores, then experts, weights without bias."""
    router, bias = randn(40, 12), randn(12, seed=1) * 0.3
    routing = Routing(3, True, "sigmoid", 4, 2, 2.5)
    shares = expert_shares(router, routing, bias)
    scores = router.double().sigmoid()
    for row, score in enumerate(scores):
        choice = (score + bias.double()).tolist()
        sums = [sum(sorted(choice[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -sums[g])[:2]
        allowed = [e for e in range(12) if e // 3 in groups]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:3]
        total = sum(float(score[e]) for e in chosen)
        expected = torch.zeros(12, dtype=torch.float64)
        for expert in chosen:
            expected[expert] = float(score[expert]) / total * 2.5
        assert (shares[row] - expected).abs().max() < 1e-5


def test_a_selection_bias_changes_the_choice_and_not_the_weights() -> None:
    router = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    shares = expert_shares(router, Routing(2, False), torch.tensor([0.0, -9.0, 0.0, 0.0]))
    expected = router.softmax(-1) * torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert torch.allclose(shares, expected, atol=1e-6)


def test_a_choice_by_logits_where_scores_are_rounded_to_1() -> None:
    """Wrong twin: the scores are equal, and the first experts win."""
    router = torch.tensor([[20.0, 30.0, 25.0, 1.0]])
    shares = expert_shares(router, Routing(2, False, "sigmoid", by_logits=True))
    assert torch.equal(shares, torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    bias = torch.tensor([8.0, 0.0, 0.0, 0.0])
    shares = expert_shares(router, Routing(2, False, "sigmoid", by_logits=True), bias)
    assert torch.equal(shares, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    shares = expert_shares(router, Routing(2, False, "sigmoid"))
    assert torch.equal(shares, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))


def test_experts_match_float64_and_are_batch_invariant() -> None:
    x, router = randn(9, 16), randn(9, 5, seed=1)
    gate = [plain_weight(randn(24, 16, seed=10 + e)) for e in range(5)]
    up = [plain_weight(randn(24, 16, seed=20 + e)) for e in range(5)]
    down = [plain_weight(randn(16, 24, seed=30 + e)) for e in range(5)]
    backend = ReferenceBackend()
    experts, routing = ExpertWeights(gate, up, down), Routing(2, normalise=False)
    y = backend.experts(x, router, experts, routing, "silu")
    shares = router.double().softmax(-1)
    top = shares.topk(2, -1)
    expected = torch.zeros(9, 16, dtype=torch.float64)
    for row in range(9):
        for share, e in zip(top.values[row], top.indices[row].tolist(), strict=True):
            inner = torch.nn.functional.silu(x[row].double() @ dequantize(gate[e]).double().T)
            inner = inner * (x[row].double() @ dequantize(up[e]).double().T)
            expected[row] += share * (inner @ dequantize(down[e]).double().T)
    assert (y - expected).abs().max() < 1e-3
    for row in range(9):
        alone = backend.experts(x[row:][:1], router[row:][:1], experts, routing, "silu")
        assert torch.equal(alone[0], y[row])


def test_adapters_change_only_their_rows() -> None:
    weight = plain_weight(randn(12, 16), "here")
    delta = LowRank(plain_weight(randn(3, 16, seed=1)), plain_weight(randn(12, 3, seed=2)), 0.5)
    rows = simple_rows([0, 1, 2, 3])
    x = randn(4, 16, seed=3)
    plain = bound(rows).linear(x, weight)
    rows.adapters = np.array([-1, 1, 0, 1], np.int32)
    adapted = bound(rows, None, [{"elsewhere": delta}, {"here": delta}]).linear(x, weight)
    assert torch.equal(adapted[[0, 2]], plain[[0, 2]])
    expected = plain + x @ dequantize(delta.down).T @ dequantize(delta.up).T * 0.5
    assert torch.allclose(adapted[[1, 3]], expected[[1, 3]], atol=1e-5)
    rows = simple_rows([3])
    rows.adapters = np.array([1], np.int32)
    alone = bound(rows, None, [{}, {"here": delta}]).linear(x[3:], weight)
    assert torch.equal(alone[0], adapted[3])
