"""The tokenizer of PLaMo 2 and 3, from GGUF files and folders, against its rule and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.tokenizers import HFTokenizer
from llama_cpp_logits import llama_cpp_tokens
from plain_families import as_gguf

CHARACTERS = "abc .\n0日本語é"
SPECIAL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>", "<|plamo:op|>"]


def vocabulary(seed: int = 0, size: int = 400) -> list[tuple[str, float, str]]:
    """Tokens, their scores and types. No two ways to write a text have the same score: then PLaMo
    and the `tokenizers` library may choose different ones."""
    random = Random(seed)
    words = {"".join(random.choices(CHARACTERS, k=random.randint(1, 5))) for _ in range(size)}
    words -= {"語"}  # without a token of its own
    scores = {word: -random.uniform(4, 7) * len(word) ** 0.8 for word in sorted(words)}
    special = [(token, 0.0, "CONTROL") for token in SPECIAL]
    special[0] = (SPECIAL[0], 0.0, "UNKNOWN")
    raw = [(f"<0x{byte:02X}>", -20.0, "BYTE") for byte in range(256)]
    return [*special, *raw, *((word, score, "NORMAL") for word, score in scores.items())]


def expected(tokens: list[tuple[str, float, str]], text: str) -> list[int]:
    """The best way from the end on: a character without a token costs 1000, and is bytes."""
    ids = {token: index for index, (token, _, kind) in enumerate(tokens) if kind == "NORMAL"}
    best: list[tuple[int, list[int]]] = [(0, [])] * (len(text) + 1)
    for start in reversed(range(len(text))):
        found = []
        for end in range(min(len(text), start + 5), start, -1):
            token = ids.get(text[start:end])
            if token is not None:
                score = round(float(np.float32(tokens[token][1]) * np.float32(1e4)))
                found.append((best[end][0] + score, [token, *best[end][1]]))
        raw = [len(SPECIAL) + byte for byte in text[start].encode()]
        found.append((best[start + 1][0] - 10**7, [*raw, *best[start + 1][1]]))
        best[start] = max(found, key=lambda pair: pair[0])
    return best[0][1]


def texts() -> list[str]:
    random = Random(1)
    return [
        "".join(random.choices(CHARACTERS + "z🎉", k=random.randint(1, 40))) for _ in range(500)
    ]


def metadata() -> dict[str, Any]:
    kinds = {"NORMAL": 1, "UNKNOWN": 2, "CONTROL": 3, "BYTE": 6}
    tokens = vocabulary()
    return {
        "tokenizer.ggml.model": "plamo2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, *_ in tokens],
        "tokenizer.ggml.scores": [score for _, score, _ in tokens],
        "tokenizer.ggml.token_type": [kinds[kind] for *_, kind in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_tokens_of_a_file() -> None:
    tokenizer = HFTokenizer.from_gguf(metadata())
    for text in texts():
        tokens = [1, *expected(vocabulary(), text)]
        assert tokenizer.encode(text) == tokens, text
        assert tokenizer.decode(tokens[1:]) == text
    assert tokenizer.encode("a<|plamo:op|>a")[2] == 4


def test_tokens_of_a_folder_equal_those_of_a_file(tmp_path: Path) -> None:
    lines = [json.dumps([token, score, kind, 1, 2]) for token, score, kind in vocabulary()]
    (tmp_path / "tokenizer.jsonl").write_text("\n".join(lines) + "\n")
    settings = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "plamo3"}))
    found, other = HFTokenizer.from_folder(tmp_path), HFTokenizer.from_gguf(metadata())
    assert found is not None
    for text in texts()[:100]:
        assert found.encode(text) == other.encode(text)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "plamo3"}))
    for line in ("{}", "[1]", "[]", '["a", "b", "NORMAL"]', "x"):
        (tmp_path / "tokenizer.jsonl").write_text(line)
        with pytest.raises(CheckpointError, match=r"tokenizer\.jsonl: not a tokenizer"):
            HFTokenizer.from_folder(tmp_path)
    for changes, message in (
        ({"tokenizer.ggml.scores": [0.0]}, "no score for each token"),
        ({"tokenizer.ggml.token_type": [1] * len(vocabulary())}, "no token for unknown words"),
    ):
        with pytest.raises(CheckpointError, match=message):
            HFTokenizer.from_gguf({**metadata(), **changes})


def test_tokens_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    tokenizer, strings = HFTokenizer.from_gguf(metadata()), texts()
    path = as_gguf("plamo3", tmp_path / "x.gguf", tokenizer=metadata())
    for text, tokens in zip(strings, llama_cpp_tokens(path, strings), strict=True):
        assert tokenizer.encode(text) == tokens, text
