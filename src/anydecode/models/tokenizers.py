"""Tokenizers of checkpoints, built on the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from anydecode.errors import AnydecodeError, CheckpointError, InvalidRequestError
from anydecode.models import chat
from anydecode.models.file_tokenizers import byte_alphabet, tokenizer_of_files
from anydecode.models.files import read_json, read_text, untrusted
from anydecode.models.gguf_tokenizer import tokenizer_from_gguf
from anydecode.models.limits import MAX_SIZE, MAX_TOKENS, integer
from anydecode.models.qwen2_tokenizer import token_text, vocabulary_tokenizer
from anydecode.models.tokenizer import MESSAGE_TAGS, REASONING_TAGS, TOOL_TAGS, end_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"

#: Tokens that end a turn in some family. A checkpoint often lists only one of those it uses.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")

#: Texts of the mask token in published diffusion models.
MASK_TOKENS = ("<|mask|>", "<|MASK|>", "<|mdm_mask|>")


class HFTokenizer:
    """Implements `models.tokenizer.Tokenizer` with the `tokenizers` library.

    Special tokens written out in a text are encoded as special tokens, because rendered chat
    templates contain them; this matters for callers that pass untrusted text as a prompt. A
    rendered chat already contains the template's BOS, if any: encode it with `special=False`.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        mask_id: int | None = None,
        templates: str | Mapping[str, str] | None = None,
        special_texts: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.backend = tokenizer
        # Some configs have -1 or another invalid id for "none".
        self.eos_ids = frozenset(id for id in eos_ids if 0 <= id < MAX_SIZE)
        self.bos_id = bos_id
        self.mask_id = mask_id
        self.special_texts = dict(special_texts or {})
        self._templates = {"default": templates} if isinstance(templates, str) else templates or {}
        self.chat_template: str | None = self._templates.get("default")
        #: The chat template for conversations with tools, if there is one of its own.
        self.tool_template: str | None = self._templates.get("tool_use")
        #: One more than the largest token id.
        self.vocab_size = _vocab_size(tokenizer) if vocab_size is None else vocab_size
        self._token_bytes: dict[int, bytes] = {}  # of the tokens that were asked for
        # Tables of tokens are indexed by id.
        integer("the largest token id of the tokenizer", self.vocab_size - 1, -1, MAX_TOKENS - 1)
        added = tokenizer.get_added_tokens_decoder()
        tags = TOOL_TAGS.union(*REASONING_TAGS.values())
        contents = {entry.content for entry in added.values()}
        beside = {tag for one in contents & MESSAGE_TAGS.keys() for tag in MESSAGE_TAGS[one]}
        self._special = frozenset(
            token
            for token, entry in added.items()
            if entry.special
            and entry.content not in tags
            and (entry.content not in beside or token in self.eos_ids)
        )
        self._byte_encoding, self.strips_first_space = _byte_encoding_of(tokenizer)
        decoder = tokenizer.decoder
        self._marks_spaces = decoder is not None and _SPACE in str(decoder.__getstate__(), "utf-8")

    @classmethod
    def from_folder(cls, folder: Path) -> HFTokenizer | None:
        """Load the tokenizer in `folder`: `tokenizer.json`, or else the vocab.json and merges.txt
        of a tokenizer of Qwen2 or GPT-2, a model of SentencePiece, or the ranks of Kimi or Qwen 1;
        None if there is none.

        Raises:
            CheckpointError: A file is corrupt.
        """
        path = folder / "tokenizer.json"
        settings = read_json(folder / "special_tokens_map.json")
        settings |= read_json(folder / "tokenizer_config.json")
        if path.is_file():
            with _library_calls(CheckpointError, f"{path}: not a tokenizer"):
                tokenizer = tokenizers.Tokenizer.from_file(str(path))
        else:
            added = read_json(folder / "added_tokens.json")
            built = vocabulary_tokenizer(folder, settings, added)
            built = built or tokenizer_of_files(folder, settings, added)
            if built is None:
                return None
            tokenizer = built
        # Training scripts save truncation and padding, which must not apply to prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        with _library_calls(CheckpointError, f"{folder}: the tokenizer cannot encode a text"):
            tokenizer.encode("a")
        texts = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")
            if (text := token_text(settings.get(name))) is not None
        }
        end = _token_id(tokenizer, texts.get("eos_token"))
        eos_ids = [] if end is None else [end]
        for file in ("generation_config.json", "config.json"):
            with untrusted(folder / file):
                eos_ids += end_tokens(read_json(folder / file))
        return cls(
            tokenizer,
            eos_ids=eos_ids,
            bos_id=_token_id(tokenizer, texts.get("bos_token")),
            mask_id=_mask_id(tokenizer, texts.get("mask_token"), folder),
            templates=_folder_templates(folder, settings),
            special_texts=texts,
        )

    @classmethod
    def from_transformers(cls, tokenizer: Any, ends: Iterable[int] = ()) -> HFTokenizer:
        """Wrap a fast tokenizer of `transformers` (one with a `backend_tokenizer`), whose texts end
        also at the tokens `ends`."""
        backend = tokenizer.backend_tokenizer
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token")
        texts = {name: str(text) for name in names if (text := getattr(tokenizer, name, None))}
        return cls(
            backend,
            eos_ids=[*ends, *end_tokens({"eos_token_id": tokenizer.eos_token_id})],
            bos_id=tokenizer.bos_token_id,
            mask_id=tokenizer.mask_token_id,
            templates=tokenizer.chat_template,
            special_texts=texts,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF") -> HFTokenizer:
        """Build the tokenizer that a GGUF file's metadata describe.

        Args:
            metadata: The file's metadata by key.
            source: The file's name, for errors.

        Raises:
            CheckpointError: The tokenizer is missing, corrupt or unsupported.
        """
        tokenizer = tokenizer_from_gguf(metadata, source)
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        ids: dict[str, int] = {}
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask"):
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int) and 0 <= token < len(tokens):
                ids[name] = token
        special = tokenizer.get_added_tokens_decoder()
        eos_ids = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
        for text in END_OF_TURN_TOKENS:
            token = tokenizer.token_to_id(text)
            if token is not None and token in special and special[token].special:
                eos_ids.append(token)
        short_names = {"unknown": "unk", "padding": "pad"}
        prefix = "tokenizer.chat_template"
        templates = {
            key[len(prefix) :].lstrip(".") or "default": text
            for key, text in metadata.items()
            if (key == prefix or key.startswith(prefix + ".")) and isinstance(text, str)
        }
        return cls(
            tokenizer,
            eos_ids=eos_ids,
            bos_id=ids.get("bos"),
            mask_id=ids.get("mask"),
            templates=templates,
            special_texts={f"{short_names.get(n, n)}_token": tokens[i] for n, i in ids.items()},
            vocab_size=len(tokens),
        )

    @property
    def is_writable(self) -> bool:
        """Whether it can be written as tokenizer.json. Rules in Python (PLaMo's) cannot."""
        try:
            self.backend.to_str()
        except Exception:  # of the library, which has no class of its own
            return False
        return True

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens around a prompt if `special`.

        Raises:
            InvalidRequestError: The text is not valid Unicode.
        """
        _check_unicode(text)
        with _library_calls(InvalidRequestError, "the tokenizer cannot encode this text"):
            ids: list[int] = self.backend.encode(text, add_special_tokens=special).ids
        return ids

    def encode_pair(
        self, first: str, second: str | None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids and token types of a text, or of a pair of texts, with their special tokens.

        Args:
            first: A text.
            second: The second text, if there is one.
            max_tokens: The number of tokens that is kept: the end of the last text is cut, not the
                special tokens. There are more if the rest alone has more.

        Raises:
            InvalidRequestError: A text is not valid Unicode.
        """
        texts = [first] if second is None else [first, second]
        for text in texts:
            _check_unicode(text)
        with _library_calls(InvalidRequestError, "the tokenizer cannot encode this text"):
            parts = [self.backend.encode(text, add_special_tokens=False) for text in texts]
            if max_tokens is not None:
                rest = self.backend.num_special_tokens_to_add(second is not None)
                rest += 0 if second is None else len(parts[0])
                if len(parts[-1]) > max(0, max_tokens - rest):
                    parts[-1].truncate(max(0, max_tokens - rest))
            second_part = parts[1] if len(parts) > 1 else None
            whole = self.backend.post_process(parts[0], second_part)
        return whole.ids, whole.type_ids

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not (yet) valid UTF-8 become U+FFFD. For a
        SentencePiece tokenizer that adds a space before a text, the first space is dropped."""
        if skip_special:
            ids = [token for token in ids if token not in self._special]
        with _library_calls(CheckpointError, "the tokenizer cannot decode these tokens"):
            text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token adds to the text; empty for special and unknown tokens."""
        data = self._token_bytes.get(token)
        if data is None:
            data = self._bytes_of(token)
            if 0 <= token < self.vocab_size:
                self._token_bytes[token] = data
        return data

    def _bytes_of(self, token: int) -> bytes:
        text = self.backend.id_to_token(token) if token >= 0 else None
        if text is None or token in self._special:
            return b""
        if self._byte_encoding == "byte_level":
            # Added tokens are stored as plain text, recognised by characters outside the alphabet.
            in_alphabet = all(character in _CHARACTER_BYTES for character in text)
            return bytes(map(_CHARACTER_BYTES.__getitem__, text)) if in_alphabet else text.encode()
        if self._byte_encoding == "sentencepiece":
            found = _BYTE_TOKEN.fullmatch(text)
            spaced = text.replace(_SPACE, " ") if self._marks_spaces else text
            return bytes([int(found[1], 16)]) if found else spaced.encode()
        return self.decode([token], skip_special=False).encode()

    def token_text(self, token: int) -> str:
        text = self.backend.id_to_token(token) if token >= 0 else None
        if text is None:
            return f"<{token}>"
        if token in self._special or self._byte_encoding == "other":
            return str(text)
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def is_special(self, token: int) -> bool:
        return token in self._special

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation with the checkpoint's chat template.

        Args:
            messages: Objects with `role` and `content`.
            add_generation_prompt: End with the start of an assistant message.
            **variables: Further variables of the template, such as `tools`.

        Raises:
            InvalidRequestError: There is no template, or it rejects the conversation.
        """
        template = chat.select_template(self._templates, variables)
        names = {**self.special_texts, **variables}
        return chat.render(template, messages, add_generation_prompt=add_generation_prompt, **names)


def _check_unicode(text: str) -> None:
    """Raise `InvalidRequestError` for a text that UTF-8 cannot represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "the text contains half of a surrogate pair and is not valid Unicode"
        ) from None


