"""RWKV's tokenizer: the longest token, in bytes, at each place of the UTF-8 text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models import chat
from anydecode.models.files import read_json, read_text
from anydecode.models.limits import MAX_SIZE, MAX_TOKENS
from anydecode.models.qwen2_tokenizer import token_text
from anydecode.models.tokenizer import is_unicode

#: The vocabulary in a folder: lines with an id, a Python literal and its number of bytes.
_VOCABULARY = "rwkv_vocab_*.txt"
_LINE = re.compile(r"([0-9]{1,12}) (b?)('.*'|\".*\") ([0-9]{1,12})")
#: The id of an added token.
_ID = re.compile("[0-9]{1,12}")
#: Escapes in the tokens of GGUF files.
_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)", re.DOTALL)
_ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_NORMAL, _USER_DEFINED = 1, 4
#: The longest token; at each place of a text every length of tokens may be looked up.
MAX_TOKEN_BYTES = 1 << 10
#: The token that separates documents, which the vocabulary does not list.
_END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"
#: The template that llama.cpp names by this.
_TEMPLATES = {
    "rwkv-world": (
        "{% for message in messages %}"
        "{% set name = {'system': 'System', 'user': 'User'}.get(message['role'], 'Assistant') %}"
        "{{ name + ': ' + message['content'].strip() + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
}


class RwkvTokenizer:
    """Implements `models.tokenizer.Tokenizer`.

    Special tokens written out in a text are encoded as special tokens.

    Args:
        tokens: The bytes of each token that is part of texts, by id.
        special: The texts of the special tokens, by id.
        vocab_size: The number of token ids.
        eos_ids: The tokens that end a generation.
        bos_id: The token that starts a text, if any.
        templates: The chat template, or several by name.
        special_texts: The texts of the special tokens with a role, by role ("eos_token").
    """

    def __init__(
        self,
        tokens: Mapping[int, bytes],
        special: Mapping[int, str],
        *,
        vocab_size: int,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        templates: str | Mapping[str, str] | None = None,
        special_texts: Mapping[str, str] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(token for token in eos_ids if 0 <= token < MAX_SIZE)
        self.bos_id = bos_id
        self.mask_id: int | None = None
        self.special_texts = dict(special_texts or {})
        named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._templates = {name: _TEMPLATES.get(text, text) for name, text in named.items()}
        self.chat_template: str | None = self._templates.get("default")
        #: The chat template for conversations with tools, if there is one of its own.
        self.tool_template: str | None = self._templates.get("tool_use")
        self._tokens, self._special = dict(tokens), dict(special)
        self._ids = {piece: token for token, piece in tokens.items()}
        lengths: dict[bytes, set[int]] = {}
        for piece in self._ids:
            lengths.setdefault(piece[:2], set()).add(len(piece))
        #: The lengths of the tokens that start with two bytes, the longest first.
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        self._special_ids = {text: token for token, text in special.items() if text}
        self._special_texts = sorted(self._special_ids, key=len, reverse=True)

    @classmethod
    def from_folder(cls, folder: Path) -> RwkvTokenizer | None:
        """Load the tokenizer in `folder`; None if it has no vocabulary of RWKV.

        Raises:
            CheckpointError: A file is corrupt.
        """
        path = next(iter(sorted(folder.glob(_VOCABULARY))), None)
        if path is None:
            return None
        tokens = _read_vocabulary(path)
        settings = read_json(folder / "special_tokens_map.json")
        settings |= read_json(folder / "tokenizer_config.json")
        special = _added_tokens(settings, read_json(folder / "added_tokens.json"), tokens, folder)
        ids = {piece: token for token, piece in tokens.items()}
        ids |= {text.encode("utf-8", "replace"): token for token, text in special.items()}
        texts = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := token_text(settings.get(name))) is not None
        }
        bos, eos = (
            ids.get(texts.get(name, _END_OF_TEXT).encode("utf-8", "replace"))
            for name in ("bos_token", "eos_token")
        )
        file = folder / "chat_template.jinja"
        template = read_text(file) if file.is_file() else settings.get("chat_template")
        return cls(
            tokens,
            special,
            vocab_size=1 + max((*tokens, *special)),
            eos_ids=[0] if eos is None else [0, eos],
            bos_id=bos,
            templates=template if isinstance(template, str) else None,
            special_texts=texts,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str) -> RwkvTokenizer:
        """Build the tokenizer that a GGUF file's metadata describe.

        Args:
            metadata: The file's metadata by key.
            source: The file's name, for errors.

        Raises:
            CheckpointError: The tokenizer is missing or corrupt.
        """
        texts = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise CheckpointError(f"{source}: the file holds no list of tokens")
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(texts))
        if not isinstance(types, list) or len(types) != len(texts) or not texts:
            raise CheckpointError(f"{source}: the tokenizer's token types do not match its tokens")
        tokens, special = {}, {}
        for token, (text, kind) in enumerate(zip(texts, types, strict=True)):
            if kind in (_NORMAL, _USER_DEFINED):
                tokens[token] = _ESCAPE.sub(_unescaped, text.encode())
            else:
                special[token] = text
        _check_tokens(tokens, source)
        ids: dict[str, int] = {}
        for name in ("bos", "eos", "eot", "eom"):
            index = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(index, int) and 0 <= index < len(texts):
                ids[name] = index
        template = metadata.get("tokenizer.chat_template")
        return cls(
            tokens,
            special,
            vocab_size=len(texts),
            eos_ids=[ids[name] for name in ("eos", "eot", "eom") if name in ids],
            bos_id=ids.get("bos"),
            templates=template if isinstance(template, str) else None,
            special_texts={f"{n}_token": texts[ids[n]] for n in ("bos", "eos") if n in ids},
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; a prompt gets no special tokens.

        Raises:
            InvalidRequestError: The text is not valid Unicode, or has a byte that is no token.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the text contains half of a surrogate pair and is not valid Unicode"
            ) from None
        ids: list[int] = []
        parts = [text]
        for whole in self._special_texts:
            parts = [piece for part in parts for piece in self._split(part, whole)]
        for part in parts:
            if part in self._special_ids:
                ids.append(self._special_ids[part])
            else:
                self._encode_bytes(part.encode(), ids)
        return ids

    def _split(self, text: str, special: str) -> list[str]:
        """`text` in parts, of which each `special` is one; special tokens stay whole."""
        if text in self._special_ids or special not in text:
            return [text]
        first, *others = text.split(special)
        return [first, *(part for other in others for part in (special, other))]

    def _encode_bytes(self, data: bytes, ids: list[int]) -> None:
        start = 0
        while start < len(data):
            for length in (*self._lengths.get(data[start : start + 2], ()), 1):
                piece = data[start : start + length]
                token = self._ids.get(piece)
                if token is not None:
                    ids.append(token)
                    start += len(piece)
                    break
            else:
                raise InvalidRequestError(
                    f"the byte {data[start]:#04x} of the text is no token of this vocabulary"
                )

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not (yet) valid UTF-8 become U+FFFD."""
        pieces = [
            b"" if token in self._special and skip_special else self._piece(token) for token in ids
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        return self._tokens.get(token, b"")

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token adds to the text; empty for special and unknown tokens."""
        return self._tokens.get(token, b"")

    def token_text(self, token: int) -> str:
        """A printable name of the token, specials included."""
        if token not in self._special and token not in self._tokens:
            return f"<{token}>"
        return self._piece(token).decode("utf-8", "backslashreplace")

    def is_special(self, token: int) -> bool:
        """Whether the token is no part of texts."""
        return token in self._special

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation rendered with the checkpoint's chat template.

        Raises:
            InvalidRequestError: There is no template, or it rejects the conversation.
        """
        template = chat.select_template(self._templates, variables)
        names = {**self.special_texts, **variables}
        return chat.render(template, messages, add_generation_prompt=add_generation_prompt, **names)


def _unescaped(found: re.Match[bytes]) -> bytes:
    escape = found[1]
    if len(escape) == 3:
        return bytes([int(escape[1:], 16)])
    return _ESCAPES.get(escape, escape)


def _read_vocabulary(path: Path) -> dict[int, bytes]:
    """The bytes of each token by id."""
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.rstrip("\r"))
        piece = None if found is None else _literal(found[2] + found[3])
        if found is None or piece is None or len(piece) != int(found[4]):
            raise CheckpointError(f"{path}, line {number}: not an id, a token and its length")
        token = int(found[1])
        if token in tokens or not 0 <= token < MAX_TOKENS:
            raise CheckpointError(
                f"{path}, line {number}: the id is {token}; allowed is a new one below {MAX_TOKENS}"
            )
        tokens[token] = piece
    _check_tokens(tokens, str(path))
    return tokens


