"""Builds the tokenizer of a repository without `tokenizer.json` from the files it has instead: a
model of SentencePiece, the ranks of Kimi's `tiktoken.model` and Qwen's `qwen.tiktoken`, PLaMo's
`tokenizer.jsonl`, or BERT's `vocab.txt`.

They are read as the metadata that a GGUF file of the model would have. What SentencePiece replaces
in a text is replaced as by the `tokenizers` library, which `transformers` uses too: a mark that
follows a replaced character in the same grapheme, and has no entry with it, is lost.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from anydecode.errors import CheckpointError
from anydecode.models.files import read_json
from anydecode.models.gguf_tokenizer import merges_from_scores, tokenizer_from_gguf
from anydecode.models.qwen2_tokenizer import added_tokens, token_text

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
#: Special tokens of PLaMo, whatever their type is.
_PLAMO = re.compile(r"<\|plamo:(?!unk).*\|>")
#: The kinds of SentencePiece's models: unigram models and merges.
_UNIGRAM, _BPE = 1, 2
#: The classes whose vocabulary is that of a unigram model with further tokens, by the types of
#: their models; their special tokens; and whether tokens stand before and after a text.
_CLASSES = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5Tokenizer"),
    "xlm-roberta": "XLMRobertaTokenizer",
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
}
#: The classes of word pieces.
_WORD_PIECES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_SPECIAL_TOKENS = {
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "XLMRobertaTokenizer": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "AlbertTokenizer": {
        "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>",
        "mask_token": "[MASK]",
    },
    **dict.fromkeys(
        _WORD_PIECES,
        {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]",
         "mask_token": "[MASK]"},
    ),
}  # fmt: skip
_NUM_EXTRA = 100


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
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    if not kind:
        kind = _CLASSES.get(str(read_json(folder / "config.json").get("model_type")), "")
    settings = {**_SPECIAL_TOKENS.get(kind, {}), **settings, "tokenizer_class": kind}
    for name, read in _READERS.items():
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
        tokenizer = tokenizer_from_gguf(metadata, str(path))
        if kind == "AlbertTokenizer":
            tokenizer.normalizer = normalizers.Sequence(
                [*_albert_steps(settings), tokenizer.normalizer]
            )
        return tokenizer
    return None


def _albert_steps(settings: Mapping[str, Any]) -> Iterator[normalizers.Normalizer]:
    """What ALBERT does to a text before SentencePiece normalises it."""
    yield normalizers.Replace("``", '"')
    yield normalizers.Replace("''", '"')
    if not settings.get("keep_accents", False):
        yield normalizers.NFKD()
        yield normalizers.StripAccents()
    if settings.get("do_lower_case", True):
        yield normalizers.Lowercase()


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
    """The metadata of SentencePiece's models of merges that do not normalise texts, and of unigram
    models; None for others."""
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
    kind = trainer.get(3, _UNIGRAM)
    normalizes = bool(normalizer.get(2)) or bool(normalizer.get(4, 1))
    if not pieces or kind not in (_UNIGRAM, _BPE) or (kind == _BPE and normalizes):
        return None
    metadata = {
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
    if kind == _BPE:
        return metadata
    has_bytes, has_suffixes = trainer.get(35, 0), trainer.get(24, 0)
    if has_bytes or has_suffixes or not normalizer.get(5, 1):
        return None  # bytes of unknown characters, marks after words, and spaces without marks
    metadata["tokenizer.ggml.model"] = "t5"
    metadata["tokenizer.ggml.precompiled_charsmap"] = normalizer.get(2, b"")
    metadata["tokenizer.ggml.remove_extra_whitespaces"] = bool(normalizer.get(4, 1))
    return _with_tokens_of_class(metadata, settings)


def _with_tokens_of_class(metadata: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a unigram model, with the tokens that the class of the tokenizer adds."""
    kind = settings["tokenizer_class"]
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    # The model matches these by itself, and adds no space after them.
    types[:] = [_NORMAL if type_ == _USER_DEFINED else type_ for type_ in types]
    added: list[str] = []
    if kind == "T5Tokenizer":
        num_extra = settings.get("extra_ids", _NUM_EXTRA)
        if not isinstance(num_extra, int) or not 0 <= num_extra <= 4096:
            raise ValueError(f"extra_ids {num_extra!r}: allowed are 0 to 4096")
        added = [f"<extra_id_{number}>" for number in reversed(range(num_extra))]
    elif kind == "XLMRobertaTokenizer":
        # The ids of fairseq, which has other special tokens than SentencePiece.
        first = ["<s>", "<pad>", "</s>", "<unk>"]
        tokens[:3], types[:3], scores[:3] = first, [*[_CONTROL] * 3, _UNKNOWN], [0.0] * 4
        metadata["tokenizer.ggml.unknown_token_id"] = 3
        added = ["<mask>"]
    tokens += added
    types += [_CONTROL] * len(added)
    scores += [0.0] * len(added)
    has_first = kind in ("XLMRobertaTokenizer", "AlbertTokenizer")
    metadata["tokenizer.ggml.add_bos_token"] = has_first
    metadata["tokenizer.ggml.add_eos_token"] = has_first or kind == "T5Tokenizer"
    return metadata


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


def _plamo(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of PLaMo's tokenizer: lines of a token, its score and its type."""
    kinds = {"UNKNOWN": _UNKNOWN, "CONTROL": _CONTROL, "BYTE": _BYTE}
    lines = [json.loads(line) for line in data.splitlines() if line.strip()]
    return {
        "tokenizer.ggml.model": "plamo2",
        "tokenizer.ggml.tokens": [str(line[0]) for line in lines],
        "tokenizer.ggml.scores": [float(line[1]) for line in lines],
        "tokenizer.ggml.token_type": [
            _CONTROL if _PLAMO.fullmatch(line[0]) else kinds.get(line[2], _NORMAL) for line in lines
        ],
    }


def _word_piece(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The metadata of BERT's vocabulary, a word or part of one per line; None for other classes."""
    if settings["tokenizer_class"] not in _WORD_PIECES:
        return None
    words = data.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    special = {token_text(settings.get(name)) for name in _SPECIAL_TOKENS["BertTokenizer"]}
    lowercase = settings.get("do_lower_case", True) is not False
    accents = settings.get("strip_accents")
    ids = {
        f"tokenizer.ggml.{key}_token_id": words.index(text)
        for name, key in (("cls", "cls"), ("sep", "seperator"))  # as spelt in files
        if (text := token_text(settings.get(f"{name}_token"))) in words
    }
    return {
        "tokenizer.ggml.model": "bert",
        # Files mark the start of a word, BERT marks the other parts.
        "tokenizer.ggml.tokens": [
            word if word in special else word[2:] if word.startswith("##") else f"▁{word}"
            for word in words
        ],
        "tokenizer.ggml.scores": [0.0] * len(words),
        "tokenizer.ggml.token_type": [_CONTROL if word in special else _NORMAL for word in words],
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": lowercase if accents is None else bool(accents),
        **ids,
    }


#: By name of the file, in order of preference.
_READERS: dict[str, Callable[[bytes, Mapping[str, Any]], dict[str, Any] | None]] = {
    "tokenizer.model": _sentencepiece,
    "spiece.model": _sentencepiece,
    "sentencepiece.bpe.model": _sentencepiece,
    "tiktoken.model": _tiktoken,
    "qwen.tiktoken": _qwen,
    "tokenizer.jsonl": _plamo,
    "vocab.txt": _word_piece,
}
#: The files that `tokenizer_of_files` reads.
TOKENIZER_FILES = tuple(_READERS)
