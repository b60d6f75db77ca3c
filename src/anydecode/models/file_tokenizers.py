"""Builds the tokenizer of a repository without `tokenizer.json` from the files it has instead:
SentencePiece's `tokenizer.model`, Kimi's `tiktoken.model`, or Qwen's `qwen.tiktoken`.

They are read as the metadata that a GGUF file of the model would have.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from anydecode.errors import CheckpointError
from anydecode.models.gguf_tokenizer import merges_from_scores, tokenizer_from_gguf
from anydecode.models.qwen2_tokenizer import added_tokens, token_text

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
#: The kind of SentencePiece's models of merges.
_BPE = 2


def byte_alphabet() -> dict[str, int]:
    """The characters of byte-level BPE and the bytes they stand for: printable Latin-1 characters
    stand for themselves, the other bytes are written as the characters from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def tokenizer_of_files(
    folder: Path, settings: Mapping[str, Any], added: Mapping[str, Any]
) -> Tokenizer | None:
    """Build the tokenizer in `folder`.

    Args:
        folder: The folder with the file.
        settings: special_tokens_map.json, updated with tokenizer_config.json.
        added: added_tokens.json; used if `settings` has no `added_tokens_decoder`.

    Returns:
        The tokenizer; None if there is no file of these kinds.

    Raises:
        CheckpointError: A file is corrupt.
    """
    for name, read in (
        ("tokenizer.model", _sentencepiece),
        ("tiktoken.model", _tiktoken),
        ("qwen.tiktoken", _qwen),
    ):
        path = folder / name
        if not path.is_file():
            continue
        try:
            metadata = read(path.read_bytes(), settings)
            if metadata is None:
                continue
            _add(metadata, settings, added)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path}: not a tokenizer: {reason}") from None
        return tokenizer_from_gguf(metadata, str(path))
    return None


def _add(metadata: dict[str, Any], settings: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Add the tokens that the settings list, and the ids of those around a text."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    for index, token in sorted(added_tokens(settings, added, vocab).items()):
        if not 0 <= index < len(tokens) + 4096:
            raise ValueError(f"token {token.content!r} has the id {index}")
        while index >= len(tokens):
            tokens.append(f"[unused {len(tokens)}]")
            types.append(_UNUSED)
            scores.append(0.0)
        tokens[index] = token.content
        types[index] = _CONTROL if token.special else _USER_DEFINED
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown")):
        text = token_text(settings.get(f"{name}_token"))
        if text in tokens:
            metadata[f"tokenizer.ggml.{key}_token_id"] = tokens.index(text)
    for name in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(name), bool):
            metadata[f"tokenizer.ggml.{name}"] = settings[name]


def _sentencepiece(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The metadata of SentencePiece's model of merges; None for other models, and for those that
    normalise texts."""
    pieces: list[dict[int, Any]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(dict(_fields(value)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if not pieces or trainer.get(3) != _BPE or normalizer.get(2) or normalizer.get(4, 1):
        return None
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece[1].decode() for piece in pieces],
        "tokenizer.ggml.scores": [
            struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces
        ],
        "tokenizer.ggml.token_type": [piece.get(3, _NORMAL) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": settings.get("add_prefix_space", True) is not False
        and bool(normalizer.get(3, 1)),
        "tokenizer.ggml.unknown_token_id": trainer.get(40, 0),
        "tokenizer.ggml.bos_token_id": trainer.get(41, 1),
        "tokenizer.ggml.eos_token_id": trainer.get(42, 2),
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message of protocol buffers: numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _number(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _number(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is not a model of SentencePiece")
        if at + size > len(data):
            raise ValueError("the file is truncated")
        yield key >> 3, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            raise ValueError("the file is truncated")
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("it is not a model of SentencePiece")


def _tiktoken(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The metadata of Kimi's tokenizer; None for others, whose rule is in their code alone."""
    if "tokenization_kimi" not in str(settings.get("auto_map")):
        return None
    return _ranked(data, "kimi-k2")


def _qwen(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of Qwen's tokenizer, whose special tokens are listed in its code alone."""
    metadata = _ranked(data, "qwen2")
    tokens = metadata["tokenizer.ggml.tokens"]
    first = len(tokens)
    tokens += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"<|extra_{index}|>" for index in range(205)]
    metadata["tokenizer.ggml.token_type"] += [_CONTROL] * (len(tokens) - first)
    metadata["tokenizer.ggml.scores"] += [0.0] * (len(tokens) - first)
    metadata["tokenizer.ggml.eos_token_id"] = first
    return metadata


def _ranked(data: bytes, pre: str) -> dict[str, Any]:
    """The metadata of a file of tiktoken, lines of a token and its rank, with the pre-tokenizer
    that llama.cpp calls `pre`."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    ranks: dict[int, str] = {}
    for line in data.splitlines():
        text, _, rank = line.partition(b" ")
        ranks[int(rank)] = "".join(characters[byte] for byte in base64.b64decode(text))
    tokens = [ranks[rank] for rank in range(len(ranks))]
    types, scores = [_NORMAL] * len(tokens), [-float(rank) for rank in range(len(tokens))]
    merges = merges_from_scores(tokens, scores, types)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
