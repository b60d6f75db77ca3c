"""The tokenizer of a repository as the metadata of a GGUF file.

A file has the vocabulary and the merges, but the rule that splits a text into words only by its
name: the name is that of the rule which splits some hundred strings in the same way.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from anydecode.errors import CheckpointError
from anydecode.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    IGNORE_MERGES,
    NFC,
    NORMAL,
    PATTERNS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    make_pre_tokenizer,
)
from anydecode.models.rwkv_tokenizer import RwkvTokenizer
from anydecode.models.tokenizers import HFTokenizer
from anydecode.quantization.gguf import Value
from anydecode.quantization.gguf_word_vocabulary import unigrams, word_pieces

_SPACE = "▁"
#: The models of the `tokenizers` library that are written.
_KINDS = ("BPE", "WordPiece", "Unigram")
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
#: Below the scores of all tokens that are made by merges.
_LOWEST_SCORE = -1e9
#: Characters of the strings that are compared: those that pre-tokenizers tell apart.
_CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n\t\r.,:;!?'\"()[]{}<>/\\|-_+="
    "*&^%$#@~`éÉßœčλΛдДאשعمहिन्दीไทยខ្មែរ日本語漢字ひらカナ中文한국어²½Ⅷ٣👍🎉\u200d\u00a0\u3000，。！"
)
_WORDS = (
    *("the", "The", "HTTPServer", "don't", "I'LL", "we've", "x1", "2024", "1234567", "3.14"),
    *("    ", "\n\n", "\r\n", " \n ", "\t\t", "//", "...", "-->", "foo_bar", "naïve", "Straße"),
    *("мир", "日本語"),
)
#: Special tokens, and their names in the keys of files.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "mask": "mask"}
_NUM_STRINGS = 400
_NUM_TOKENS = 300


def vocabulary(tokenizer: HFTokenizer, num_rows: int, source: str) -> dict[str, Value]:
    """The metadata of a tokenizer.

    Args:
        tokenizer: The tokenizer.
        num_rows: Rows of the model's embedding. Those without a token get an unused one.
        source: The name of the repository, for errors.

    Raises:
        CheckpointError: A GGUF file cannot hold this tokenizer.
    """
    if not tokenizer.is_writable:
        raise CheckpointError(f"{source}: the rules of its tokenizer have no form in GGUF files")
    state: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model["type"] not in _KINDS:
        raise CheckpointError(
            f"{source}: tokenizers of type {model['type']} are not written to GGUF files;"
            f" supported are {', '.join(_KINDS)}"
        )
    tokens, types = _tokens(tokenizer, state, num_rows, source)
    found: dict[str, Value]
    if model["type"] == "WordPiece":
        found = word_pieces(state, tokens, types, source)
    elif model["type"] == "Unigram":
        found = unigrams(tokenizer, state, tokens, types, _adds_space(tokenizer.backend))
    elif _is_byte_level(state):
        found = {
            "tokenizer.ggml.model": "gpt2",
            **_pre_tokenizer(tokenizer.backend, model, source),
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(model)],
        }
    else:
        found = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": _scores(tokens, _merges(model)),
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.add_space_prefix": _adds_space(tokenizer.backend),
        }
    found |= _special_tokens(tokenizer, source, model["type"] == "WordPiece")
    templates = {"": tokenizer.chat_template, ".tool_use": tokenizer.tool_template}
    for name, template in templates.items():
        if template is not None:
            found[f"tokenizer.chat_template{name}"] = template
    _compare(tokenizer, HFTokenizer.from_gguf(found, source), source)
    return found


def rwkv_vocabulary(tokenizer: RwkvTokenizer, num_rows: int, source: str) -> dict[str, Value]:
    """The same of RWKV's tokenizer, which has no merges. Bytes of tokens are written as those of
    literals of Python."""
    if tokenizer.vocab_size > num_rows:
        raise _too_many_tokens(tokenizer.vocab_size, num_rows, source)
    tokens, types = [], []
    for token in range(num_rows):
        piece, is_special = tokenizer.token_bytes(token), tokenizer.is_special(token)
        text = tokenizer.token_text(token) if is_special else repr(piece)[2:-1]
        tokens.append(text or f"[PAD{token}]")
        types.append(CONTROL if is_special else NORMAL if piece else UNUSED)
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    ends = zip(("eos", "eot", "eom"), sorted(tokenizer.eos_ids), strict=False)
    found |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ends}
    if tokenizer.bos_id is not None:
        found["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _too_many_tokens(count: int, num_rows: int, source: str) -> CheckpointError:
    """The error for a tokenizer with more tokens than the embedding has rows."""
    return CheckpointError(
        f"{source}: the tokenizer has {count} tokens, the embedding {num_rows} rows; a GGUF file"
        " needs a row for every token"
    )


def _tokens(
    tokenizer: HFTokenizer, state: dict[str, Any], num_rows: int, source: str
) -> tuple[list[str], list[int]]:
    """The tokens and their types by id."""
    if tokenizer.vocab_size > num_rows:
        raise _too_many_tokens(tokenizer.vocab_size, num_rows, source)
    tokens = [f"[PAD{index}]" for index in range(num_rows)]
    types = [UNUSED] * num_rows
    model = state["model"]
    has_bytes = bool(model.get("byte_fallback"))
    vocab = model["vocab"]
    if model["type"] == "Unigram":
        vocab = {text: index for index, (text, _) in enumerate(vocab)}
    for text, index in vocab.items():
        tokens[index] = text
        is_byte = has_bytes and text in _BYTE_TOKENS
        is_unknown = text == model.get("unk_token") or index == model.get("unk_id")
        types[index] = BYTE if is_byte else UNKNOWN if is_unknown else NORMAL
    for added in state["added_tokens"]:
        index, text = added["id"], added["content"]
        if types[index] == UNKNOWN:
            continue
        # The texts of such tokens are those of a text, where marks are spaces.
        tokens[index] = text if added["special"] else text.replace(_SPACE, " ")
        types[index] = CONTROL if added["special"] else USER_DEFINED
    return tokens, types


def _merges(model: dict[str, Any]) -> list[list[str]]:
    return [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]


def _is_byte_level(state: dict[str, Any]) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(state["decoder"], "decoders"))


def _parts(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a sequence of steps."""
    if step is None:
        return []
    return [x for part in step[key] for x in _parts(part, key)] if key in step else [step]


