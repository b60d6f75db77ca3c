"""The tokenizers of GGUF files without merges: WordPiece (BERT) and unigram models (XLM-RoBERTa,
PLaMo)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import (
    PreTokenizedString,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from anydecode.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_SPACE = "▁"
#: Of PLaMo, in ten thousandths.
_UNKNOWN_COST = 10**7
_CONTINUED = "##"
#: RoBERTa and XLM-RoBERTa have two of these between the texts of a pair, and no token types.
_DOUBLED = "</s>"


def plain_words(tokens: list[str], types: list[int]) -> list[str]:
    """The texts of a WordPiece vocabulary as BERT writes them: files mark the start of a word, BERT
    marks the other parts."""
    return _marked_otherwise(tokens, types, _SPACE, _CONTINUED)


def marked_words(tokens: list[str], types: list[int]) -> list[str]:
    """The reverse of `plain_words`: the texts of a WordPiece vocabulary as files have them."""
    return _marked_otherwise(tokens, types, _CONTINUED, _SPACE)


def _marked_otherwise(tokens: list[str], types: list[int], mark: str, other: str) -> list[str]:
    """The texts without `mark` where they have it, and with `other` where they have not."""
    return [
        token
        if kind == _CONTROL
        else token[len(mark) :]
        if token.startswith(mark)
        else other + token
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


class _BestPieces:
    """Cuts a text where the sum of its pieces' scores is highest; of equal ways it takes that with
    the longest first piece, where the `tokenizers` library's unigram model takes that with the
    longest last one. A character without a token costs `_UNKNOWN_COST`."""

    def __init__(self, scores: dict[str, int]) -> None:
        self._scores = scores
        self._longest = max(map(len, scores), default=1)

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        """Called by the library."""
        text.split(self._split)

    def _split(self, _: int, part: Any) -> list[Any]:
        ends = self.ends(str(part))
        cuts, at = [], 0
        while at < len(ends):
            cuts.append(part[at : ends[at]])
            at = ends[at]
        return cuts

    def ends(self, text: str) -> list[int]:
        """Where the piece ends that starts at each character, if one does."""
        best, ends = [0] * (len(text) + 1), [0] * len(text)
        for start in reversed(range(len(text))):
            best[start], ends[start] = best[start + 1] - _UNKNOWN_COST, start + 1
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                score = self._scores.get(text[start:end])
                if score is not None and best[end] + score >= best[start]:
                    best[start], ends[start] = best[end] + score, end
        return ends


def plamo(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    """The unigram model of PLaMo 2 and 3: texts are not changed, unknown characters are written as
    bytes, and scores are rounded to 1e-4."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer has no score for each token")
    if _UNKNOWN not in types:
        raise CheckpointError(f"{source}: the tokenizer has no token for unknown words")
    found = {
        token: round(float(np.float32(score) * np.float32(1e4)))
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind != _BYTE and token and math.isfinite(score)
    }
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=tokens[types.index(_UNKNOWN)],
        byte_fallback=True,
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(_BestPieces(found))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
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
    # In a template, a colon stands before a type.
    names = {text: text.replace(":", "-") for text, _ in known}
    start = "" if first is None else f"{names[first[0]]} "
    end = "" if last is None else f" {names[last[0]]}"
    if last is None or last[0] == _DOUBLED:
        pair = f"{start}$A{end}{end} $B{end}"
    else:
        pair = f"{start}$A{end} $B:1{end}:1"
    special = [
        {"id": names[text], "ids": [token], "tokens": [text]} for text, token in dict(known).items()
    ]
    return processors.TemplateProcessing(
        single=f"{start}$A{end}", pair=pair, special_tokens=special
    )
