"""The compiled kernels against torch and numpy, and their batch invariance."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels import build, formats
from anydecode.kernels.cache import CACHE_FORMATS, bytes_per_position, decode, encode, new_cache
from anydecode.kernels.interface import (
    FORMATS,
    Attention,
    ClampedSwiglu,
    ExpertWeights,
    KeyValues,
    LowRank,
    Output,
    OutputSpec,
    Rope,
    Routing,
    Rows,
    SampleSpec,
    Weight,
)
from anydecode.kernels.library import (
    Library,
    Matrix,
    argmax,
    load_library,
    logsumexp,
    sample_gumbel,
    top_k,
)
from anydecode.kernels.library_cache import built_library
from anydecode.kernels.native import ExpertReads, NativeExecutor
from anydecode.kernels.packing import Packer
from anydecode.sampling.noise import Noise
from block_formats import set_scales

#: Those of GGUF, and those of bitsandbytes.
ALL_FORMATS = (*FORMATS, *formats.BITSANDBYTES_VALUES)
PACKED = [name for name in ALL_FORMATS if formats.is_packed(name)]
few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def library() -> Library:
    if build.find_compiler() is None:
        pytest.skip("no C compiler")
    loaded = load_library()
    assert loaded is not None
    return loaded


def random_weight(format: str, out: int, width: int, seed: int, name: str = "") -> Weight:
    """A random matrix; in block formats random bytes with scales below 2."""
    random = np.random.default_rng(seed)
    if formats.is_packed(format):
        shape = (out, formats.row_bytes(format, width))
        data = random.integers(0, 256, shape, np.uint8) & 0xBB
        return Weight(format, out, width, data, name)
    values = random.standard_normal((out, width), np.float32) / width**0.5
    return Weight(format, out, width, values.astype(formats.DTYPES[format]), name)


def small_weight(out: int, width: int, seed: int, name: str = "") -> Weight:
    return random_weight("F32", out, width, seed, name)


def rounded_to_int8(x: np.ndarray) -> np.ndarray:
    """The activations of products with block formats: multiples of amax / 127 in blocks of 32."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127.0) / largest, np.float32(0))
    codes = np.rint(blocks * inverse).astype(np.float64)
    return (codes * (largest / np.float32(127.0)).astype(np.float64)).reshape(x.shape)


def rounded_nf4() -> np.ndarray:
    """The numbers of NF4 in products: integers of 16 bits."""
    unit = np.float32(31908)
    return np.rint(formats.BITSANDBYTES_VALUES["NF4"] * unit) / unit


def product(library: Library, weight: Weight, x: np.ndarray) -> np.ndarray:
    packer = Packer(library, 1)
    matrix = packer.pack(weight)
    out = np.full((len(x), weight.out_features), np.nan, np.float32)
    scratch = np.empty(x.size * 2 + 64, np.uint8)
    library.linear(
        ctypes.byref(matrix), x.ctypes.data, len(x), None, out.ctypes.data, scratch.ctypes.data
    )
    return out


