"""Text that a model writes itself, and its hidden states: what heads and drafters learn from."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: Rows scored per pass.
CHUNK = 128


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


def generate_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Prompts written by the model itself: user turns that it generates after the opening of its
    chat template, each rendered as a conversation. Fewer than `count`: short and repeated turns are
    left out."""
    tokenizer = llm.tokenizer
    marker = "\0"
    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model has no chat template: give prompts")
    template = tokenizer.render_chat([{"role": "user", "content": marker}])
    opening, _, closing = template.partition(marker)
    end = closing.split("\n")[0] or "\n"
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 48}
    options["stop"] = [end, "\n"]
    openings = [tokenizer.encode(opening, special=False)] * count
    turns = [llm.request(one, seed=seed + index, **options) for index, one in enumerate(openings)]
    texts = dict.fromkeys(answer.text.strip() for answer in run_requests(llm, turns))
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), special=False)
        for text in texts
        if len(text) > 8
    ]


def run_requests(llm: LLM, requests: list[Any]) -> list[Any]:
    """Runs requests together; returns their generations."""
    for request in requests:
        llm.start(request, background=False)
    llm.driver.advance(lambda: all(request.done for request in requests))
    return [request.generation() for request in requests]


def without_loop(tokens: Seq[int], size: int = 8) -> list[int]:
    """`tokens` up to where a sequence of `size` tokens begins for the second time."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - size + 1):
        window = tuple(tokens[start : start + size])
        if window in seen:
            return list(tokens[:start])
        seen.add(window)
    return list(tokens)