@contextmanager
def _library_calls(kind: type[AnydecodeError], what: str) -> Iterator[None]:
    """Raise `kind` for what the library raises: bare Exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{what}: {' '.join(str(error).split())[:200]}") from None
        raise


def _vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    """One more than the largest token id."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _token_id(tokenizer: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else tokenizer.token_to_id(text)


def _mask_id(tokenizer: tokenizers.Tokenizer, text: str | None, folder: Path) -> int | None:
    """The mask token: named by the tokenizer, else by the config, else one of `MASK_TOKENS`."""
    config_id = read_json(folder / "config.json").get("mask_token_id")
    token_ids = [_token_id(tokenizer, name) for name in (text, *MASK_TOKENS)]
    options = [
        token_ids[0],
        None if config_id is None else integer("mask_token_id", config_id, 0),
        *token_ids[1:],
    ]
    return next((token for token in options if token is not None), None)


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        return {
            entry["name"]: entry["template"]
            for entry in templates
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
    return templates if isinstance(templates, str) else None


_CHARACTER_BYTES = byte_alphabet()


def _byte_encoding_of(tokenizer: tokenizers.Tokenizer) -> tuple[str, bool]:
    """How tokens encode bytes ("byte_level", "sentencepiece" or "other"), and whether decoding
    drops the first space."""
    if tokenizer.decoder is None:
        return "other", False
    state = tokenizer.decoder.__getstate__()
    steps = [json.loads(state)]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["decoders"]
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if "Metaspace" in kinds:
        return "sentencepiece", kinds["Metaspace"].get("prepend_scheme") != "never"
    if "ByteFallback" in kinds or kinds.get("Replace", {}).get("pattern") == {"String": _SPACE}:
        strip = kinds.get("Strip", {})
        return "sentencepiece", strip.get("content") == " " and strip.get("start", 0) > 0
    return "other", False
