"""RWKV's tokenizer, from the vocabulary of a folder and from the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, JsonSchema
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from gguf_models import write_folder
from rwkv_models import CONFIG, rwkv_tensors

_WORDS = ["he", "hell", "hello", "lo w", "wörld", "ö", "\n\n", "'\"", "\\n", "  ", "   ", "é日"]
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *(word.encode() for word in _WORDS),
    b"\xe6\x97",
    b"\xff\xfe",
    b"it's",
]
END = "<|rwkv_tokenizer_end_of_text|>"
TEXTS = [
    "hello wörld",
    "hellhe hello w",
    "it's \\ '\" \t\r\n\n\n é日 日 \U0001f600",
    "       x",
    "",
]


def write_vocabulary(folder: Path, pieces: list[bytes] = PIECES) -> Path:
    """As published: ids from 1 on, and a literal of text where the bytes are UTF-8."""
    lines = []
    for token, piece in enumerate(pieces, 1):
        try:
            literal = repr(piece.decode())
        except UnicodeDecodeError:
            literal = repr(piece)
        lines.append(f"{token} {literal} {len(piece)}\n")
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def gguf_metadata(pieces: list[bytes] = PIECES, padding: int = 3) -> dict[str, Any]:
    """As llama.cpp's converter writes a vocabulary."""
    texts = ["<s>", *(repr(piece)[2:-1] for piece in pieces)]
    size = len(texts) + padding
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [*texts, *(f"[PAD{i}]" for i in range(len(texts), size))],
        "tokenizer.ggml.token_type": [3] + [1] * len(pieces) + [5] * padding,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1 + pieces.index(b"\n\n") if b"\n\n" in pieces else 0,
        "tokenizer.chat_template": "rwkv-world",
    }


def longest_first(text: str) -> list[int]:
    """The definition: at each place the longest token that the bytes start with."""
    data, ids = text.encode(), []
    while data:
        piece = max((p for p in PIECES if data.startswith(p)), key=len)
        ids.append(1 + PIECES.index(piece))
        data = data[len(piece) :]
    return ids


def shortest_first(text: str) -> list[int]:
    """A wrong twin: a token per byte."""
    return [1 + byte for byte in text.encode()]


def test_texts_are_split_into_the_longest_tokens(tmp_path: Path) -> None:
    folder = RwkvTokenizer.from_folder(write_vocabulary(tmp_path))
    assert folder is not None
    gguf = RwkvTokenizer.from_gguf(gguf_metadata(), "tiny")
    generator = np.random.default_rng(0)
    texts = [*TEXTS, *("".join(generator.choice(_WORDS, 20)) for _ in range(30))]
    for tokenizer in (folder, gguf):
        for text in texts:
            ids = tokenizer.encode(text)
            assert ids == longest_first(text)
            assert tokenizer.decode(ids) == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.encode(TEXTS[0]) != shortest_first(TEXTS[0])


def test_bytes_that_are_not_yet_a_character_are_replaced() -> None:
    tokenizer = RwkvTokenizer.from_gguf(gguf_metadata(), "tiny")
    first, *rest = tokenizer.encode("日x")
    assert tokenizer.token_bytes(first) == b"\xe6\x97"
    assert tokenizer.decode([first]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([first, *rest]) == "日x"


def test_special_tokens_of_a_gguf_file() -> None:
    tokenizer = RwkvTokenizer.from_gguf(gguf_metadata(), "tiny")
    blank = 1 + PIECES.index(b"\n\n")
    assert tokenizer.vocab_size == len(PIECES) + 4
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {0, blank})
    assert tokenizer.encode("he<s>he") == [257, 0, 257]
    assert tokenizer.decode([257, 0, 257]) == "hehe"
    assert tokenizer.decode([257, 0, 257], skip_special=False) == "he<s>he"
    assert [tokenizer.is_special(token) for token in (0, 1, blank)] == [True, False, False]
    assert tokenizer.token_text(0) == "<s>" and tokenizer.token_bytes(0) == b""
    assert tokenizer.token_text(256) == "\\xff"
    assert tokenizer.token_text(10_000) == "<10000>"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}]
    rendered = "System: Be brief.\n\nUser: Hi\n\nAssistant:"
    assert tokenizer.render_chat(messages) == rendered


