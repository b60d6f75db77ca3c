"""The tokenizer interface: text to tokens and back, and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from anydecode.models.limits import refusal

#: By name, the tags that start and end reasoning. Their tokens are part of the text, although some
#: checkpoints mark them as special.
REASONING_TAGS = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar": ("<|think|>", "<|end|><|begin|>assistant"),
}
#: Texts by which chat templates name the tags of the reasoning, where it is not the closing one.
REASONING_MARKERS = {"solar": "<|begin|>assistant<|think|>"}
#: Tokens of the tool-call formats that checkpoints mark as special. They are part of the text too.
TOOL_TAGS = frozenset(
    {
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool_call>", "</tool_call>", "<|tool_call|>",
        "<|/tool_call|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<arg_key>",
        "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<start_function_call>",
        "<end_function_call>", "<escape>", "<|channel|>", "<|constrain|>", "<|message|>",
        "<|start|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<seed:tool_call>",
        "</seed:tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call_start|>",
        "<minimax:tool_call>", "</minimax:tool_call>", "｜DSML｜", "<|START_ACTION|>",
        "<|END_ACTION|>", "<tool_calls>", "</tool_calls>", "<|tools_prefix|>", "<|tools_suffix|>",
        "<|message_sep|>", "<|role_sep|>", "｜GCML｜", "<|tool_calls|>",
        "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>",
    }
)  # fmt: skip
#: Tokens that are part of the text beside another one, which stands first. In other families they
#: end the answer.
MESSAGE_TAGS = {"<|channel|>": ("<|end|>",)}


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def end_tokens(config: Mapping[str, Any]) -> list[int]:
    """The tokens at which a `config.json` or `generation_config.json` says that a text ends.

    Raises:
        ConfigError: They are no integers.
    """
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise refusal("eos_token_id", value, "an integer or a list of integers")
    return ids


class Tokenizer(Protocol):
    """The tokenizer interface that the engine uses.

    Attributes:
        vocab_size: The number of token ids.
        eos_ids: The tokens that end a generation.
        bos_id: The token that starts a text, if any.
        mask_id: The mask token of a diffusion model, if any.
        chat_template: The Jinja source of the default chat template, if any.
    """

    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None
    mask_id: int | None
    chat_template: str | None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds the special tokens that the checkpoint puts around a prompt,
        such as BOS."""
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
        """The conversation rendered with the checkpoint's chat template."""
        ...
