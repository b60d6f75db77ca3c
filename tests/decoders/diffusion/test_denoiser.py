"""The canvas of a denoiser, and which positions a step fills when the sampler depends on the text
before them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, JsonSchema, Regex
from anydecode.certification.denoising import bidirectional, dense
from anydecode.decoders.diffusion.blocks import WholeCanvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking, UnmaskPolicy
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel

PROMPT = [5, 6, 7]
LENGTH = 8


def surer_to_the_right(path: tuple[int, ...]) -> np.ndarray:
    """Logits that prefer "a" at every position, the more the later it is."""
    logits = np.zeros(ByteTokenizer.vocab_size)
    logits[ord("a")] = 8.0 + path[-1]
    logits[ord("b")] = 4.0
    return logits


def filled(unmask: UnmaskPolicy, pattern: str) -> list[list[int]]:
    """By pass: the positions of the answer that it fills."""
    model = ScriptedModel(surer_to_the_right, causal=False)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512) as llm:
        options: dict[str, Any] = {"max_tokens": LENGTH, "trace": True, "ignore_eos": True}
        decoder = Denoiser(WholeCanvas(), unmask=unmask)
        answer = llm.generate(PROMPT, decoder=decoder, constraint=Regex(pattern), **options)
    assert answer.text == pattern.replace("[ab]", "a")
    assert answer.trace is not None
    return [[position - len(PROMPT) for position in entry["filled"]] for entry in answer.trace]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[ab]" * LENGTH, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("aaaaaaab", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("aabaaaaa", [[0, 1, 2], [3, 4, 5, 6, 7]]),
        ("baabbaaa", [[0], [1, 2, 3], [4], [5, 6, 7]]),
    ],
)
def test_a_step_ends_at_the_first_token_that_the_constraint_changed(
    pattern: str, expected: list[list[int]]
) -> None:
    """The model wants "a" everywhere, and every mask is to be unmasked at once."""
    assert filled(ThresholdUnmasking(0.0), pattern) == expected


def test_a_step_fills_from_the_left_what_was_chosen() -> None:
    """Only the last two positions reach the threshold. The first mask is filled in any case."""
    steps = filled(ThresholdUnmasking(1 - 2e-5), "[ab]" * LENGTH)
    assert steps == [[0], [1], [2], [3], [4], [5, 6, 7]]


@pytest.mark.parametrize(
    ("room", "length"),
    [(512, 12), (10, 10), (9, 9)],  # 3 + 6 positions, and the rest of the last block
)
def test_a_canvas_has_whole_blocks_as_far_as_the_cache_has_room(room: int, length: int) -> None:
    model = ScriptedModel(surer_to_the_right, causal=False)
    model.spec = replace(model.spec, block_size=4)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=room) as llm:
        answer = llm.generate(PROMPT, decoder="sdar", max_tokens=6, ignore_eos=True, trace=True)
    assert len(answer.tokens) == 6 and answer.trace is not None
    assert [len(entry["canvas"]) for entry in answer.trace] == [length - 3] * len(answer.trace)


@pytest.mark.parametrize(
    "key", ["bd3-lm", "fast-dllm-v2", "levenshtein-editing", "s2d2", "sdar", "token-editing"]
)
def test_an_unknown_block_size_is_an_error(key: str) -> None:
    with bidirectional(dense()) as llm:
        with pytest.raises(InvalidRequestError, match=r"names? no block size.*block=POSITIONS"):
            llm.generate([5, 6, 7], decoder=key, max_tokens=8)
        answer = llm.generate([5, 6, 7], decoder=f"{key}:block=4", max_tokens=8, ignore_eos=True)
    assert len(answer.tokens) == 8


@pytest.mark.parametrize("decoder", ["llada:block=0", "p2", "wino"])
def test_a_forced_completion_gives_way_to_fixed_tokens(decoder: str) -> None:
    """The limit leaves room for the shortest text and one token more, which is on the canvas."""
    template = [MASK, *b'"a":', MASK, *b" ", MASK, MASK]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with bidirectional(dense(spread=5.0)) as llm:
        options: dict[str, Any] = {"constraint": JsonSchema(schema), "max_tokens": len(template)}
        answer = llm.generate([9, *template], decoder=decoder, seed=3, **options)
    assert isinstance(json.loads(answer.text)["a"], int) and answer.text[6] == " "
