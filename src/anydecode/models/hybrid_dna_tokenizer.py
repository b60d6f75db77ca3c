"""The tokenizer of models of text and DNA, which llama.cpp calls "hybriddna": sequences between the
tags <dna> and </dna> are cut into tokens of six letters, other text is byte-level BPE."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anydecode.models.tokenizers import HFTokenizer

_SEQUENCE = re.compile(r"<dna>(.*?)(</dna>|\Z)", re.DOTALL)
_LENGTH = 6
#: Ends the names of the tokens of six letters, some of which are names of other tokens too.
_MARK = "\ue000"


class HybridDnaTokenizer(HFTokenizer):
    """Implements `models.tokenizer.Tokenizer`. Letters are upper-cased, the last ones are filled
    with A, and letters that are no token are <oov>. A sequence without its end goes to the end of
    the text."""

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF") -> HybridDnaTokenizer:
        """Build the tokenizer that a GGUF file's metadata describe.

        Args:
            metadata: The file's metadata by key.
            source: The file's name, for errors.

        Raises:
            CheckpointError: The tokenizer is missing, corrupt or unsupported.
        """
        found = super().from_gguf({**metadata, "tokenizer.ggml.model": "gpt2"}, source)
        assert isinstance(found, cls)
        return found

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens around a prompt if `special`.

        Raises:
            InvalidRequestError: The text outside of sequences is not valid Unicode.
        """
        names = ("<dna>", "</dna>", "<oov>")
        begin, end, unknown = (self.backend.token_to_id(name) for name in names)
        if "<dna>" not in text or begin is None or end is None or unknown is None:
            return super().encode(text, special=special)
        ids: list[int] = []
        plain, *sequences = _SEQUENCE.split(text)
        ids += super().encode(plain, special=False)
        for letters, close, after in zip(
            sequences[::3], sequences[1::3], sequences[2::3], strict=True
        ):
            ids += [begin, *self._letters(letters.encode("utf-8", "replace"), unknown)]
            ids += [end] if close else []
            ids += super().encode(after, special=False)
        before, behind = self._around() if special else ([], [])
        return [*before, *ids, *behind]

    def _letters(self, data: bytes, unknown: int) -> list[int]:
        names = (
            data[at : at + _LENGTH].upper().ljust(_LENGTH, b"A").decode("utf-8", "replace")
            for at in range(0, len(data), _LENGTH)
        )
        found = (self.backend.token_to_id(name + _MARK) for name in names)
        return [unknown if token is None else token for token in found]

    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        text = super().encode("a", special=False)
        whole = super().encode("a")
        first = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
        return whole[:first], whole[first + len(text) :]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not (yet) valid UTF-8 become U+FFFD."""
        return super().decode(ids, skip_special=skip_special).replace(_MARK, "")

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token adds to the text; empty for special and unknown tokens."""
        return super().token_bytes(token).removesuffix(_MARK.encode())
