"""Vocabularies without merges as the metadata of a GGUF file: those of BERT's and XLM-RoBERTa's
tokenizers. `models.gguf_word_tokenizers` reads them."""

from __future__ import annotations

import base64
from typing import Any

from anydecode.errors import CheckpointError
from anydecode.models.gguf_tokenizer import CONTROL, UNKNOWN
from anydecode.models.gguf_word_tokenizers import marked_words
from anydecode.models.tokenizers import HFTokenizer
from anydecode.quantization.gguf import Value

_CONTINUED = "##"
#: Of tokens that a unigram model does not have.
_NO_SCORE = -1e4


def word_pieces(
    state: dict[str, Any], tokens: list[str], types: list[int], source: str
) -> dict[str, Value]:
    """The metadata of BERT's tokenizer.

    Args:
        state: The tokenizer as in tokenizer.json.
        tokens: The tokens by id.
        types: Their types.
        source: The name of the repository, for errors.

    Raises:
        CheckpointError: Parts of words are marked in another way than BERT's.
    """
    prefix = state["model"].get("continuing_subword_prefix", _CONTINUED)
    if prefix != _CONTINUED:
        raise CheckpointError(
            f"{source}: its tokenizer marks parts of words by {prefix!r}; GGUF files hold those"
            f" that mark them by {_CONTINUED!r}"
        )
    types = [CONTROL if kind == UNKNOWN else kind for kind in types]
    normalizer = state["normalizer"] or {}
    lowercase = bool(normalizer.get("lowercase"))
    strips = normalizer.get("strip_accents")
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": marked_words(tokens, types),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": lowercase if strips is None else bool(strips),
    }


def unigrams(
    tokenizer: HFTokenizer,
    state: dict[str, Any],
    tokens: list[str],
    types: list[int],
    adds_space: bool,
) -> dict[str, Value]:
    """The metadata of a unigram model of SentencePiece.

    Args:
        tokenizer: The tokenizer.
        state: The same as in tokenizer.json.
        tokens: The tokens by id.
        types: Their types.
        adds_space: Whether it puts a space in front of a text.
    """
    scores = [float(score) for _, score in state["model"]["vocab"]]
    joint, spaced = (tokenizer.encode(text, special=False) for text in ("a a", "a  a"))
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores + [_NO_SCORE] * (len(tokens) - len(scores)),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": adds_space,
        "tokenizer.ggml.remove_extra_whitespaces": joint == spaced,
    }
    for step in _steps(state["normalizer"]):
        if step["type"] == "Precompiled":
            found["tokenizer.ggml.precompiled_charsmap"] = base64.b64decode(
                step["precompiled_charsmap"]
            )
    return found


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    return list(normalizer.get("normalizers", [normalizer]))
