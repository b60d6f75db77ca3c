"""Models and tokenizers for tests of the server."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.models import chat
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel

#: A template that shows the last message, and opens the reasoning unless it is turned off.
THINKING = (
    "{{ messages[-1].content }}"
    "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
)
#: The arguments of a tool.
TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
}


class TemplateTokenizer(ByteTokenizer):
    """Bytes, and a chat template in Jinja."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **names: Any
    ) -> str:
        assert self.chat_template is not None
        return chat.render(
            self.chat_template, messages, add_generation_prompt=add_generation_prompt, **names
        )


def answering(answer: bytes, tokenizer: ByteTokenizer | None = None) -> LLM:
    """A model that gives `answer` to the message "abc", and then ends."""
    tokenizer = tokenizer or ByteTokenizer()
    start = len(tokenizer.render_chat([{"role": "user", "content": "abc"}]))

    def script(path: tuple[int, ...]) -> Any:
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        position = len(path) - start
        logits[answer[position] if 0 <= position < len(answer) else EOS] = 30.0
        return logits

    return LLM(ScriptedModel(script), tokenizer=tokenizer)
