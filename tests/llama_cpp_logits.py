"""Logits of llama.cpp for a GGUF file, from its shared libraries, in a process of their own.

The folder that ANYDECODE_LLAMA_CPP names has `libllama`, `libggml`, `libggml-base` and the CPU
backends of llama.cpp: v0.5.0, as the npm package `@node-llama-cpp/linux-x64` 3.22.1 has them in
`bins/linux-x64`, or v0.6.0 (b11434) in the folder `bin` of a build with BUILD_SHARED_LIBS. Another
version may have other structures.
"""

from __future__ import annotations

import ctypes
import json
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
#: Behind the tokens of a text.
_END = -1


def llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """Float32 `[len(tokens), vocab_size]`. The test is skipped without the libraries."""
    return _computed("logits", path, ",".join(map(str, tokens)))


def llama_cpp_embedding(path: Path, tokens: list[int]) -> np.ndarray:
    """The pooled state of an embedding model, float32 `[hidden_size]`."""
    return _computed("embedding", path, ",".join(map(str, tokens)))


def llama_cpp_tokens(path: Path, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, with special tokens around it."""
    flat = _computed("tokens", path, json.dumps(texts))
    ends = np.flatnonzero(flat == _END)
    return [part[part != _END].tolist() for part in np.split(flat, ends[:-1] + 1)]


def _computed(what: str, path: Path, data: str) -> np.ndarray:
    """The result of a process with llama.cpp."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with the libraries of llama.cpp")
    target = path.with_suffix(".npy")
    process = subprocess.run(
        [sys.executable, __file__, what, folder, str(path), str(target)],
        input=data,
        capture_output=True,
        text=True,
        errors="replace",  # its log cuts tokens within characters
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
    backend = folder / "libggml-cpu-x64.so"
    if backend.exists():  # else it is linked with libggml
        load(str(backend).encode())
    assert loaded[1].ggml_backend_reg_count(), "no CPU backend"
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
        ("llama_set_embeddings", None, [pointer, ctypes.c_bool]),
        ("llama_get_embeddings_seq", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        ("llama_model_n_embd", ctypes.c_int32, [pointer]),
        (
            "llama_tokenize",
            ctypes.c_int32,
            [
                pointer,
                ctypes.c_char_p,
                ctypes.c_int32,
                ctypes.POINTER(ctypes.c_int32),
                ctypes.c_int32,
                ctypes.c_bool,
                ctypes.c_bool,
            ],
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


def _model(library: ctypes.CDLL, path: str) -> int:
    model: int = library.llama_model_load_from_file(
        path.encode(), library.llama_model_default_params()
    )
    assert model, "the model does not load"
    return model


def _decoded(library: ctypes.CDLL, model: int, tokens: list[int], *, embeds: bool) -> int:
    """A context that has run the tokens, with keys and values in float32."""
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.flash_attention = _FLASH_ATTENTION_OFF
    params.type_k = params.type_v = _F32
    context: int = library.llama_init_from_model(model, params)
    assert context, "there is no context"
    library.llama_set_embeddings(context, embeds)
    batch = library.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, index
        batch.n_seq_id[index], batch.logits[index] = 1, 1
        batch.seq_id[index][0] = 0
    assert library.llama_decode(context, batch) == 0, "the batch is not decoded"
    return context


def _logits(library: ctypes.CDLL, model: int, data: str) -> np.ndarray:
    """Of all positions."""
    tokens = [int(number) for number in data.split(",")]
    context = _decoded(library, model, tokens, embeds=False)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    return np.ctypeslib.as_array(library.llama_get_logits(context), (len(tokens), size)).copy()


def _embedding(library: ctypes.CDLL, model: int, data: str) -> np.ndarray:
    tokens = [int(number) for number in data.split(",")]
    context = _decoded(library, model, tokens, embeds=True)
    size = library.llama_model_n_embd(model)
    return np.ctypeslib.as_array(library.llama_get_embeddings_seq(context, 0), (size,)).copy()


def _tokens(library: ctypes.CDLL, model: int, data: str) -> np.ndarray:
    """Of all texts, with `_END` behind each."""
    vocab, found = library.llama_model_get_vocab(model), []
    for text in json.loads(data):
        raw = text.encode()
        buffer = (ctypes.c_int32 * (2 * len(raw) + 16))()
        count = library.llama_tokenize(vocab, raw, len(raw), buffer, len(buffer), True, True)
        assert count >= 0, "the buffer is too short"
        found += [*buffer[:count], _END]
    return np.array(found, np.int64)


if __name__ == "__main__":
    _, what, libraries, model_path, output = sys.argv
    loaded = _load(Path(libraries))
    results = {"logits": _logits, "embedding": _embedding, "tokens": _tokens}
    np.save(output, results[what](loaded, _model(loaded, model_path), sys.stdin.read()))
