"""Logits of llama.cpp for a GGUF file, from its shared libraries, in a process of their own.

The folder that ANYDECODE_LLAMA_CPP names has `libllama`, `libggml`, `libggml-base` and the CPU
backends of llama.cpp v0.5.0, as the npm package `@node-llama-cpp/linux-x64` 3.22.1 has them in
`bins/linux-x64`. Another version may have other structures.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

VARIABLE = "ANYDECODE_LLAMA_CPP"
#: Its GELU is a table in float16.
GELU_MARGIN = 1e-2
CONTEXT = 256
_FLASH_ATTENTION_OFF, _F32 = 0, 0


def llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Float32 `[len(tokens), vocab_size]`. The test is skipped without the libraries."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with the libraries of llama.cpp v0.5.0")
    target = path.with_suffix(".npy")
    numbers = ",".join(map(str, tokens))
    process = subprocess.run(
        [sys.executable, __file__, folder, str(path), str(target), numbers],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-1000:]
    found: np.ndarray = np.load(target)
    return found


class _ModelParams(ctypes.Structure):
    _fields_ = [("rest", ctypes.c_uint8 * 512)]  # at least as large as the structure is


class _ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch")),
        ("before_flash_attention", ctypes.c_uint32 * 10),
        ("flash_attention", ctypes.c_int32),
        ("before_types", ctypes.c_uint32 * 12),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 512),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def _load(folder: Path) -> ctypes.CDLL:
    """libllama, with a CPU backend."""
    loaded = [
        ctypes.CDLL(str(next(folder.glob(name))), ctypes.RTLD_GLOBAL)
        for name in ("libggml-base.so", "libggml.*so", "libllama.*so")
    ]
    load, pointer = loaded[1].ggml_backend_load, ctypes.c_void_p
    load.restype, load.argtypes = pointer, [ctypes.c_char_p]
    assert load(str(folder / "libggml-cpu-x64.so").encode()), "no CPU backend"
    library = loaded[2]
    for name, result, arguments in (
        ("llama_model_default_params", _ModelParams, []),
        ("llama_context_default_params", _ContextParams, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _ModelParams]),
        ("llama_init_from_model", pointer, [pointer, _ContextParams]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [pointer]),
        ("llama_batch_init", _Batch, [ctypes.c_int32] * 3),
        ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


def _logits(folder: Path, path: str, tokens: list[int]) -> np.ndarray:
    """Of all positions, with keys and values in float32."""
    library = _load(folder)
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    assert model, "the model does not load"
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.flash_attention = _FLASH_ATTENTION_OFF
    params.type_k = params.type_v = _F32
    context = library.llama_init_from_model(model, params)
    assert context, "there is no context"
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, index
        batch.n_seq_id[index], batch.logits[index] = 1, 1
        batch.seq_id[index][0] = 0
    assert library.llama_decode(context, batch) == 0, "the batch is not decoded"
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    return np.ctypeslib.as_array(library.llama_get_logits(context), (len(tokens), size)).copy()


if __name__ == "__main__":
    _, libraries, model_path, output, numbers = sys.argv
    found = _logits(Path(libraries), model_path, [int(number) for number in numbers.split(",")])
    np.save(output, found)
