"""Builds Qwen2's tokenizer from vocab.json, merges.txt and a list of added tokens: the files of the
slow tokenizer class, which Dream's checkpoints have instead of tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from anydecode.errors import CheckpointError
from anydecode.models.gguf_tokenizer import PATTERNS, make_pre_tokenizer

#: Values of `tokenizer_class` with Qwen2's rules.
CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer", "DimpleTokenizer")


def qwen2_tokenizer(
    folder: Path, settings: Mapping[str, Any], added: Mapping[str, Any]
) -> Tokenizer | None:
    """Build the tokenizer in `folder`.

    Args:
        folder: The folder with vocab.json and merges.txt.
        settings: special_tokens_map.json, updated with tokenizer_config.json.
        added: added_tokens.json; used if `settings` has no `added_tokens_decoder`.

    Returns:
        The tokenizer; None if a file is missing or `tokenizer_class` is another one.

    Raises:
        CheckpointError: The files are corrupt.
    """
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    if settings.get("tokenizer_class") not in CLASSES:
        return None
    if not (vocab_file.is_file() and merges_file.is_file()):
        return None
    try:
        vocab, merges = BPE.read_file(str(vocab_file), str(merges_file))
        tokens = _added_tokens(settings, added, vocab)
        vocab |= {token.content: index for index, token in tokens.items()}
        if len(set(vocab.values())) < len(vocab):
            raise ValueError("two tokens have the same id")
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: not a tokenizer: {reason}") from None
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(PATTERNS["qwen2"])
    tokenizer.decoder = decoders.ByteLevel()
    # The vocabulary contains the added tokens, so their ids are kept.
    tokenizer.add_tokens([token for _, token in sorted(tokens.items())])
    return tokenizer


def token_text(entry: Any) -> str | None:
    """The text of a token in a JSON file: a string, or an object with its `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _added_tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any], vocab: Mapping[str, int]
) -> dict[int, AddedToken]:
    """The tokens that are matched in a text before it is split, by id."""
    special_texts = _special_texts(settings)
    entries = settings.get("added_tokens_decoder") or {
        index: {"content": text} for text, index in added.items()
    }
    entries = {int(index): entry for index, entry in entries.items()}
    entry_texts = {entry["content"] for entry in entries.values()}
    entries |= {
        vocab[text]: {"content": text} for text in special_texts - entry_texts if text in vocab
    }
    tokens = {}
    for index, entry in entries.items():
        text = entry["content"]
        special = bool(entry.get("special")) or text in special_texts
        tokens[index] = AddedToken(
            text,
            single_word=bool(entry.get("single_word")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            normalized=bool(entry.get("normalized", not special)),
            special=special,
        )
    return tokens


def _special_texts(settings: Mapping[str, Any]) -> set[str]:
    """The texts of all tokens that the settings list as special."""
    entries = [entry for name, entry in settings.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name) or []
        entries.extend(more.values() if isinstance(more, dict) else more)
    return {text for entry in entries if (text := token_text(entry)) is not None}
