"""Digests of logits and tokens that are the same on every machine and with every compiler.

PYTHONPATH=src:tests python tests/portable_bits.py [LIBRARY]
prints them for the kernels of this machine, or of another library; ANYDECODE_VARIANT names a
variant.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from anydecode import LLM
from anydecode.kernels import formats
from anydecode.kernels import library as library_module
from anydecode.kernels.cache import new_cache
from anydecode.kernels.interface import FORMATS, Backend, OutputSpec, Rope, Weight
from anydecode.kernels.library import argmax, load_library, logsumexp, sample_gumbel, top_k
from anydecode.kernels.native import NativeExecutor
from anydecode.kernels.packing import Packer
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.opening import choose_executor
from rwkv_models import rwkv_checkpoint
from tiny_models import LATENT_SIZES, chain, checkpoint_of, greedy, hf_model, logits

MODEL = "tiny-autoregressive"
PROMPT = "copy Ada Ben Leo:"
#: How the texts of `MODEL` are sampled.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "decoder": "prompt-lookup"},
    {"temperature": 1.5, "frequency_penalty": 0.5, "top_p": 0.9},
)
#: Formats of the weights and of the cache of `MODEL`.
STORED = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16 cache": (None, "float16"),
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
}
#: Formats of the matrices of products.
PRODUCTS = {"products": FORMATS, "products of bitsandbytes": tuple(formats.BITSANDBYTES_VALUES)}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Classes and settings of models that share their operations with most families.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft caps": ("Gemma2", {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "sinks and experts": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rope_scaling": _YARN},
    ),
    "latent attention": (
        "DeepseekV3",
        {
            **LATENT_SIZES,
            **_MOE,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "biases by distance": ("Bloom", {}),
    "layer norms": ("GPTNeoX", {"hidden_size": 64}),
    "growing queries": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}},
    ),
    "Mamba": ("Mamba", {"intermediate_size": 75}),
    "Mamba 2": ("Mamba2", {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 2}),
    "gated delta": (
        "Qwen3_5",
        {
            "full_attention_interval": 3,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
        },
    ),
    "linear recurrent unit": (
        "RecurrentGemma",
        {"num_hidden_layers": 4, "attention_window_size": 9, "lru_width": 36},
    ),
}


class Digest:
    """A digest of arrays and of values that have an exact text."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: Any) -> None:
        for value in values:
            is_array = isinstance(value, np.ndarray)
            self._hash.update(value.tobytes() if is_array else repr(value).encode())

    def name(self) -> str:
        return self._hash.hexdigest()[:16]


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Float32 numbers from -1 to 1."""
    return (words(shape, seed) >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def words(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random uint32: numbered ones, mixed. numpy's generators may change with its version."""
    x = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x.reshape(shape)


def texts(stored: str) -> str:
    """The digest of tokens and log-probabilities of sampled texts of the shipped model."""
    dtype, cache = STORED[stored]
    digest = Digest()
    with LLM(MODEL, dtype=dtype, cache=cache, backend="native", cache_positions=1024) as llm:
        for options in SAMPLING:
            answer = llm.generate(
                PROMPT, max_tokens=40, seed=7, ignore_eos=True, logprobs=3, **options
            )
            digest.add(answer.tokens, answer.logprobs)
    return digest.name()


def family(name: str) -> str:
    """The digest of logits and tokens of a small model of random weights."""
    checkpoint = rwkv_checkpoint() if name == "RWKV-7" else _transformers_checkpoint(name)
    for seed, (key, tensor) in enumerate(sorted(checkpoint.tensors.items())):
        assert isinstance(tensor, np.ndarray)
        is_offset = "norm" in key and key.endswith("weight")
        checkpoint.tensors[key] = numbers(tensor.shape, seed) / 2 + np.float32(is_offset)
    model = build_model(checkpoint, None, executor=choose_executor("native"))
    prompt = [3 + 7 * i % 120 for i in range(40)]
    digest = Digest()
    digest.add(logits(model, chain(prompt)), greedy(model, prompt, 8))
    return digest.name()


def _transformers_checkpoint(name: str) -> Checkpoint:
    prefix, settings = FAMILIES[name]
    return checkpoint_of(hf_model(prefix, **settings))


def products(names: Iterable[str]) -> str:
    """The digest of products with a matrix in each format."""
    library = load_library()
    assert library is not None
    digest, packer, x = Digest(), Packer(library, 1), numbers((5, 512), 1)
    out, scratch = np.empty((5, 24), np.float32), np.empty(2 * x.size + 64, np.uint8)
    for seed, format in enumerate(names):
        if formats.is_packed(format):
            # No scale is infinite.
            data = words((24, formats.row_bytes(format, 512)), seed).astype(np.uint8) & 0xBB
        else:
            data = numbers((24, 512), seed).astype(formats.DTYPES[format])
        matrix = packer.pack(Weight(format, 24, 512, data, format))
        library.linear(
            ctypes.byref(matrix), x.ctypes.data, 5, None, out.ctypes.data, scratch.ctypes.data
        )
        digest.add(format, out)
    return digest.name()


def samples() -> str:
    """The digest of functions of one row of logits."""
    digest = Digest()
    for seed in range(40):
        row = numbers((777 + 333 * seed,), seed) * 12
        digest.add(argmax(row), logsumexp(row), *top_k(row[None], 9))
        digest.add([sample_gumbel(row, 0.7, seed, 3, position, 0) for position in range(20)])
    return digest.name()


def small_gates(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x) of float32 numbers, by the kernels. The sigmoid of -88 is below the normal
    numbers."""
    return _states(x[:, None], np.arange(len(x)), lambda backend, y: backend.activate(y, "silu"))


def rotations(positions: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines `[positions, frequencies]` of a rotation, by the kernels."""
    half, rope = len(frequencies), Rope(frequencies)
    x = np.repeat(np.float32([[1, 0]]), half, 1)
    found = _states(x, positions, lambda backend, y: backend.rope(y, 1, rope))
    return found[:, :half], found[:, half:]


def _states(
    x: np.ndarray, positions: np.ndarray, layer: Callable[[Backend, Any], Any]
) -> np.ndarray:
    """What a layer makes of the rows of x, or of its only row, at these positions."""
    embedding = Weight("F32", *x.shape, np.ascontiguousarray(x), "embedding")
    executor = NativeExecutor(
        embedding,
        len(x),
        1,
        lambda backend, y, index: layer(backend, y),
        lambda backend, y: backend.linear(y, embedding),
        threads=1,
    )
    every = np.arange(len(positions), dtype=np.int32)
    rows = chain([int(row) % len(x) for row in every])
    rows.positions, rows.stop = positions.astype(np.int32), np.ones_like(every)
    cache = new_cache("float32", len(every), [None])
    return executor.run(rows, cache, OutputSpec(every[:1], {1: every})).hidden[1].copy()


def all_digests() -> dict[str, str]:
    """Every digest by name."""
    found = {f"text in {stored}": texts(stored) for stored in STORED}
    found |= {name: products(PRODUCTS[name]) for name in PRODUCTS} | {"samples": samples()}
    return found | {name: family(name) for name in ("RWKV-7", *FAMILIES)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        library_module.built_library = lambda: Path(sys.argv[1])  # type: ignore[assignment]
    found = all_digests()
    library = load_library()
    print(json.dumps({"variant": getattr(library, "variant", None), **found}, indent=2))