def _literal(text: str) -> bytes | None:
    """The bytes of a literal; None if it is not one string."""
    if "\\" not in text and text[0] != "b" and text[0] not in text[1:-1]:
        return text[1:-1].encode()
    try:
        value = ast.literal_eval(text)
        return value.encode() if isinstance(value, str) else bytes(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _check_tokens(tokens: Mapping[int, bytes], source: str) -> None:
    if not tokens:
        raise CheckpointError(f"{source}: the vocabulary is empty")
    if b"" in tokens.values() or len(set(tokens.values())) < len(tokens):
        raise CheckpointError(f"{source}: a token is empty, or two tokens are the same")
    longest = max(map(len, tokens.values()))
    if longest > MAX_TOKEN_BYTES:
        raise CheckpointError(
            f"{source}: a token has {longest} bytes; allowed are up to {MAX_TOKEN_BYTES}"
        )


def _added_tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any], tokens: Mapping[int, bytes], folder: Path
) -> dict[int, str]:
    """The texts of special tokens by id. Texts that the vocabulary has are tokens of it, whatever
    ids the slow tokenizer class gives them."""
    entries = settings.get("added_tokens_decoder") or {
        str(index): {"content": text} for text, index in added.items()
    }
    special, known = {0: _END_OF_TEXT}, set(tokens.values())
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"{folder}: added_tokens_decoder is no object")
    for index, entry in entries.items():
        text = token_text(entry)
        has_id = _ID.fullmatch(str(index)) is not None and int(index) < MAX_TOKENS
        if text is None or not is_unicode(text) or not has_id:
            raise CheckpointError(
                f"{folder}: the added token {str(index)[:20]!r} has no valid text, or no valid id"
            )
        if text.encode("utf-8", "replace") not in known and int(index) not in tokens:
            special[int(index)] = text
    return {token: text for token, text in special.items() if token not in tokens}
