"""Text to tokens and back, and chat templates, as the checkpoint defines them."""

from __future__ import annotations

from typing import Any, Protocol

#: By name, the tags where reasoning begins and ends. Their tokens belong to the text, although some
#: checkpoints list them as special.
REASONING_TAGS = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
}


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None
    mask_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the checkpoint puts around a prompt (a BOS, say)."""
        ...

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token adds to the text; empty for special tokens. Concatenated, they are
        the UTF-8 text."""
        ...

    def token_text(self, token: int) -> str:
        """A printable name of the token, specials included."""
        ...

    def is_special(self, token: int) -> bool: ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the checkpoint's template writes it."""
        ...
