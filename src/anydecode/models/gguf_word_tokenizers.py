"""The tokenizers of encoders in GGUF files: WordPiece (BERT) and unigram models (XLM-RoBERTa)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from anydecode.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_SPACE = "▁"
_CONTINUED = "##"
#: RoBERTa and XLM-RoBERTa have two of these between the texts of a pair, and no token types.
_DOUBLED = "</s>"


def plain_words(tokens: list[str], types: list[int]) -> list[str]:
    """The texts of a WordPiece vocabulary as BERT writes them: files mark the start of a word, BERT
    marks the other parts."""
    return [
        token
        if kind == _CONTROL
        else token[len(_SPACE) :]
        if token.startswith(_SPACE)
        else _CONTINUED + token
        for token, kind in zip(tokens, types, strict=True)
    ]


def word_piece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    """BERT's tokenizer; `tokens` are those of `plain_words`. Where a file does not say whether
    texts are lowercased, they are if no token has an upper-case letter."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    known = isinstance(unknown, int) and 0 <= unknown < len(tokens)
    text = tokens[unknown] if known and unknown is not None else "[UNK]"
    vocab = {token: index for index, token in enumerate(tokens)}
    if text not in vocab:
        raise CheckpointError(f"{source}: the tokenizer has no token for unknown words")
    is_cased = any(
        kind == _NORMAL and token != token.lower() and not token.startswith("[")
        for token, kind in zip(tokens, types, strict=True)
    )
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=text))
    lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase", not is_cased)
    strip_accents = metadata.get("tokenizer.ggml.normalizer.strip_accents", lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(lowercase), strip_accents=bool(strip_accents)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    """The unigram model of SentencePiece, with the normalisation that the file stores."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer has no score for each token")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        if _UNKNOWN not in types:
            raise CheckpointError(f"{source}: the tokenizer has no token for unknown words")
        unknown = types.index(_UNKNOWN)
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, False))
    steps: list[normalizers.Normalizer] = []
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(entry & 0xFF for entry in charsmap)))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if has_prefix:
        steps.append(normalizers.Prepend(" "))  # also before a space that is kept
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    scheme = "always" if has_prefix else "never"
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def encoder_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, tuple[str, int]]:
    """The tokens before ("bos") and after ("eos") a text of BERT, with their ids: the
    classification token and the separator, which old files leave out."""
    found = {}
    names = {"bos": ("cls", "bos", "[CLS]"), "eos": ("seperator", "eos", "[SEP]")}  # as spelt there
    for place, (name, other, text) in names.items():
        ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in (name, other)]
        ids.append(tokens.index(text) if text in tokens else None)
        for token in ids:
            if isinstance(token, int) and 0 <= token < len(tokens):
                found[place] = tokens[token], token
                break
    return found


def text_and_pair(first: tuple[str, int] | None, last: tuple[str, int] | None) -> Any:
    """The processor that adds special tokens around a text, and around a pair of texts; None
    without tokens.

    Args:
        first: The token before a text, and its id.
        last: The token after it, which also separates a pair.
    """
    known = [token for token in (first, last) if token is not None]
    if not known:
        return None
    start = "" if first is None else f"{first[0]} "
    end = "" if last is None else f" {last[0]}"
    if last is None or last[0] == _DOUBLED:
        pair = f"{start}$A{end}{end} $B{end}"
    else:
        pair = f"{start}$A{end} $B:1{end}:1"
    return processors.TemplateProcessing(
        single=f"{start}$A{end}", pair=pair, special_tokens=list(dict(known).items())
    )
