"""Text that a model writes itself, and its hidden states: what heads and drafters learn from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.models.tokenizer import Tokenizer
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Rows scored per pass.
CHUNK = 128
#: Most tokens of a prompt of one line and of one of many lines, and the top-p of their sampling.
SHORT_TURN, LONG_TURN, TOP_P = 48, 256, 0.95


class StateReader(Decoder):
    """Generates nothing; stores the prompt's hidden states after given numbers of layers.

    Attributes:
        states: float32 `[rows, hidden_size]` by number of layers.
    """

    def __init__(self, layers: Seq[int]) -> None:
        self.layers = tuple(sorted(set(layers)))
        self.states: dict[int, np.ndarray] = {}

    def decode(self, sequence: Sequence) -> Decoding:
        sequence.kv_cache().truncate(0)  # a cached prefix has keys and values, but no states
        parts: dict[int, list[np.ndarray]] = {layer: [] for layer in self.layers}
        for start in range(0, len(sequence.prompt), CHUNK):
            part = sequence.prompt[start : start + CHUNK]
            score = sequence.score(part, rows="all", hidden=self.layers)
            score.groups[0][-1].logits = False
            scores = yield score
            for layer, rows in parts.items():
                rows.append(scores.hidden[layer].copy())
        self.states = {layer: np.concatenate(rows) for layer, rows in parts.items()}


def read_states(llm: LLM, tokens: Seq[int], layers: Seq[int]) -> list[np.ndarray]:
    """The hidden states of a text after each of `layers` numbers of layers, float32 `[tokens,
    hidden_size]`."""
    reader = StateReader(layers)
    llm.generate(list(tokens), decoder=reader, max_tokens=1)
    return [reader.states[layer] for layer in layers]


def turn_parts(tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands before a user's first turn in the chat template, and what ends the turn.

    Raises:
        InvalidRequestError: There is no chat template.
    """
    marker = "\0"
    if tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template, with which it would write its prompts; choose one"
            " with a template, such as an instruction-tuned one"
        )
    template = tokenizer.render_chat([{"role": "user", "content": marker}])
    opening, _, closing = template.partition(marker)
    return opening, closing.split("\n")[0] or "\n"


def is_long(index: int) -> bool:
    """Whether the prompt `index` may have many lines, where some prompts may."""
    return index % 4 == 3


def generate_prompts(llm: LLM, count: int, seed: int, has_long: bool = False) -> list[list[int]]:
    """Prompts written by the model itself: user turns that it generates after the opening of its
    chat template, each rendered as a conversation. Fewer than `count`: short and repeated turns are
    left out. A turn is one line; with `has_long`, some have many (see `is_long`)."""
    tokenizer = llm.tokenizer
    opening, end = turn_parts(tokenizer)
    start = tokenizer.encode(opening, special=False)
    turns = []
    for index in range(count):
        many = has_long and is_long(index)
        turns.append(
            llm.request(
                start,
                seed=seed + index,
                temperature=1.0,
                top_p=TOP_P,
                max_tokens=LONG_TURN if many else SHORT_TURN,
                stop=[end] if many else [end, "\n"],
            )
        )
    texts = dict.fromkeys(answer.text.strip() for answer in run_requests(llm, turns))
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), special=False)
        for text in texts
        if len(text) > 8
    ]


def rendered_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a user turn, in the chat template if there is one."""
    rendered = rendered_text(tokenizer, text)
    return tokenizer.encode(rendered, special=tokenizer.chat_template is None)


def rendered_text(tokenizer: Tokenizer, text: str) -> str:
    """A user turn in the chat template; without a template, the text as it is."""
    if tokenizer.chat_template is None:
        return text
    return tokenizer.render_chat([{"role": "user", "content": text}])


def run_requests(llm: LLM, requests: list[Any]) -> list[Any]:
    """Runs requests together; returns their generations."""
    for request in requests:
        llm.start(request, background=False)
    llm.driver.advance(lambda: all(request.done for request in requests))
    return [request.generation() for request in requests]


def without_loop(tokens: Seq[int], size: int = 8) -> list[int]:
    """`tokens` up to where a sequence of `size` tokens begins for the second time."""
    if len(tokens) <= size:
        return list(tokens)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), size)
    _, first, same = np.unique(windows, axis=0, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first[same.ravel()] < np.arange(len(windows)))
    return list(tokens[: repeated[0]] if len(repeated) else tokens)