def _pre_tokenizer(backend: Tokenizer, model: dict[str, Any], source: str) -> dict[str, Value]:
    """The name of the rule that splits texts as `backend` does. Where there are no merges, it is
    of no account."""
    ignores = bool(model.get("ignore_merges"))
    if not model["merges"]:
        return {"tokenizer.ggml.pre": "default"}
    texts = [unicodedata.normalize("NFC", text) for text in _strings()]
    own = [_split(backend.pre_tokenizer, text) for text in texts]
    is_nfc = "NFC" in str(backend.normalizer)
    seen: dict[tuple[str, ...], bool] = {}
    for patterns in PATTERNS.values():
        if patterns not in seen:
            rule = make_pre_tokenizer(patterns)
            equal = (_split(rule, x) == y for x, y in zip(texts, own, strict=True))
            seen[patterns] = all(equal)
    names = [name for name, patterns in PATTERNS.items() if seen[patterns]]
    if not names:
        raise CheckpointError(
            f"{source}: llama.cpp has no name for the rule by which its tokenizer splits texts"
        )
    name = min(names, key=lambda x: ((x in IGNORE_MERGES) != ignores, (x in NFC) != is_nfc))
    found: dict[str, Value] = {"tokenizer.ggml.pre": name}
    if (name in NFC) != is_nfc:
        found["tokenizer.ggml.normalizer.nfc"] = is_nfc
    return found