def relative_error(result: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


# --- products


@few
@given(
    st.sampled_from(ALL_FORMATS), st.integers(1, 40), st.integers(1, 3), st.integers(1, 9),
    st.integers(0, 99),
)  # fmt: skip
def test_products_match_float64(
    library: Library, format: str, out: int, blocks: int, n: int, seed: int
) -> None:
    weight = random_weight(format, out, 256 * blocks, seed)
    x = np.random.default_rng(seed).standard_normal((n, 256 * blocks), np.float32)
    result = product(library, weight, x)
    with patch.dict(formats.BITSANDBYTES_VALUES, NF4=rounded_nf4()):
        dense = formats.dequantize(weight).astype(np.float64)
    inputs = rounded_to_int8(x) if formats.is_packed(format) else x.astype(np.float64)
    assert relative_error(result, inputs @ dense.T) < 1e-5


def test_a_product_with_one_wrong_scale_is_detected(library: Library) -> None:
    weight = random_weight("Q4_1", 16, 256, 1)
    x = np.random.default_rng(1).standard_normal((3, 256), np.float32)
    result = product(library, weight, x)
    weight.data = weight.data.copy()
    weight.data[3, 21] ^= 1
    assert (
        relative_error(result, rounded_to_int8(x) @ formats.dequantize(weight).astype(np.float64).T)
        > 1e-5
    )


@few
@given(st.sampled_from(ALL_FORMATS), st.integers(1, 20), st.integers(1, 33), st.integers(0, 99))
def test_products_are_batch_invariant(
    library: Library, format: str, out: int, n: int, seed: int
) -> None:
    weight = random_weight(format, out, 512, seed)
    x = np.random.default_rng(seed).standard_normal((n, 512), np.float32)
    together = product(library, weight, x)
    row = seed % n
    assert np.array_equal(product(library, weight, x[row : row + 1])[0], together[row])
    assert np.array_equal(product(library, weight, np.ascontiguousarray(x[::-1]))[::-1], together)


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_every_variant_gives_the_same_products(library: Library, format: str) -> None:
    """Bit by bit, in batches of any size; a variant that fails the check at start warns."""
    path = built_library()
    assert path is not None
    weight = random_weight(format, 27, 768, 5)
    x = np.random.default_rng(5).standard_normal((11, 768), np.float32)
    results: dict[str, list[np.ndarray]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A library has one variant at a time, at last the fastest.
        for name in ("scalar", *reversed(build.local_variants())):
            variant = Library(path, name)
            results[variant.variant] = [
                product(variant, weight, x[:n]) for n in (1, 2, 3, 5, 9, 11)
            ]
    assert len(results) == 1 + len(build.local_variants())
    expected, *others = results.values()
    for other in others:
        for one, right in zip(other, expected, strict=True):
            assert np.array_equal(one.view(np.uint32), right.view(np.uint32))


def test_every_exponent_of_mxfp4_scales_its_block(library: Library) -> None:
    """Also of the two below the normal numbers. A product is 2^(e - 128) * 2 * x."""
    exponents = np.arange(247, dtype=np.uint8)
    data = np.zeros((247, formats.row_bytes("MXFP4", 32)), np.uint8)
    data[:, 0], data[:, 1] = exponents, 2
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 127.0
    result = product(library, Weight("MXFP4", 247, 32, data, ""), x)
    expected = np.ldexp(np.float32(254.0), exponents.astype(np.int32) - 128)
    assert np.array_equal(result[0], expected)


@pytest.mark.parametrize(("format", "error"), [("NF4", 8e-6), ("FP4", 5e-7)])
def test_numbers_of_bitsandbytes_keep_16_bits_in_products(
    library: Library, format: str, error: float
) -> None:
    """Each code at each input of a block. Integers of 8 bits would be 0.37% of the largest number
    away from those of NF4, and 0.26% from those of FP4."""
    codes = np.arange(16, dtype=np.uint8)
    data = np.empty((16, 36), np.uint8)
    data[:, :4] = np.full((16, 1), 3.0, np.float32).view(np.uint8)
    data[:, 4:] = (codes * 17)[:, None]
    x = np.eye(64, dtype=np.float32) * np.float32(127)
    result = product(library, Weight(format, 16, 64, data, ""), x) / 127 / 3
    values = formats.BITSANDBYTES_VALUES[format]
    assert np.abs(result - values).max() < error
    for number in (127, 128):
        assert np.abs(np.rint(values * number) / number - values).max() > 2e-3


@pytest.mark.parametrize("format", PACKED)
def test_data_of_a_wrong_size_are_refused_in_one_line(library: Library, format: str) -> None:
    weight = random_weight(format, 5, 256, 1)
    for data in (weight.data[:4], weight.data[:, :-1], weight.data.view(np.int8)):
        wrong = replace(weight, data=data, name="model.x")
        with pytest.raises(
            CheckpointError, match=f"model.x holds .*, not a {format} matrix"
        ) as caught:
            Packer(library, 1).pack(wrong)
        assert "\n" not in str(caught.value)


def unpacked(library: Library, matrix: Matrix) -> np.ndarray:
    out = np.full((matrix.out_features, matrix.in_features), np.nan, np.float32)
    for row in range(len(out)):
        library.unpack_row(ctypes.byref(matrix), row, out[row].ctypes.data)
    return out


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_unpacked_rows_equal_the_dequantised_rows(library: Library, format: str) -> None:
    weight = random_weight(format, 13, 512, 3)
    packer = Packer(library, 2)
    matrix = packer.pack(weight)
    assert np.array_equal(unpacked(library, matrix), formats.dequantize(weight))
    assert packer.pack(weight) is matrix


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, 65504.0, -1.5])
@pytest.mark.parametrize("byte", [0, 255])
def test_extreme_blocks_are_unpacked_exactly(library: Library, byte: int, scale: float) -> None:
    """The smallest and the largest codes, whose points are at the ends of their grids."""
    for format in PACKED:
        values, size = formats.BLOCKS[format]
        blocks = np.full((3, 256 // values, size), byte, np.uint8)
        set_scales(format, blocks, np.full(blocks.shape[:2], scale))
        weight = Weight(format, 3, 256, blocks.reshape(3, -1))
        packer, expected = Packer(library, 1), formats.dequantize(weight)
        assert np.array_equal(unpacked(library, packer.pack(weight)), expected), format
        if format != "MXFP4":  # whose largest scale overflows
            x = np.random.default_rng(1).standard_normal((1, 256), np.float32)
            exact = rounded_to_int8(x) @ expected.astype(np.float64).T
            assert np.allclose(product(library, weight, x), exact, 1e-5, 1e-5), format


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_packed_weights_have_about_the_same_size(library: Library, format: str) -> None:
    weight = random_weight(format, 64, 512, 3)
    packer = Packer(library, 1)
    packer.pack(weight)
    # Codes of TQ1_0 are packed in two bits, those of IQ3_S in four.
    limit = 1.26 if format in ("TQ1_0", "IQ3_S") else 1.15
    assert weight.num_bytes <= packer.num_bytes <= limit * weight.num_bytes


@pytest.mark.parametrize("format", ["NVFP4", "Q4_K"])
def test_a_weights_scale_multiplies_its_values(library: Library, format: str) -> None:
    weight = random_weight(format, 13, 512, 3)
    plain, x = formats.dequantize(weight), np.random.default_rng(4).standard_normal((3, 512))
    x = x.astype(np.float32)
    expected = product(library, weight, x)
    weight = replace(weight, scale=0.3)
    assert np.array_equal(formats.dequantize(weight), plain * np.float32(0.3))
    assert np.array_equal(product(library, weight, x), expected * np.float32(0.3))
    packer = Packer(library, 1)
    assert np.array_equal(unpacked(library, packer.pack(weight)), plain * np.float32(0.3))


def test_weights_are_freed_as_they_are_packed(library: Library) -> None:
    """Else a converted model would be in memory twice while it is opened."""
    weights = [random_weight("Q4_0", 16, 64, seed) for seed in range(3)]
    packer, kept = Packer(library, 1, free_weights=True), Packer(library, 1)
    for index, weight in enumerate(weights):
        expected = unpacked(library, kept.pack(weight))
        assert weight.data.size
        matrix = packer.pack(weight)
        assert [one.data.size == 0 for one in weights] == [i <= index for i in range(3)]
        assert np.array_equal(unpacked(library, matrix), expected)
        assert packer.pack(weight) is matrix


# --- whole programs


class Network:
    """Two layers with every operation of a transformer, and a head with a soft cap."""

    def __init__(
        self,
        seed: int,
        format: str = "F32",
        experts: bool = False,
        expert_gates: bool = True,
        vocab: int = 50,
        sinks: bool = False,
        routing: Routing | None = None,
        biases: bool = False,
        **shape: Any,
    ) -> None:
        latent = shape.get("latent_dim")
        kv, head_dim = 1 if latent else shape.pop("kv", 2), shape.pop("head_dim", 16)
        heads = shape.pop("heads", 4)
        self.shape = Attention(heads, kv, head_dim, head_dim**-0.5, **shape)
        self.width, self.inner, self.vocab = 64, 96, vocab
        self.use_experts = experts or routing is not None
        self.routing = routing
        num_experts = 8 if routing else 5
        frequencies = 100.0 ** -(np.arange(0, head_dim // 2) / (head_dim // 2))
        self.rope = Rope(frequencies.astype(np.float32)[: (head_dim - (latent or 0)) // 2], 1.1)
        random = np.random.default_rng(seed)
        self.norm = random.random(self.width, np.float32) + np.float32(0.5)
        self.head_norm = random.random(head_dim, np.float32) + np.float32(0.5)
        self.bias = random.standard_normal(heads * head_dim, np.float32) * np.float32(0.1)
        if latent:
            self.bias = None
            self.heads = [
                [random_weight(format, *size, seed + 51 + i, f"{name}.{i}") for i in range(heads)]
                for name, size in (("keys", (latent, 32)), ("values", (head_dim, latent)))
            ]
        query_dim = 32 + head_dim - latent if latent else head_dim
        sizes = {
            "q": (heads * query_dim, self.width), "k": (kv * head_dim, self.width),
            "v": (kv * head_dim, self.width), "o": (self.width, heads * head_dim),
            "gate": (self.inner, self.width), "up": (self.inner, self.width),
            "down": (self.width, self.inner), "router": (num_experts, self.width),
        }  # fmt: skip
        self.weights = [
            {n: random_weight(format, *s, seed + 31 * i + j, f"{i}.{n}") for j, (n, s) in
             enumerate(sizes.items())} for i in range(2)
        ]  # fmt: skip
        self.expert_weights = [
            [small_weight(*sizes[n], seed + 7 * e + j, f"{n}.{e}") for e in range(num_experts)]
            for j, n in enumerate(("gate", "up", "down"))
        ]
        self.experts = ExpertWeights(*self.expert_weights)
        self.expert_activation: Any = ClampedSwiglu(1.5, 0.4) if biases else "silu"
        if not expert_gates:
            self.experts.gate, self.expert_activation = [], "relu2"
        if biases:
            self.experts.gate_bias, self.experts.up_bias, self.experts.down_bias = (
                list(random.standard_normal((num_experts, sizes[n][0]), np.float32))
                for n in ("gate", "up", "down")
            )
            self.experts.selection_bias = random.random(num_experts, np.float32)
        self.sinks = random.standard_normal(heads, np.float32) * 2 if sinks else None
        self.gate = small_weight(1, self.inner, seed + 5, "gate")
        self.embedding = random_weight(format, self.vocab, self.width, seed + 999)

    def layer(self, b: Any, x: Any, index: int) -> Any:
        w, shape = self.weights[index], self.shape
        y = b.rms_norm(x, self.norm, 1e-5)
        q, k, v = b.linear(y, w["q"], self.bias), b.linear(y, w["k"]), b.linear(y, w["v"])
        if shape.latent_dim:
            q, rotary = b.split(q, 32, 4)
            q = b.join(b.grouped_linear(q, self.heads[0]), b.rope(rotary, 4, self.rope), 4)
            k, rotary = b.split(k, shape.latent_dim)
            k, v = b.join(b.rms_norm(k, None, 1e-6), b.rope(rotary, 1, self.rope)), None
        else:
            q = b.rms_norm(q, self.head_norm, 1e-6, shape.num_heads)
            q = b.rope(q, shape.num_heads, self.rope)
            k = b.rope(b.rms_norm(k, None, 1e-6, shape.num_kv_heads), shape.num_kv_heads, self.rope)
        z = b.attention(q, k, v, index, shape, self.sinks)
        z = b.grouped_linear(z, self.heads[1]) if shape.latent_dim else z
        x = b.add(x, b.linear(z, w["o"]))
        y = b.rms_norm(x, None, 1e-5)
        if self.use_experts:
            routing = self.routing or Routing(2, bool(index))
            router = b.linear(y, w["router"])
            z = b.experts(y, router, self.experts, routing, self.expert_activation)
            shared = b.gated(b.linear(y, w["gate"]), b.linear(y, w["up"]), self.expert_activation)
            gate = b.linear(y, self.expert_weights[0][0])
            shared = b.gate_parts(b.linear(shared, w["down"]), b.linear(gate, self.gate), "sigmoid")
            return b.add(x, b.add(z, shared) if routing is self.routing else z)
        activation = "silu" if index else "gelu_tanh"
        inner = b.gated(b.linear(y, w["gate"]), b.linear(y, w["up"]), activation)
        return b.add(x, b.rms_norm(b.linear(inner, w["down"]), self.norm, 1e-5))

    def head(self, b: Any, x: Any) -> Any:
        return b.softcap(b.scale(b.linear(b.rms_norm(x, self.norm, 1e-5), self.embedding), 0.7), 3)

    def executor(
        self, threads: int = 2, adapters: Any = (), library: Library | None = None
    ) -> NativeExecutor:
        return NativeExecutor(
            self.embedding, self.vocab, 2, self.layer, self.head,
            embedding_scale=1.5, threads=threads, adapters=adapters, library=library,
        )  # fmt: skip

    def cache(self, slots: int, format: str = "float32") -> KeyValues:
        cache = new_cache(format, slots, [self.shape, self.shape])
        for array in (*cache.keys, *cache.values):
            array.view(np.uint8).fill(0xFF)  # NaN, whatever the format
        return cache


def ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def sequence_rows(tokens: Any, slots: Any, first: int = 0, layers: int = 2) -> Rows:
    """Rows of one sequence from position `first` on, with the `slots` of all positions."""
    n, table = len(tokens), ints(slots)
    positions = ints(np.arange(first, first + n))
    zeros = ints(np.zeros(n))
    return Rows(
        ints(tokens), positions, table[positions], [table], zeros, positions + 1, ints([]),
        zeros, zeros, zeros.copy(), zeros + layers,
    )  # fmt: skip


def all_logits(rows: Rows) -> OutputSpec:
    return OutputSpec(ints(np.arange(len(rows))))


def run_reference(network: Network, rows: Rows, cache: KeyValues, adapters: Any = ()) -> Any:
    pytest.importorskip("torch")
    from anydecode.kernels.reference import ReferenceBackend
    from anydecode.kernels.torch_arrays import as_numpy, as_tensor

    backend = ReferenceBackend()
    x: Any = as_tensor(formats.dequantize_rows(network.embedding, rows.tokens)) * 1.5
    backend.bind(rows, np.arange(len(rows)), cache, adapters)
    for index in range(2):
        x = network.layer(backend, x, index)
    states = x
    backend.unbind()
    return as_numpy(network.head(backend, x)), as_numpy(states)


SHAPES: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"softcap": 2.0, "kv": 4},
    {"head_dim": 20, "kv": 1},
    {"experts": True},
    {"head_dim": 80},
    {"sinks": True},
    {"sinks": True, "window": 5, "head_dim": 20, "kv": 1},
    {"sinks": True, "experts": True, "biases": True},
    {"routing": Routing(3, scoring="sigmoid", num_groups=4, groups_per_token=2, scale=1.5)},
    {"routing": Routing(2, False, "sigmoid", 2), "biases": True},
    {"routing": Routing(1, False, "sigmoid", scales_inputs=True)},
    {"routing": Routing(3, False, "sigmoid", scales_inputs=True, by_logits=True), "chunk": 9},
    {"routing": Routing(2, True, "sigmoid", by_logits=True), "biases": True},
    {"routing": Routing(3, True, "softmax", 2, 1), "biases": True},
    {"routing": Routing(3, False, "softmax", 4, 2, scores_per_group=1)},
    {"routing": Routing(2, False, "sparsemixer", jitter=0.3)},
    {"routing": Routing(3, False, "sparsemixer", jitter=0.0)},
    {"experts": True, "expert_gates": False},
    {"routing": Routing(3, True, "sigmoid", 2, 1), "expert_gates": False},
    {"slopes": (0.5, 0.25, 1.0, 0.0)},
    {"slopes": (2.0, 0.25, 0.5, 0.1), "head_dim": 20, "kv": 1, "sinks": True, "softcap": 2.0},
    {"latent_dim": 32, "head_dim": 40},
    {"latent_dim": 13, "head_dim": 19, "window": 5, "sinks": True},
    {"latent_dim": 64, "head_dim": 80, "softcap": 2.0},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_network_matches_the_reference(library: Library, shape: dict[str, Any]) -> None:
    network = Network(5, **shape)
    slots = np.random.default_rng(2).permutation(80)[:70]
    rows = sequence_rows(np.random.default_rng(1).integers(0, 50, 70), slots)
    expected, states = run_reference(network, rows, network.cache(80))
    output_spec = OutputSpec(ints([0, 3, 69]), {1: ints([5]), 2: ints(np.arange(70))})
    output = network.executor().run(rows, network.cache(80), output_spec)
    assert relative_error(output.logits, expected[[0, 3, 69]]) < 1e-5
    assert relative_error(output.hidden[2], states) < 1e-5
    assert np.isfinite(output.hidden[1]).all()


def test_a_wrong_sink_is_detected(library: Library) -> None:
    network = Network(5, sinks=True)
    rows = sequence_rows(np.arange(40), np.arange(40))
    expected, _ = run_reference(network, rows, network.cache(40))
    assert network.sinks is not None
    network.sinks = network.sinks + np.float32(0.01)
    output = network.executor().run(rows, network.cache(40), all_logits(rows))
    assert relative_error(output.logits, expected) > 1e-5


def test_a_token_reads_only_its_experts(library: Library) -> None:
    """The weights of experts that no row chose are not read: NaN in them changes nothing."""
    network = Network(5, routing=Routing(1))
    rows = sequence_rows([3], [0])
    whole = network.executor(1).run(rows, network.cache(1), all_logits(rows)).logits.copy()
    same = 0
    for expert in range(1, 8):  # expert 0 is part of the shared path
        broken = Network(5, routing=Routing(1))
        for matrices in broken.expert_weights:
            matrices[expert].data[:] = np.nan
        output = broken.executor(1).run(rows, broken.cache(1), all_logits(rows)).logits
        same += np.array_equal(output, whole)
    assert 5 <= same < 7  # two layers choose one expert each


@pytest.mark.parametrize("expert_gates", [True, False])
@pytest.mark.parametrize("n", [1, 8])
def test_the_reads_of_experts_are_counted(library: Library, n: int, expert_gates: bool) -> None:
    """They are the matrices in which NaN changes a state behind the first layer, once each."""
    options = {"experts": True, "expert_gates": expert_gates}
    rows = sequence_rows(np.arange(n), np.arange(n), layers=1)
    output_spec = OutputSpec(ints([]), {1: ints(np.arange(n))})
    network = Network(5, **options)
    executor = network.executor(2)
    whole = executor.run(rows, network.cache(n), output_spec).hidden[1]
    kinds = network.expert_weights if expert_gates else network.expert_weights[1:]
    used = 0
    for expert in range(5):
        broken = Network(5, **options)
        for matrices in broken.expert_weights:
            matrices[expert].data[:] = np.nan
        hidden = broken.executor(2).run(rows, broken.cache(n), output_spec).hidden[1]
        used += not np.array_equal(hidden, whole)
    assert used == 2 if n == 1 else 2 < used <= 5
    size = sum(matrices[0].data.nbytes for matrices in kinds)
    assert executor.take_expert_reads() == ExpertReads(used, used * size, 5 * size)
    assert executor.take_expert_reads() == ExpertReads(0, 0, 0)


def ordered_weight(out: int, width: int, seed: int, has_order: bool) -> Weight:
    """A matrix in Q4_0, which stores its inputs in an order of its own."""
    order = np.random.default_rng(seed).permutation(width).astype(np.int32)
    weight = random_weight("Q4_0", out, width, seed)
    return replace(weight, scale=0.02, order=order if has_order else None)


def ordered_states(
    experts: ExpertWeights, x: np.ndarray, router: Weight, threads: int, library: Library
) -> np.ndarray:
    """The sum of two experts of each row of x."""
    embedding, every = Weight("F32", *x.shape, x), ints(np.arange(len(x)))
    executor = NativeExecutor(
        embedding, len(x), 1,
        lambda b, y, index: b.experts(y, b.linear(y, router), experts, Routing(2), "silu"),
        lambda b, y: b.linear(y, embedding), threads=threads, library=library,
    )  # fmt: skip
    rows = sequence_rows(every, every, layers=1)
    cache = new_cache("float32", len(x), [None])
    return executor.run(rows, cache, OutputSpec(every[:1], {1: every})).hidden[1].copy()


def ordered_sums(experts: ExpertWeights, x: np.ndarray, router: Weight) -> np.ndarray:
    """The same in float64, from the values of blocks and their orders."""

    def times(y: np.ndarray, weight: Weight) -> np.ndarray:
        order = np.arange(weight.in_features) if weight.order is None else weight.order
        scales = weight.data.reshape(weight.out_features, -1, 18)[..., :2].copy().view(np.float16)
        codes = weight.data.reshape(weight.out_features, -1, 18)[..., 2:]
        numbers = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float64) - 8
        stored = (numbers * scales).reshape(weight.out_features, -1)
        return rounded_to_int8(y[None, order]) @ stored.T * weight.scale

    sums = np.zeros((len(x), experts.down[0].out_features))
    for row, y in enumerate(x):
        shares = np.exp(y.astype(np.float64) @ router.data.T.astype(np.float64))
        chosen = np.argsort(-shares)[:2]
        for expert in chosen:
            gate, up = times(y, experts.gate[expert])[0], times(y, experts.up[expert])[0]
            hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            share = shares[expert] / shares[chosen].sum()
            sums[row] += share * times(hidden, experts.down[expert])[0]
    return sums


@pytest.mark.parametrize("has_order", [(1, 1, 1), (1, 0, 1), (0, 1, 0), (0, 0, 1)])
def test_experts_read_inputs_in_the_orders_of_their_matrices(
    library: Library, has_order: tuple[int, ...]
) -> None:
    """Those of gate and up may differ. Rows have the same bits alone and with every variant."""
    sizes, count = ((96, 64), (96, 64), (64, 96)), 6
    experts = ExpertWeights(*(
        [ordered_weight(*size, 100 * kind + expert, bool(has)) for expert in range(count)]
        for kind, (size, has) in enumerate(zip(sizes, has_order, strict=True))
    ))  # fmt: skip
    x = np.random.default_rng(3).standard_normal((9, 64), np.float32)
    router = random_weight("F32", count, 64, 7)
    states = ordered_states(experts, x, router, 2, library)
    assert relative_error(states, ordered_sums(experts, x, router)) < 0.01
    path = built_library()
    assert path is not None
    for variant in ("scalar", *reversed(build.local_variants())):
        other = ordered_states(experts, x, router, 1, Library(path, variant))
        assert np.array_equal(other, states)
    for row in range(len(x)):
        alone = ordered_states(experts, x[row : row + 1].copy(), router, 1, library)
        assert np.array_equal(alone[0], states[row])
    for kind in np.flatnonzero(has_order):
        matrices = experts.matrices[kind * count : (kind + 1) * count]
        for weight in matrices:
            weight.order = np.roll(weight.order, 1)
        wrong = ordered_states(experts, x, router, 2, library)
        assert relative_error(states, wrong) > 0.3
        for weight in matrices:
            weight.order = np.roll(weight.order, -1)


def test_a_single_product_reads_inputs_in_the_order_of_its_matrix(library: Library) -> None:
    """`NativeExecutor.linear`, of one matrix outside a pass."""
    weight, x = ordered_weight(24, 64, 2, True), np.random.default_rng(3).standard_normal((5, 64))
    x = x.astype(np.float32)
    assert weight.order is not None
    expected = product(library, replace(weight, order=None), x[:, weight.order].copy())
    assert np.array_equal(Network(1).executor().linear(x, weight), expected)
    assert not np.array_equal(product(library, replace(weight, order=None), x), expected)


def test_a_wrong_rotation_is_detected(library: Library) -> None:
    network = Network(5)
    rows = sequence_rows(np.arange(40), np.arange(40))
    expected, _ = run_reference(network, rows, network.cache(40))
    network.rope = Rope(network.rope.frequencies * 1.01, 1.1)
    output = network.executor().run(rows, network.cache(40), all_logits(rows))
    assert relative_error(output.logits, expected) > 1e-5


def tree_rows(tokens: Any, prefix: int, slots: Any, holes: Any = ()) -> Rows:
    """Rows of a chain whose slots after `prefix` are listed in tails instead of the table."""
    n, table = len(tokens), ints(slots)
    zeros = ints(np.zeros(n))
    tails = np.concatenate([table[prefix : prefix + i + 1] for i in range(n)])
    lengths = ints(np.arange(1, n + 1))
    visible = table.copy()
    visible[list(holes)] = -1
    return Rows(
        ints(tokens), ints(prefix + np.arange(n)), table[prefix : prefix + n],
        [visible[:prefix]], zeros, zeros + prefix, ints(tails),
        ints(np.cumsum(lengths) - lengths), lengths, zeros, zeros + 2,
    )  # fmt: skip


@few
@given(st.integers(0, 300), st.integers(1, 12), st.booleans(), st.integers(1, 5), st.integers(0, 9))
def test_results_do_not_depend_on_slots_tails_threads_or_other_rows(
    library: Library, prefix: int, n: int, holes: bool, threads: int, seed: int
) -> None:
    window = 40 if seed % 3 else None
    latent = {"latent_dim": 32, "head_dim": 40 if seed % 4 else 64} if seed % 5 > 2 else {}
    heads = {} if latent or seed % 2 else {"heads": 20, "kv": 1}
    network = Network(
        seed, "Q8_0" if seed % 2 else "BF16", window=window, sinks=seed % 4 < 2, **latent, **heads
    )
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 50, prefix + n)
    hidden = [3, 33] if holes and prefix > 33 else []
    results = []
    for together in (True, False):
        slots = random.permutation(320)[: prefix + n]
        format = ("float16", "int8", "int4")[seed % 3]
        cache, executor = network.cache(320, format), network.executor(threads)
        if prefix:
            executor.run(sequence_rows(tokens[:prefix], slots), cache, OutputSpec(ints([])))
        rows = tree_rows(tokens[prefix:], prefix, slots, hidden)
        if together:
            results.append(executor.run(rows, cache, all_logits(rows)).logits.copy())
            continue
        executor = network.executor(1)
        for i in range(n):
            table = ints(slots).copy()
            table[hidden] = -1
            one = sequence_rows(tokens[prefix + i : prefix + i + 1], table, prefix + i)
            one.slots = ints([slots[prefix + i]])
            alone = executor.run(one, cache, all_logits(one)).logits[0]
            assert np.array_equal(alone, results[0][i])


def one_row_of_each(tables: list[np.ndarray], lengths: list[int], tails: list[int]) -> Rows:
    """The last row of several texts, each with a table of its own, whose last `tails[i]` slots are
    in its tail."""
    zeros, ends = ints(np.zeros(len(tables))), ints(lengths)
    starts = ints(np.cumsum(tails)) - ints(tails)
    parts = [table[n - t : n] for table, n, t in zip(tables, lengths, tails, strict=True)]
    return Rows(
        ints(np.arange(len(tables)) % 50), ends - 1, ints([t[n - 1] for t, n in zip(tables, lengths,
        strict=True)]), tables, ints(np.arange(len(tables))), ends - ints(tails),
        ints(np.concatenate(parts)), starts, ints(tails), zeros, zeros + 2,
    )  # fmt: skip


@few
@given(st.integers(0, 200), st.integers(2, 10), st.integers(1, 4), st.integers(0, 9))
def test_results_do_not_depend_on_what_the_tables_of_other_rows_share(
    library: Library, shared: int, n: int, threads: int, seed: int
) -> None:
    network = Network(seed, window=40 if seed % 3 else None, sinks=seed % 4 < 2)
    random = np.random.default_rng(seed)
    cache, executor = network.cache(2000, "float16"), network.executor(threads)
    slots = ints(random.permutation(2000))
    tables = [np.concatenate([slots[:shared], part]) for part in slots[200:].reshape(18, 100)[:n]]
    if n > 3:  # shares more with the third one than with the first
        tables[3][: shared + 20] = tables[2][: shared + 20]
    if shared > 9 and seed % 2:
        tables[1][7] = -1  # a hole, so that it shares less
    lengths = [shared + 1 + int(more) for more in random.integers(0, 90, n)]
    for table, length in zip(tables, lengths, strict=True):
        executor.run(
            sequence_rows(random.integers(0, 50, length), table), cache, OutputSpec(ints([]))
        )
    tails = [int(tail) for tail in random.integers(0, 2, n)]
    rows = one_row_of_each(tables, lengths, tails)
    together = executor.run(rows, cache, all_logits(rows)).logits.copy()
    for i in range(n):
        one = one_row_of_each([tables[i]], [lengths[i]], [0])
        one.tokens[:] = rows.tokens[i]
        alone = network.executor(1).run(one, cache, all_logits(one)).logits[0]
        assert np.array_equal(alone, together[i])


def test_a_slot_of_another_rows_table_is_detected(library: Library) -> None:
    network = Network(1)
    cache, executor = network.cache(200), network.executor()
    first, second = ints(np.arange(60)), ints([*range(50), *range(60, 70)])
    for table in (first, second):
        tokens = np.arange(60) % 50 if table is first else np.arange(60)[::-1] % 50
        executor.run(sequence_rows(tokens, table), cache, OutputSpec(ints([])))
    rows = one_row_of_each([first, second], [60, 60], [0, 0])
    one = executor.run(rows, cache, all_logits(rows)).logits.copy()
    second[55] = first[55]
    other = executor.run(rows, cache, all_logits(rows)).logits
    assert np.array_equal(one[0], other[0]) and not np.array_equal(one[1], other[1])


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize(
    "shape",
    [{}, {"head_dim": 20, "kv": 1}, {"head_dim": 72, "kv": 1, "sinks": True}, {"kv": 4},
     {"latent_dim": 40, "head_dim": 56, "window": 30}],
)  # fmt: skip
def test_every_variant_attends_with_the_same_bits(
    library: Library, shape: dict[str, Any], format: str
) -> None:
    path = built_library()
    assert path is not None
    network, found = Network(3, **shape), {}
    tokens, slots = np.random.default_rng(3).integers(0, 50, 47), np.arange(47)
    parts = [sequence_rows(tokens[:45], slots), sequence_rows(tokens[45:], slots, 45)]
    try:
        for variant in ("scalar", *build.local_variants()):
            executor = network.executor(library=Library(path, variant))
            cache = network.cache(64, format)
            logits = [executor.run(rows, cache, all_logits(rows)).logits.copy() for rows in parts]
            found[variant] = np.concatenate(logits).view(np.uint32)
    finally:
        Library(path)  # the variant is that of the process
    assert all(np.array_equal(found["scalar"], other) for other in found.values())


@pytest.mark.parametrize("format", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": 3, "kv": 1}, {"heads": 24, "kv": 1, "window": 40}, {"heads": 12, "softcap": 2.0},
     {"heads": 10, "slopes": tuple(np.linspace(-1, 1, 10))}],
)  # fmt: skip
def test_rows_together_attend_as_one_row_does(
    library: Library, shape: dict[str, Any], format: str
) -> None:
    """One row converts keys and values as they are loaded; many rows read those that were converted
    before, and with many heads the lanes of a vector are heads. Those of an int8 cache are arranged
    once for all rows of a tile, or for a row with a tail."""
    network = Network(7, **{"head_dim": 64, **shape})
    cache, executor = network.cache(128, format), network.executor()
    tokens, slots = np.random.default_rng(7).integers(0, 50, 77), ints(np.arange(77))
    executor.run(sequence_rows(tokens, slots), cache, OutputSpec(ints([])))
    alone = []
    for i in range(60, 77):
        one = sequence_rows(tokens[i : i + 1], slots, i)
        alone.append(executor.run(one, cache, all_logits(one)).logits[0].copy())
    for first in (60, 61, 68, 72, 74, 75):
        rows = sequence_rows(tokens[first:], slots, first)
        together = executor.run(rows, cache, all_logits(rows)).logits
        assert np.array_equal(together, alone[first - 60 :])
    for prefix in (40, 61, 64):
        rows = tree_rows(tokens[prefix:], prefix, slots)
        together = executor.run(rows, cache, all_logits(rows)).logits
        assert np.array_equal(together[max(60 - prefix, 0) :], alone[max(prefix - 60, 0) :])


def test_an_extra_visible_position_is_detected(library: Library) -> None:
    network = Network(1)
    rows = sequence_rows(np.arange(12), np.arange(12))
    one = network.executor().run(rows, network.cache(12), all_logits(rows)).logits.copy()
    rows.prefix[5] += 1
    other = network.executor().run(rows, network.cache(12), all_logits(rows)).logits
    changed = np.flatnonzero((one != other).any(-1)).tolist()
    assert changed[0] == 5


def _by_head(stored: np.ndarray) -> np.ndarray:
    """The same slots, with each key head contiguous in memory."""
    return np.ascontiguousarray(stored.swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80])
def test_caches_hold_the_encoded_keys_and_values(
    library: Library, format: str, head_dim: int
) -> None:
    network = Network(7, head_dim=head_dim)
    executor, slots = network.executor(), np.random.default_rng(head_dim).permutation(60)[:50]
    rows = sequence_rows(np.arange(50) % 50, slots)
    exact, packed = network.cache(60), network.cache(60, format)
    executor.run(rows, exact, OutputSpec(ints([])))
    executor.run(rows, packed, OutputSpec(ints([])))
    for plain, stored in ((exact.keys[0], packed.keys[0]), (exact.values[0], packed.values[0])):
        encoded = encode(format, plain[slots])
        assert np.array_equal(stored[slots].view(np.uint8), encoded.view(np.uint8))
    # A row that stores nothing gets the same result from a float32 cache with the decoded values,
    # except that queries are rounded for int8.
    reading = sequence_rows([3], slots[:40], 39)
    reading.slots[:], reading.prefix[:] = -1, 37
    unpacked = KeyValues(
        [_by_head(decode(format, keys, head_dim)) for keys in packed.keys],
        [_by_head(decode(format, values, head_dim)) for values in packed.values],
    )
    packed_logits = executor.run(reading, packed, all_logits(reading)).logits.copy()
    same = relative_error(
        executor.run(reading, unpacked, all_logits(reading)).logits, packed_logits
    )
    assert same < 0.03 if format == "int8" else same == 0
    other = relative_error(executor.run(reading, exact, all_logits(reading)).logits, packed_logits)
    assert (other == 0) == (format == "float32")
    assert other < 0.3


def in_int8(x: np.ndarray) -> np.ndarray:
    """Vectors as an int8 cache has them: scales in float16, the last block filled with zeros."""
    blocks = np.pad(x, [(0, 0), (0, -x.shape[-1] % 32)]).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127.0) / largest)).astype(np.float64)
    scales = (largest / np.float32(127.0)).astype(np.float16).astype(np.float64)
    return (codes * scales).reshape(len(x), -1)[:, : x.shape[-1]]


