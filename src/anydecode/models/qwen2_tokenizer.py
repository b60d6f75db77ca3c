"""Builds the tokenizers of Qwen2, GPT-2 and RoBERTa from vocab.json, merges.txt and a list of added
tokens: the files of the slow tokenizer classes, which Dream, OPT and DialoGPT have instead of
tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from anydecode.errors import CheckpointError
from anydecode.models.files import read_json
from anydecode.models.gguf_tokenizer import PATTERNS, make_pre_tokenizer
from anydecode.models.gguf_word_tokenizers import text_and_pair

#: Values of `tokenizer_class` with Qwen2's rules.
CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer", "DimpleTokenizer")
#: Values of `tokenizer_class` with GPT-2's rules, and the types of models that have them without a
#: class.
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
GPT2_MODELS = ("gpt2", "gpt_neo", "gptj", "opt")
_END = "<|endoftext|>"
#: The same of RoBERTa, whose special tokens stand around a text.
ROBERTA_CLASSES = ("RobertaTokenizer", "RobertaTokenizerFast")
ROBERTA_MODELS = ("roberta",)
_ROBERTA_TOKENS = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
    "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>",
}  # fmt: skip
_USUAL_CLASSES = {
    **dict.fromkeys(GPT2_MODELS, GPT2_CLASSES[0]),
    **dict.fromkeys(ROBERTA_MODELS, ROBERTA_CLASSES[0]),
}


def vocabulary_tokenizer(
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
    if not (vocab_file.is_file() and merges_file.is_file()):
        return None
    kind = settings.get("tokenizer_class")
    if kind is None:
        kind = _USUAL_CLASSES.get(str(read_json(folder / "config.json").get("model_type")))
    if kind not in (*CLASSES, *GPT2_CLASSES, *ROBERTA_CLASSES):
        return None
    is_gpt2, is_roberta = kind in GPT2_CLASSES, kind in ROBERTA_CLASSES
    if is_roberta:
        settings = {**_ROBERTA_TOKENS, **settings}
    if is_gpt2:
        settings = {**dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END), **settings}
    try:
        vocab, merges = BPE.read_file(str(vocab_file), str(merges_file))
        tokens = added_tokens(settings, added, vocab)
        vocab |= {token.content: index for index, token in tokens.items()}
        if len(set(vocab.values())) < len(vocab):
            raise ValueError("two tokens have the same id")
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: not a tokenizer: {reason}") from None
    if is_gpt2 or is_roberta:
        has_prefix = settings.get("add_prefix_space") is True
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = make_pre_tokenizer(PATTERNS["qwen2"])
    tokenizer.decoder = decoders.ByteLevel()
    # The vocabulary contains the added tokens, so their ids are kept.
    tokenizer.add_tokens([token for _, token in sorted(tokens.items())])
    first = token_text(settings.get("bos_token"))
    if is_gpt2 and settings.get("add_bos_token") is True and first in vocab:
        tokenizer.post_processor = text_and_pair((first, vocab[first]), None)
    if is_roberta:
        around = [token_text(settings[name]) for name in ("cls_token", "sep_token")]
        before, after = ((text, vocab[text]) if text in vocab else None for text in around)
        tokenizer.post_processor = text_and_pair(before, after)
    return tokenizer


def token_text(entry: Any) -> str | None:
    """The text of a token in a JSON file: a string, or an object with its `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def added_tokens(
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