def _split(rule: Any, text: str) -> list[str]:
    return [text] if rule is None else [piece for piece, _ in rule.pre_tokenize_str(text)]


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores by which the merges are made in their order: those of earlier merges are higher."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    return [-float(ranks[token]) if token in ranks else _LOWEST_SCORE for token in tokens]


def _adds_space(backend: Tokenizer, text: str = "a") -> bool:
    """Whether the tokenizer puts a space in front of a text."""
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    return _split(backend.pre_tokenizer, normal)[0].startswith(_SPACE + text.replace(" ", _SPACE))


def _special_tokens(tokenizer: HFTokenizer, source: str, is_word_piece: bool) -> dict[str, Value]:
    """The ids of special tokens, and whether they are added to a text. Those around a text of BERT
    have names of their own."""
    found: dict[str, Value] = {}
    ids: dict[str, int] = {}
    plain, whole = (tokenizer.encode("a", special=special) for special in (False, True))
    for name, key in _SPECIAL.items():
        text = tokenizer.special_texts.get(f"{name}_token")
        token = None if text is None else tokenizer.backend.token_to_id(text)
        if token is None and name in ("bos", "eos") and whole[1:-1] == plain:
            token = whole[0 if name == "bos" else -1]  # those of encoders: [CLS] and [SEP]
            key = "seperator" if is_word_piece and name == "eos" else key  # as spelt there
        if token is not None:
            ids[name] = token
            found[f"tokenizer.ggml.{key}_token_id"] = token
    if is_word_piece:
        if whole != [ids.get("bos"), *plain, ids.get("eos")]:
            raise _other_tokens(source)
        return found
    others = sorted(tokenizer.eos_ids - {ids.get("eos")})
    names = (["eos"] if "eos" not in ids else []) + ["eot", "eom"]
    for name, token in zip(names, others, strict=False):
        ids.setdefault(name, token)
        found[f"tokenizer.ggml.{name}_token_id"] = token
    adds_bos = whole[:1] == [ids.get("bos")] and whole[1 : 1 + len(plain)] == plain
    adds_eos = len(whole) > len(plain) and whole[-1:] == [ids.get("eos")]
    if len(whole) != len(plain) + adds_bos + adds_eos:
        raise _other_tokens(source)
    found["tokenizer.ggml.add_bos_token"] = adds_bos
    found["tokenizer.ggml.add_eos_token"] = adds_eos
    return found


def _other_tokens(source: str) -> CheckpointError:
    return CheckpointError(
        f"{source}: the tokenizer adds other tokens to a text than one at each end"
    )


def _strings() -> Iterator[str]:
    """Strings of characters and words that pre-tokenizers tell apart."""
    generator = random.Random(0)
    for index in range(_NUM_STRINGS):
        parts = _WORDS if index % 2 else _CHARACTERS
        joint = generator.choice(("", " ", "  ")) if index % 2 else ""
        yield joint.join(generator.choices(parts, k=generator.randint(1, 24)))


def _compare(own: HFTokenizer, other: HFTokenizer, source: str) -> None:
    """Raise CheckpointError if the tokenizers differ on strings, and on texts of tokens.

    Tokenizers of the kind Metaspace put no space in front of a text that begins with one, unlike
    SentencePiece and llama.cpp: such texts are compared without it. Unigram models are compared
    without the spaces at both ends, which SentencePiece leaves out.
    """
    is_unigram = isinstance(own.backend.model, Unigram)
    skips = _adds_space(own.backend) and not _adds_space(own.backend, " a")
    generator = random.Random(1)
    count = len(own.backend.get_vocab(with_added_tokens=False))
    ids = [generator.choices(range(count), k=4) for _ in range(_NUM_TOKENS)]
    for text in (*_strings(), *(own.decode(few) for few in ids)):
        text = text.strip(" ") if is_unigram else text.lstrip(" ") if skips else text
        if own.encode(text) != other.encode(text):
            raise CheckpointError(
                f"{source}: its tokenizer has no form in GGUF files: {text[:40]!r} would become"
                " other tokens"
            )