@pytest.mark.parametrize(
    "shape",
    [
        Attention(2, 1, 64, 0.5),
        Attention(40, 1, 20, 0.7, window=150),
        Attention(3, 1, 80, 0.3, value_size=40),
        Attention(20, 1, 64, 0.5, softcap=3.0, chunk=200),
        Attention(6, 1, 72, 0.2, latent_dim=40),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_over_an_int8_cache_rounds_queries_as_keys(
    library: Library, shape: Attention, threads: int
) -> None:
    """And is exact otherwise, but for weights of 15 bits: it matches float64, where attention with
    queries that are not rounded does not. Several segments, in passes of many rows and of one."""
    heads, size, count = shape.num_heads, shape.head_dim, 300
    width = heads * size + size + shape.value_dim
    embedding = small_weight(count, width, 1)
    embedding.data[:] *= width**0.5

    def layer(b: Any, x: Any, index: int) -> Any:
        q, k = b.columns(x, 0, heads * size), b.columns(x, heads * size, size)
        v = None if shape.latent_dim else b.columns(x, (heads + 1) * size, shape.value_dim)
        z = b.attention(q, k, v, index, shape)
        return b.join(z, b.columns(x, 0, width - heads * shape.value_dim))

    executor = NativeExecutor(
        embedding, count, 1, layer, lambda b, x: b.linear(x, embedding), threads=threads
    )
    cache, slots = new_cache("int8", count, [shape]), np.arange(count)
    found = []
    for first, last in ((0, 100), (100, 101), (101, 290), *((i, i + 1) for i in range(290, 300))):
        rows = sequence_rows(slots[first:last], slots, first, layers=1)
        every = ints(np.arange(last - first))
        output = executor.run(rows, cache, OutputSpec(every[:1], {1: every}))
        found.append(output.hidden[1][:, : heads * shape.value_dim].copy())
    q, k = np.split(embedding.data[:, : (heads + 1) * size], [heads * size], 1)
    keys = in_int8(k)
    values = keys if shape.latent_dim else in_int8(embedding.data[:, (heads + 1) * size :])
    values = values[:, : shape.value_dim]
    distance = slots[:, None] - slots
    hidden = distance < 0
    if shape.window:
        hidden |= distance >= shape.window
    if shape.chunk:
        hidden |= slots < (slots // shape.chunk * shape.chunk)[:, None]

    def expected(queries: np.ndarray) -> np.ndarray:
        scores = queries @ keys.T * shape.scale
        if shape.softcap:
            scores = np.tanh(scores / shape.softcap) * shape.softcap
        scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result: np.ndarray = weights / weights.sum(-1, keepdims=True) @ values
        return result.reshape(count, -1)

    padded = np.pad(q.reshape(-1, size), [(0, 0), (0, -size % 32)])
    rounded = rounded_to_int8(padded)[:, :size].reshape(count, heads, size)
    result = np.concatenate(found)
    assert relative_error(result, expected(rounded)) < 3e-4
    exact = q.reshape(count, heads, size).astype(np.float64)
    assert relative_error(result, expected(exact)) > 1e-3


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_reference_reads_packed_caches_too(library: Library, format: str) -> None:
    network = Network(5, head_dim=32, sinks=True)
    rows = sequence_rows(np.random.default_rng(1).integers(0, 50, 70), np.arange(70))
    expected, _ = run_reference(network, rows, network.cache(80, format))
    output = network.executor().run(rows, network.cache(80, format), all_logits(rows))
    assert relative_error(output.logits, expected) < 5e-3  # a code may round the other way
    exact, _ = run_reference(network, rows, network.cache(80))
    assert relative_error(exact, expected) > 5e-3 or format == "int8"


def test_convolutions_within_blocks_match_their_formula(library: Library) -> None:
    """Alone and beside other blocks, on several threads; the torch reference too. A block begins
    with another token than the mask's."""
    width, groups, taps, mask = 40, 5, 3, 19
    random = np.random.default_rng(1)
    base = random.standard_normal((taps, width), np.float32)
    projection = small_weight(taps * groups, width, 1)
    embedding = small_weight(20, width, 2)

    def layer(b: Any, x: Any, index: int) -> Any:
        return b.block_convolution(x, b.linear(x, projection), base, mask)

    executor = NativeExecutor(
        embedding, 20, 1, layer, lambda b, x: b.linear(x, embedding), width=width, threads=2
    )
    tokens = np.array([3, mask, mask, mask, 4, mask, 5, 6, mask, mask, mask, mask])
    rows = sequence_rows(tokens, np.arange(12), layers=1)
    cache, every = new_cache("float32", 12, [None]), ints(np.arange(12))
    found = executor.run(rows, cache, OutputSpec(every, {1: every})).hidden[1]
    x = embedding.data[tokens].astype(np.float64)
    kernels = (x @ projection.data.T.astype(np.float64)).reshape(12, taps, groups)
    kernels = kernels.repeat(width // groups, -1) + base
    starts = [max(i for i in range(row + 1) if tokens[i] != mask) for row in range(12)]
    expected = [
        sum(kernels[row, t] * x[row - t] for t in range(taps) if row - t >= starts[row])
        for row in range(12)
    ]
    assert relative_error(found, np.array(expected)) < 1e-5
    alone = executor.run(
        sequence_rows(tokens[6:], np.arange(12), layers=1),
        cache,
        OutputSpec(ints(np.arange(6)), {1: ints(np.arange(6))}),
    )
    assert np.array_equal(alone.hidden[1], found[6:])
    pytest.importorskip("torch")
    from anydecode.kernels.reference import ReferenceBackend
    from anydecode.kernels.torch_arrays import as_numpy, as_tensor

    backend = ReferenceBackend()
    backend.bind(rows, np.arange(12), cache)
    same = as_numpy(layer(backend, as_tensor(embedding.data[tokens]), 0))
    assert relative_error(found, same) < 1e-5


@pytest.mark.parametrize("width", [7, 16, 40])
def test_operations_of_streams_match_the_reference(library: Library, width: int) -> None:
    """And those of rows, on widths with and without a rest."""
    pytest.importorskip("torch")
    from anydecode.kernels.reference import ReferenceBackend
    from anydecode.kernels.torch_arrays import as_numpy, as_tensor

    groups, random = 3, np.random.default_rng(width)
    factors = random.standard_normal(width, np.float32)
    constants = random.standard_normal(groups, np.float32)
    coefficients = small_weight(groups * groups, width, 1)
    rows_of = small_weight(groups, width, 2)
    embedding = small_weight(20, width, 3)

    def layer(b: Any, x: Any, index: int) -> Any:
        first = b.columns(x, 0, width)
        x = b.add(x, b.spread(first, b.linear(first, rows_of), groups))
        x = b.mix(x, b.linear(first, coefficients), groups)
        y = b.cut_off(b.multiply(b.columns(x, width, width), factors), 0.3)
        y = b.match_magnitude(b.clamp(b.columns(x, 2 * width, width), 0.5), y)
        return b.add(x, b.spread(y, constants, groups))

    executor = NativeExecutor(
        embedding, 20, 1, layer, lambda b, x: b.linear(b.columns(x, 0, width), embedding),
        width=groups * width, threads=2,
    )  # fmt: skip
    rows = sequence_rows(np.arange(9), np.arange(9), layers=1)
    cache = new_cache("float32", 9, [None])
    every = ints(np.arange(9))
    output = executor.run(rows, cache, OutputSpec(every, {0: every, 1: every}))
    embedded = np.zeros((9, groups * width), np.float32)
    embedded[:, :width] = embedding.data[:9]
    assert np.array_equal(output.hidden[0], embedded)
    assert np.array_equal(executor.embed(rows.tokens), embedding.data[:9])
    expected = as_numpy(layer(ReferenceBackend(), as_tensor(embedded), 0))
    assert relative_error(output.hidden[1], expected) < 1e-5
    alone = sequence_rows([4], np.arange(9), layers=1)
    one = executor.run(alone, cache, OutputSpec(ints([0]), {1: ints([0])}))
    assert np.array_equal(one.hidden[1][0], output.hidden[1][4])


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_a_latent_is_stored_once(library: Library, format: str) -> None:
    """And read as keys and values, in every format."""
    network = Network(5, latent_dim=32, head_dim=48)
    cache, rows = network.cache(80, format), sequence_rows(np.arange(50), np.arange(50))
    assert [keys.shape[:2] for keys in cache.keys] == [(80, 1)] * 2
    assert [values.size for values in cache.values] == [0, 0]
    expected, _ = run_reference(network, rows, network.cache(80, format))
    output = network.executor().run(rows, cache, all_logits(rows))
    margin = 1e-5 if format == "float32" else 5e-3  # a number may round the other way
    assert relative_error(output.logits, expected) < margin


def test_packed_caches_are_small() -> None:
    shapes = [Attention(9, 3, 64, 0.125)] * 30
    sizes = {name: bytes_per_position(new_cache(name, 4, shapes)) for name in CACHE_FORMATS}
    assert sizes["float16"] == sizes["bfloat16"] == 23040
    assert sizes == sizes | {"float32": 46080, "int8": 12240, "int4": 7200}


def test_an_unknown_cache_format_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="int7"):
        new_cache("int7", 4, [Attention(2, 1, 16, 1.0)])


def test_layer_ranges_compose(library: Library) -> None:
    network = Network(3, "Q8_0")
    rows = sequence_rows(np.arange(9), np.arange(9))
    executor = network.executor()
    whole = executor.run(rows, network.cache(9), OutputSpec(ints([0, 8]), {1: ints(np.arange(9))}))
    logits, states = whole.logits.copy(), whole.hidden[1]
    cache = network.cache(9)
    executor.begin(rows, cache)
    x = executor.layers(executor.embed(rows.tokens), np.arange(9), 0, 1)
    assert np.array_equal(x, states)
    x = executor.layers(x, np.arange(9), 1, 2)
    assert np.array_equal(executor.head(x[[0, 8]]), logits)
    rows.stop[:] = 1
    first = executor.run(rows, network.cache(9), OutputSpec(ints([]), {1: ints(np.arange(9))}))
    rows.tokens, rows.inputs = rows.tokens * 0 - 1, first.hidden[1]
    rows.start[:], rows.stop[:] = 1, 2
    rows.stop[3] = 1
    rest = executor.run(rows, cache, OutputSpec(ints([2, 3])))
    assert np.array_equal(rest.logits[0], executor.head(x[[2]])[0])


def test_calls_between_the_parts_of_a_pass_change_nothing(library: Library) -> None:
    """Nor does a pass before it, with other slots for as many rows."""
    network, every = Network(3, "Q8_0"), np.arange(9)
    executor, tables = network.executor(), (every, every[::-1].copy())
    rows, whole = sequence_rows(every, every), network.cache(9)
    logits = executor.run(rows, whole, OutputSpec(ints([0, 8]))).logits.copy()
    for table in tables:
        cache = network.cache(9)
        executor.begin(sequence_rows(every, table), cache)
        x = executor.layers(executor.embed(rows.tokens), every, 0, 1)
        executor.head(x[[4]])
        executor.embed(ints([1, 2]))
        y = executor.layers(x, every, 1, 2)
        assert np.array_equal(executor.layers(x[[3]], np.array([3]), 1, 2), y[[3]])
        assert np.array_equal(executor.layers(x, every, 1, 2), y)
        assert np.array_equal(executor.head(y[[0, 8]]), logits)
        for layer in range(2):
            assert np.array_equal(cache.keys[layer][table], whole.keys[layer])


def delta(name: str, out: int, width: int, seed: int) -> tuple[str, LowRank]:
    return name, LowRank(small_weight(3, width, seed), small_weight(out, 3, seed + 1), 0.8)


def test_adapters_match_the_reference(library: Library) -> None:
    network = Network(4)
    adapters = [
        dict([delta("0.q", 64, 64, 1), delta("1.down", 64, 96, 2)]),
        dict([delta("0.q", 64, 64, 5), delta("1.o", 64, 64, 6)]),
    ]
    rows = sequence_rows(np.arange(6), np.arange(6))
    executor = network.executor(adapters=adapters)
    plain = executor.run(rows, network.cache(6), all_logits(rows)).logits.copy()
    rows.adapters = ints([-1, 0, 1, 0, -1, 1])
    output = executor.run(rows, network.cache(6), all_logits(rows)).logits.copy()
    expected, _ = run_reference(network, rows, network.cache(6), adapters)
    assert relative_error(output, expected) < 1e-5
    assert np.array_equal(output[0], plain[0])
    assert not np.array_equal(output[1], plain[1])


def expert_adapters() -> list[dict[str, LowRank]]:
    """An adapter of all matrices of some experts, and one that shares a few targets with it."""
    sizes = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    first = [
        delta(f"{n}.{e}", *size, 20 * e + 3 * i)
        for e in (0, 1, 4)
        for i, (n, size) in enumerate(sizes.items())
    ]
    second = [delta(f"down.{e}", 64, 96, 100 + 2 * e) for e in range(5)]
    return [dict(first), dict([*second, delta("up.3", 96, 64, 120), delta("0.q", 64, 64, 130)])]


@pytest.mark.parametrize("expert_gates", [True, False])
def test_adapters_of_experts_match_the_reference(library: Library, expert_gates: bool) -> None:
    """Rows without an adapter do not change, and each row has the same bits alone."""
    network, adapters = Network(4, experts=True, expert_gates=expert_gates), expert_adapters()
    rows = sequence_rows(np.arange(12), np.arange(12))
    executor = network.executor(adapters=adapters)
    plain = executor.run(rows, network.cache(12), all_logits(rows)).logits.copy()
    rows.adapters = ints([-1, *[0, 1, 1, 0, -1] * 2, 0])
    cache = network.cache(12)
    output = executor.run(rows, cache, all_logits(rows)).logits.copy()
    expected, _ = run_reference(network, rows, network.cache(12), adapters)
    assert relative_error(output, expected) < 1e-5
    assert np.array_equal(output[0], plain[0])
    assert all(not np.array_equal(output[r], plain[r]) for r in range(1, 12))
    for row in range(12):
        alone = sequence_rows([row], np.arange(12), row)
        alone.adapters = rows.adapters[row : row + 1]
        again = network.executor(1, adapters=adapters).run(alone, cache, all_logits(alone))
        assert np.array_equal(again.logits[0], output[row])


@pytest.mark.parametrize("one, other", [("gate.1", "up.1"), ("up.0", "up.4"), ("down.1", "down.4")])
def test_an_adapter_of_another_expert_is_detected(library: Library, one: str, other: str) -> None:
    network, adapters = Network(4, experts=True), expert_adapters()
    rows = sequence_rows(np.arange(12), np.arange(12))
    rows.adapters = ints([0] * 12)
    expected, _ = run_reference(network, rows, network.cache(12), adapters)
    adapters[0][one], adapters[0][other] = adapters[0][other], adapters[0][one]
    output = network.executor(adapters=adapters).run(rows, network.cache(12), all_logits(rows))
    assert relative_error(output.logits, expected) > 1e-4


def test_inputs_out_of_range_are_rejected(library: Library) -> None:
    executor = Network(4).executor()
    for name, value in (("tokens", 50), ("slots", 9), ("table", 1), ("prefix", 10)):
        rows = sequence_rows(np.arange(9), np.arange(9))
        getattr(rows, name)[4] = value
        with pytest.raises(InvalidRequestError):
            executor.run(rows, Network(4).cache(9), all_logits(rows))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_process_starts_its_own_threads(library: Library) -> None:
    network = Network(4)
    rows = sequence_rows(np.arange(9), np.arange(9))
    executor = network.executor(2)
    before = executor.run(rows, network.cache(9), all_logits(rows)).logits.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        after = executor.run(rows, network.cache(9), all_logits(rows)).logits
        os._exit(0 if np.array_equal(after, before) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_two_teams_of_threads_compute_what_one_thread_does(library: Library) -> None:
    network = Network(4)
    rows = sequence_rows(np.arange(9), np.arange(9))
    expected = network.executor(1).run(rows, network.cache(9), all_logits(rows)).logits.copy()
    main = network.executor(4)
    executors = [main.beside(team) for team in (0, 1, 1)]

    def differences(executor: NativeExecutor | None, threads: int) -> int:
        assert executor is not None
        executor.threads_in_use, cache = threads, network.cache(9)
        outputs = (executor.run(rows, cache, all_logits(rows)).logits for _ in range(50))
        return sum(not np.array_equal(output, expected) for output in outputs)

    with ThreadPoolExecutor(len(executors)) as pool:
        assert list(pool.map(differences, executors, (3, 2, 4))) == [0, 0, 0]


# --- sampling


def philox(seed: int, counter: list[int]) -> list[int]:
    key, mask = [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1], a & mask,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def test_philox_matches_the_published_vector() -> None:
    """The known answer of Random123 for a counter and key of zeros."""
    assert philox(0, [0, 0, 0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 300), st.floats(0.01, 20), st.integers(0, 2**64 - 1), st.integers(0, 99),
    st.sampled_from([0.1, 3.0, 12.0]),
)  # fmt: skip
def test_gumbel_samples_equal_the_argmax_of_all_scores(
    library: Library, n: int, inverse: float, seed: int, position: int, spread: float
) -> None:
    random = np.random.default_rng(n)
    logits = (random.standard_normal(n) * spread).astype(np.float32)
    words = [philox(seed, [t >> 2, position, 7, 2])[t & 3] for t in range(n)]
    noise = -np.log(-np.log((np.array(words, np.float64) + 0.5) * 2.0**-32))
    expected = int(np.argmax(logits.astype(np.float64) * inverse + noise))
    assert sample_gumbel(logits, inverse, seed, 7, position, 2) == expected


@few
@given(st.integers(1, 3000), st.integers(0, 99))
def test_argmax_and_logsumexp(library: Library, n: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-9, 9, n).astype(np.float32)
    assert argmax(logits) == int(np.argmax(logits))
    expected = float(np.logaddexp.reduce(logits.astype(np.float64)))
    assert abs(logsumexp(logits) - expected) < 1e-5


@few
@given(st.integers(1, 4), st.integers(1, 3000), st.integers(1, 40), st.integers(0, 99))
def test_top_k_equals_a_stable_sort(
    library: Library, rows: int, n: int, count: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(-9, 9 + 999 * (seed % 2), (rows, n)).astype(np.float32)
    logits[random.random((rows, n)) < 0.1] = -np.inf
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    ids, values = top_k(logits, count)
    assert np.array_equal(ids, order)
    assert np.array_equal(values, np.take_along_axis(logits, order, axis=1))


def sample_in_pass(
    network: Network, threads: int, temperature: float, shift: int = 0
) -> tuple[list[int], list[int]]:
    """The tokens that a pass samples for its rows, and the argmax of all scores.

    `shift` is added to the position of the noise.
    """
    rows, noise = sequence_rows(np.arange(9), np.arange(9)), Noise(2**64 - 5, 7)
    inverse = 1 / temperature if temperature else 0.0
    samples = [
        SampleSpec(row, inverse, noise.seed, noise.stream, row + 1 + shift)
        for row in range(8, -1, -1)
    ]
    output_spec = OutputSpec(ints(np.arange(9)), {}, samples)
    output = network.executor(threads).run(rows, network.cache(9), output_spec)
    scores = output.logits.astype(np.float64)
    if temperature:
        scores = scores * inverse + [
            noise.gumbel(range(network.vocab), row + 1) for row in range(9)
        ]
    return output.sampled[::-1], scores.argmax(axis=1).tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.8, 9.0])
@pytest.mark.parametrize("vocab", [50, 9001, 20000])
def test_tokens_sampled_in_a_pass_equal_the_argmax_of_all_scores(
    library: Library, vocab: int, temperature: float, threads: int
) -> None:
    sampled, expected = sample_in_pass(Network(4, vocab=vocab), threads, temperature)
    assert sampled == expected


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
@pytest.mark.parametrize("vocab", [50, 9001])
def test_the_best_token_may_stand_anywhere(
    library: Library, vocab: int, temperature: float, threads: int
) -> None:
    """At the end of the vocabulary, and around the ends of the parts that threads search."""
    edges = {vocab * part // threads & ~15 for part in range(1, threads)} | {vocab, vocab & ~15}
    tokens = {edge + offset for edge in edges for offset in (-1, 0)}
    for token in tokens - {*range(9), -1, vocab}:  # the inputs are tokens up to 8
        network = Network(4, vocab=vocab)
        best = sample_in_pass(network, 1, temperature)[1][-1]
        rows = network.embedding.data
        rows[[best, token]] = rows[[token, best]]
        sampled, expected = sample_in_pass(network, threads, temperature)
        assert sampled == expected and expected[-1] == token


def test_noise_of_another_position_gives_other_samples(library: Library) -> None:
    sampled, expected = sample_in_pass(Network(4, vocab=9001), 2, 0.8, shift=1)
    assert sampled != expected


def test_ties_go_to_the_lowest_id_across_parts(library: Library) -> None:
    network = Network(4, vocab=20000)
    network.embedding.data.fill(0)
    assert sample_in_pass(network, 3, 0.0)[0] == [0] * 9


def run_multi_step(
    network: Network,
    temperature: float,
    count: int,
    end_tokens: frozenset[int] = frozenset(),
    shift: int = 0,
) -> tuple[list[int], list[int], bool]:
    """The tokens of one multi-step call after nine tokens, those of one call per token, and whether
    the last logits are bit-equal. The single calls stop at the end tokens here.
    """
    executor, noise = network.executor(2), Noise(2**64 - 5, 7)
    inverse = 1 / temperature if temperature else 0.0

    def run(rows: Rows, cache: KeyValues, position: int, num_steps: int) -> Output:
        noise_position = position + 1 + shift * (num_steps > 1)
        sample = SampleSpec(0, inverse, noise.seed, noise.stream, noise_position)
        limits = [num_steps] if num_steps > 1 else []
        output_spec = OutputSpec(ints([len(rows) - 1]), {}, [sample], limits, end_tokens)
        return executor.run(rows, cache, output_spec)

    slots = np.random.default_rng(3).permutation(9 + count).astype(np.int32)
    rows = sequence_rows(np.arange(9), slots)
    together = run(rows, network.cache(9 + count), 8, count)
    logits = together.logits.copy()
    cache = network.cache(9 + count)
    output = run(rows, cache, 8, 1)
    alone = list(output.sampled)
    while len(alone) < count and alone[-1] not in end_tokens:
        position = 8 + len(alone)
        output = run(sequence_rows(alone[-1:], slots, position), cache, position, 1)
        alone += output.sampled
    return together.steps[0], alone, np.array_equal(output.logits, logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_multi_step_call_equals_single_steps(
    library: Library, count: int, sinks: bool, temperature: float
) -> None:
    network = Network(4, vocab=9001, sinks=sinks)
    together, alone, same = run_multi_step(network, temperature, count)
    assert together == alone and len(alone) == count and same
    end_tokens = frozenset({alone[1], 9000})
    together, alone, same = run_multi_step(network, temperature, count, end_tokens)
    assert together == alone and len(alone) == 2 and same


def run_together(
    network: Network,
    temperature: float,
    count: int,
    end_tokens: frozenset[int] = frozenset(),
    interrupted: bool = False,
    min_probability: float | None = None,
    limits: Sequence[int] = (),
) -> tuple[Output, list[list[int]]]:
    """A multi-step call with three sequences of 9, 1 and 30 tokens, of which the last rows are
    sampled, and `count` tokens of each alone, one call per token. `limits` are those of the call,
    by default `count` for each."""
    lengths = (9, 1, 30)
    inverse = 1 / temperature if temperature else 0.0
    order = np.random.default_rng(3).permutation(sum(lengths) + 3 * count).astype(np.int32)
    tables, first = [], 0
    for length in lengths:
        tables.append(order[first : first + length + count])
        first += length + count

    def parts(starts: Sequence[int], tokens: Sequence[Sequence[int]]) -> Rows:
        each = [
            sequence_rows(t, tab, at) for t, tab, at in zip(tokens, tables, starts, strict=True)
        ]
        joined = {
            name: np.concatenate([getattr(one, name) for one in each])
            for name in ("tokens", "positions", "slots", "prefix", "start", "stop")
        }
        joined["table"] = np.repeat(np.arange(3), [len(t) for t in tokens]).astype(np.int32)
        zeros = np.zeros(len(joined["tokens"]), np.int32)
        joined |= {"tables": tables, "tails": each[0].tails}
        return replace(each[0], **joined, tail_start=zeros, tail_length=zeros)

    def samples(position_of: Sequence[int], rows: Sequence[int]) -> list[SampleSpec]:
        return [
            SampleSpec(row, inverse, 5, number, position + 1)
            for number, (row, position) in enumerate(zip(rows, position_of, strict=True))
        ]

    texts = [list(range(length)) for length in lengths]
    last = ints(np.cumsum(lengths) - 1)
    ends = [length - 1 for length in lengths]
    spec = OutputSpec(last, {}, samples(ends, range(3)), [*limits] or [count] * 3, end_tokens)
    spec.interrupt = np.array([1], np.int32) if interrupted else None
    if min_probability is not None:
        spec.min_probabilities = [min_probability] * 3
    together = network.executor(2).run(parts([0, 0, 0], texts), network.cache(len(order)), spec)
    together = replace(together, logits=together.logits.copy())
    alone: list[list[int]] = []
    for number, text in enumerate(texts):
        executor, cache = network.executor(2), network.cache(len(order))
        tokens, inputs, at = [], text, 0
        while len(tokens) < count:
            rows = sequence_rows(inputs, tables[number], at)
            position = at + len(inputs) - 1
            one = SampleSpec(0, inverse, 5, number, position + 1)
            output = executor.run(rows, cache, OutputSpec(ints([len(inputs) - 1]), {}, [one]))
            tokens += output.sampled
            inputs, at = tokens[-1:], position + 1
            if min_probability is None and len(tokens) == len(together.steps[number]):
                assert np.array_equal(output.logits[0], together.logits[number])
        alone.append(tokens)
    return together, alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [2, 7])
def test_a_multi_step_call_with_several_sequences_equals_single_steps(
    library: Library, count: int, temperature: float
) -> None:
    network = Network(4, vocab=9001)
    together, alone = run_together(network, temperature, count)
    assert together.steps == alone and together.num_passes == count
    end = alone[1][1]
    together, alone = run_together(network, temperature, count, frozenset({end}))
    first = min(tokens.index(end) for tokens in alone if end in tokens)
    assert together.steps == [tokens[: first + 1] for tokens in alone]
    together, alone = run_together(network, temperature, count, interrupted=True)
    assert together.steps == [tokens[:1] for tokens in alone] and together.num_passes == 1
    assert together.sampled == [tokens[0] for tokens in alone] and not together.step_probabilities


def test_texts_end_where_one_of_them_has_its_tokens_and_drafts_one_by_one(library: Library) -> None:
    network, limits = Network(4, vocab=50), [5, 2, 4]
    together, alone = run_together(network, 0.8, 5, limits=limits)
    assert together.steps == [tokens[:2] for tokens in alone] and together.num_passes == 2
    together, alone = run_together(network, 0.8, 5, min_probability=0.0, limits=limits)
    assert together.steps == [tokens[:n] for tokens, n in zip(alone, limits, strict=True)]
    assert [len(one) for one in together.step_probabilities] == limits and together.num_passes == 5


def test_each_of_several_drafts_ends_with_its_first_improbable_token(library: Library) -> None:
    network = Network(4, vocab=50)
    together, alone = run_together(network, 0.8, 7, min_probability=0.0)
    assert together.steps == alone
    assert [len(one) for one in together.step_probabilities] == [7, 7, 7]
    paths = np.cumprod(together.step_probabilities, axis=1)
    bound = float(paths.min(0)[2] * 1.0001)
    together, _ = run_together(network, 0.8, 7, min_probability=bound)
    expected = [1 + int((path < bound).argmax()) if path[-1] < bound else 7 for path in paths]
    assert [len(one) for one in together.steps] == expected and len(set(expected)) > 1
    assert together.steps == [tokens[:n] for tokens, n in zip(alone, expected, strict=True)]
    assert together.num_passes == max(expected)


def test_noise_of_other_positions_gives_other_multi_step_tokens(library: Library) -> None:
    together, alone, same = run_multi_step(Network(4, vocab=9001), 0.8, 8, shift=1)
    assert together != alone and not same


def test_more_steps_than_the_table_holds_are_rejected(library: Library) -> None:
    network = Network(4, vocab=50)
    rows = sequence_rows(np.arange(9), np.arange(9))
    output_spec = OutputSpec(ints([8]), {}, [SampleSpec(0)], [2])
    executor = network.executor(2)
    with pytest.raises(InvalidRequestError, match="too short"):
        executor.run(rows, network.cache(9), output_spec)
    assert executor.run(rows, network.cache(9), all_logits(rows)).sampled == []


# --- the build and the start-up check


@pytest.mark.slow
def test_a_wrong_kernel_is_detected_at_start(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs a C compiler and an x86-64 processor")
    sources = shutil.copytree(build.SOURCES, tmp_path / "cpu")
    right = "_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, a))"
    wrong = right.replace("add", "sub", 1)
    header = sources / "simd_avx2.h"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    flags = "-std=gnu11 -O1 -fPIC -ffp-contract=off".split()
    path = build.compile_library(
        tmp_path / "lib.so", compiler, sources, flags=flags, variants=["avx2"]
    )
    wrong_kernels = pytest.warns(UserWarning, match="avx2 kernels give wrong")
    with pytest.raises(InvalidRequestError, match="ANYDECODE_VARIANT is 'avx2'"), wrong_kernels:
        Library(path, "avx2")
    other = Library(path, "scalar")
    assert other.variant == "scalar"
    own = load_library()
    assert own is not None and own.build != other.build == Library(path, "scalar").build


def test_an_unknown_variant_is_refused_with_those_of_the_machine() -> None:
    path = built_library()
    if path is None:
        pytest.skip("needs a C compiler")
    with pytest.raises(InvalidRequestError, match="is 'avx3'.* allowed are .*scalar") as caught:
        Library(path, "avx3")
    assert "\n" not in str(caught.value)


def test_a_compiler_error_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="false"):
        build.compile_library(tmp_path / "lib.so", ["false"])
    assert list(tmp_path.iterdir()) == []


_PROGRAM = """
#include <stdio.h>
const char *anydecode_choose(const char *name, const char **failed);
int main(int count, char **words) {
  const char *failed, *name = anydecode_choose(count > 1 ? words[1] : 0, &failed);
  printf("%s %s\\n", name ? name : "none", failed ? failed : "-");
  return 0;
}
"""


@pytest.mark.slow
def test_neon_agrees_with_plain_c_under_emulation(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user (Debian)")
    (tmp_path / "main.c").write_text(_PROGRAM)
    flags = "-std=gnu11 -O1 -fPIC -ffp-contract=off".split()
    library = build.compile_library(
        tmp_path / "libneon.so", [compiler], machine="aarch64", flags=flags
    )
    program = tmp_path / "main"
    subprocess.run(
        [compiler, str(tmp_path / "main.c"), str(library), "-o", str(program), "-lm", "-pthread",
         f"-Wl,-rpath,{tmp_path}"], check=True,
    )  # fmt: skip
    for name in ("neon_dot", "neon"):
        command = [emulator, "-L", "/usr/aarch64-linux-gnu", str(program), name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == f"{name} -\n"
