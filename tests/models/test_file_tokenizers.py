"""Tokenizers of repositories without tokenizer.json: SentencePiece, Kimi's tiktoken.model, and the
vocab.json and merges.txt of GPT-2."""

from __future__ import annotations

import base64
import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from anydecode.errors import CheckpointError
from anydecode.models.tokenizers import HFTokenizer

TEXTS = ["Hello world", " two  spaces\n\n x ", "it's 12345", "naïve 日本 🎉", "</s>a<s>", "", "a"]


def written(folder: Path, settings: dict[str, Any], **files: bytes) -> HFTokenizer | None:
    """The tokenizer of a folder with these files."""
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, data in files.items():
        (folder / f"{name}.model").write_bytes(data)
    return HFTokenizer.from_folder(folder)


def field(number: int, value: int | bytes | str | float) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TOKENS += ["▁H", "el", "lo", "▁Hel", "▁Hello", "▁w", "or", "ld", "▁wor", *"▁aeldHworx"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 19]
SCORES = [*[0.0] * 259, *(-float(rank) for rank in range(19))]


def sentencepiece(kind: int = 2, squeezes: int = 0) -> bytes:
    pieces = zip(TOKENS, SCORES, TYPES, strict=True)
    model = b"".join(
        field(1, field(1, token) + field(2, score) + field(3, type_))
        for token, score, type_ in pieces
    )
    return model + field(2, field(3, kind)) + field(3, field(1, "identity") + field(4, squeezes))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_read_as_from_gguf(prefix: bool, tmp_path: Path) -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_prefix_space": prefix,
        "added_tokens_decoder": {"279": {"content": "<turn>", "special": True}},
    }
    found = written(tmp_path, settings, tokenizer=sentencepiece())
    assert found is not None
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*TOKENS, "[unused 278]", "<turn>"],
        "tokenizer.ggml.scores": [*SCORES, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*TYPES, 5, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    expected = HFTokenizer.from_gguf(metadata)
    for text in [*TEXTS, "x<turn>Hello"]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    if prefix:
        assert found.encode("Hello world")[:2] == [1, TOKENS.index("▁Hello")]
    assert (found.bos_id, found.eos_ids) == (1, {2})


def test_other_models_of_sentencepiece_are_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, {}, tokenizer=sentencepiece(kind=1)) is None
    assert written(tmp_path, {}, tokenizer=sentencepiece(squeezes=1)) is None


@pytest.mark.parametrize("data", [sentencepiece()[:-3], b"\xff" * 20, b"\x0b\x00"])
def test_a_corrupt_model_of_sentencepiece_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a tokenizer: [^\n]+$"):
        written(tmp_path, {}, tokenizer=data)


WORDS = ["He", "ll", "llo", " w", "or", " wor", "ld", "'s", "日本", "12", "123"]
KIMI = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        "270": {"content": "[BOS]", "special": True},
        "271": {"content": "[EOS]", "special": True},
    },
}


def tiktoken() -> dict[bytes, int]:
    return {
        word: rank
        for rank, word in enumerate([*(bytes([b]) for b in range(256)), *map(str.encode, WORDS)])
    }


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The rule of tiktoken: the neighbours whose joint token has the lowest rank are merged."""
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(1 << 30, 0))
        if rank == 1 << 30:
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_the_tokenizer_of_kimi(tmp_path: Path) -> None:
    ranks = tiktoken()
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    found = written(tmp_path, KIMI, tiktoken=b"".join(lines))
    assert found is not None
    words = ["Hello", " world's", " ", "123", "45", " ", "日本", "x", "!"]
    expected = [token for word in words for token in merged(word.encode(), ranks)]
    assert found.encode("Hello world's 12345 日本x!") == expected
    assert found.encode("Hello[EOS]")[-1] == 271
    assert found.decode(expected) == "Hello world's 12345 日本x!"
    assert (found.bos_id, found.eos_ids) == (270, {271})
    assert written(tmp_path, {}, tiktoken=b"".join(lines)) is None
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: not a tokenizer"):
        written(tmp_path, KIMI, tiktoken=b"".join([*lines, b"AAAA 900\n"]))


def test_the_tokenizer_of_qwen(tmp_path: Path) -> None:
    """Texts are normalised to NFC; the special tokens follow the vocabulary."""
    ranks = tiktoken()
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"".join(lines))
    found = HFTokenizer.from_folder(tmp_path)
    assert found is not None
    words = ["Hello", " world", "'s", " ", "1", "2", "3", " é"]
    expected = [token for word in words for token in merged(word.encode(), ranks)]
    assert found.encode("Hello world's 123 e\u0301") == expected
    first = len(ranks)
    assert found.encode("<|endoftext|><|im_start|><|im_end|>") == [first, first + 1, first + 2]
    assert found.encode("<|extra_0|><|extra_204|>") == [first + 3, first + 207]
    assert found.vocab_size == first + 208
    assert found.decode(expected) == "Hello world's 123 é"


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "pad_token": "<pad>"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
        {},
    ],
)
def test_the_files_of_gpt2(settings: dict[str, Any], tmp_path: Path) -> None:
    """As in OPT and DialoGPT."""
    transformers = pytest.importorskip("transformers")
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["Hello world, it's naïve 12345"] * 4, trainer)
    trained.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt"}))
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    found = written(tmp_path, {**names, **settings})
    assert found is not None
    expected = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    first = [2] if settings.get("add_bos_token") else []
    for text in TEXTS:
        ids = expected(text, add_special_tokens=False)["input_ids"]
        assert found.encode(text) == first + ids
        assert found.encode(text, special=False) == ids
    assert (found.bos_id, found.eos_ids) == (2, {2})
