"""The tokenizer of text and DNA, beside llama.cpp's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from anydecode.models.hybrid_dna_tokenizer import HybridDnaTokenizer
from llama_cpp_logits import llama_cpp_tokens
from plain_families import as_gguf

LETTERS = ["".join(letters) for letters in product("ACGT", repeat=6)]
TAGS = ["<dna>", "</dna>", "<oov>"]


def metadata() -> dict[str, Any]:
    """Bytes, merges of which one token has the name of one of DNA, and the tokens of DNA."""
    words = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "AA", "AAAA", "AAAAAA"]
    tokens = [*words, *TAGS, *(f"{letters}\ue000" for letters in LETTERS)]
    return {
        "tokenizer.ggml.model": "hybriddna",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["A A", "AA AA", "AAAA AA"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def ids(*tokens: str) -> list[int]:
    known: list[str] = metadata()["tokenizer.ggml.tokens"]
    return [known.index(token) for token in tokens]


def test_sequences_are_cut_into_six_letters() -> None:
    """Rejects tokens of text in sequences, of sequences in text, sequences that are cut off, and a
    text without its first token."""
    tokenizer = HybridDnaTokenizer.from_gguf(metadata())
    text = "AAAAAA<dna>aaaaaacgtN</dna>A<dna>NNNNNNGG"
    expected = ids(
        *("AAAAAA", "<dna>", "AAAAAA\ue000", "<oov>", "</dna>", "A"),
        *("<dna>", "<oov>", "GGAAAA\ue000"),
    )
    assert tokenizer.encode(text) == [0, *expected]
    assert tokenizer.encode(text, special=False) == expected
    assert tokenizer.encode("<dna>ACGTAC</dna>", special=False) == ids(
        "<dna>", "ACGTAC\ue000", "</dna>"
    )
    assert tokenizer.decode(expected[:3]) == "AAAAAA<dna>AAAAAA"
    assert tokenizer.token_bytes(expected[2]) == tokenizer.token_bytes(expected[0]) == b"AAAAAA"
    assert tokenizer.token_text(expected[2]) == "AAAAAA"


@pytest.mark.slow
def test_tokens_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    draw = Random(3)
    parts = [*TAGS[:2], "<dna>", *"ACGTacgtNé", "ACGTAC", "AAAAAA", " text", "\n"]
    strings = ["".join(draw.choices(parts, k=draw.randrange(1, 24))) for _ in range(1000)]
    path = as_gguf("maincoder", tmp_path / "x.gguf", tokenizer=metadata())
    tokenizer = HybridDnaTokenizer.from_gguf(metadata())
    assert [tokenizer.encode(text) for text in strings] == llama_cpp_tokens(path, strings)