def test_special_tokens_of_a_folder(tmp_path: Path) -> None:
    """The slow class gives texts of the vocabulary ids of their own; these are not used."""
    settings = {
        "bos_token": END,
        "eos_token": "\n\n",
        "chat_template": "{% for m in messages %}{{ bos_token + m.content }}{% endfor %}",
        "added_tokens_decoder": {
            "0": {"content": END, "special": True},
            "400": {"content": "<new>", "special": True},
            "401": {"content": "\n\n", "special": True},
        },
    }
    (write_vocabulary(tmp_path) / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = RwkvTokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    blank = 1 + PIECES.index(b"\n\n")
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {0, blank})
    assert tokenizer.encode(f"{END}he\n\n<new>") == [0, 257, blank, 400]
    assert tokenizer.vocab_size == 401
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == f"{END}x"


def test_a_folder_without_a_vocabulary_has_no_such_tokenizer(tmp_path: Path) -> None:
    assert RwkvTokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 'a' 2", "line 1: not an id, a token and its length"),
        ("x 'a' 1", "line 1: not an id"),
        ("1 a 1", "line 1: not an id"),
        ("1 'a' + 'b' 2", "line 1: not an id"),
        ("1 b'\\xg' 1", "line 1: not an id"),
        ("1 'a' 1\n1 'b' 1", "line 2: the id is 1; allowed is a new one"),
        ("99999999999 'a' 1", "line 1: the id is 99999999999"),
        (f"{'1' * 5000} 'a' 1", "line 1: not an id"),
        (f"1 'a' {'1' * 5000}", "line 1: not an id"),
        ("1 '' 0", "a token is empty"),
        ("1 'a' 1\n2 'a' 1", "two tokens are the same"),
        (f"1 '{'a' * 1025}' 1025", "a token has 1025 bytes"),
        ("", "the vocabulary is empty"),
    ],
)
def test_invalid_vocabularies_are_refused(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rwkv_vocab_v1.txt").write_text(line)
    with pytest.raises(CheckpointError, match=message) as caught:
        RwkvTokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "holds no list of tokens"),
        ({"tokenizer.ggml.tokens": [1]}, "holds no list of tokens"),
        ({"tokenizer.ggml.tokens": []}, "token types do not match"),
        ({"tokenizer.ggml.token_type": [1]}, "token types do not match"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [3]}, "is empty"),
    ],
)
def test_invalid_metadata_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RwkvTokenizer.from_gguf({**gguf_metadata(), **change}, "tiny")


def test_invalid_added_tokens_are_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path)
    entry = {"content": "y"}
    for added in (
        {"x": entry}, {"500": 3}, [1], {"1" * 5000: entry}, {"²": entry},
        {"500": {"content": "\ud800"}},
    ):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
        with pytest.raises(CheckpointError, match="added"):
            RwkvTokenizer.from_folder(tmp_path)


def test_texts_that_cannot_be_encoded_are_refused() -> None:
    tokenizer = RwkvTokenizer.from_gguf(gguf_metadata([b"a"]), "tiny")
    with pytest.raises(InvalidRequestError, match="the byte 0x62 of the text is no token"):
        tokenizer.encode("ab")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_a_folder_generates_text_and_constrained_text(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 300}
    write_vocabulary(write_folder(tmp_path, rwkv_tensors(config), **config))
    with LLM(str(tmp_path)) as llm:
        assert isinstance(llm.tokenizer, RwkvTokenizer)
        assert llm.generate("hello", max_tokens=8, ignore_eos=True).tokens
        constraint = JsonSchema(
            {"type": "object", "properties": {"it's": {"type": "boolean"}}},
            extra_properties=False,
        )
        found = llm.generate("hello", max_tokens=64, constraint=constraint)
        assert set(json.loads(found.text)) <= {"it's"}
