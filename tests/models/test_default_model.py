"""Exactness on a real model: the same output for every drafter, batch, chunk size and cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anydecode import LLM, Grammar
from anydecode.decoders.decoder import Decoder
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree
from anydecode.tasks.prompts import spread

pytestmark = pytest.mark.model

DTYPES = [None, "int8", "int4"]
PLAIN = ["float32", "bfloat16"]  # they take most of the time
OPTIONS = {"max_tokens": 20, "seed": 5, "ignore_eos": True}
PROMPTS = [prompt.text if hasattr(prompt, "text") else prompt for prompt in spread(4)]


@pytest.fixture(
    scope="module",
    params=[*DTYPES, *(pytest.param(name, marks=pytest.mark.slow) for name in PLAIN)],
    ids=lambda dtype: dtype or "stored",
)
def llm(request: pytest.FixtureRequest, default_model_path: Path) -> Iterator[LLM]:
    with LLM(default_model_path, dtype=request.param, cache_positions=4096) as llm:
        yield llm


class Rows(Decoder):
    """Stores the logits of every prompt row, scored in chunks of `size`, or (None) as one tree."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.logits = np.empty(0)

    def decode(self, sequence: Sequence) -> Decoding:
        prompt, parts = sequence.prompt, []
        if self.size is None:
            sequence.tokens, sequence.prompt = [], prompt[:5]
            tree = TokenTree.chain(prompt[5:])
            for extra in (7, 11, 13):
                tree.add(extra, -1)
                tree.add(extra, len(prompt) // 2)
            scores = yield sequence.verify(tree)
            parts.append(scores.logits[: len(prompt) - 4].copy())
        else:
            for start in range(0, len(prompt), self.size):
                scores = yield sequence.score(prompt[start : start + self.size], rows="all")
                parts.append(scores.logits.copy())
        self.logits = np.concatenate(parts)


def rows(llm: LLM, prompt: list[int], size: int | None) -> np.ndarray:
    decoder = Rows(size)
    llm.clear()
    llm.generate(prompt, decoder=decoder, max_tokens=1)
    return decoder.logits


@pytest.mark.one_in(3)
def test_logits_are_bit_equal_in_chunks_and_trees(llm: LLM) -> None:
    prompt = llm.encode(" ".join(PROMPTS))[:70]
    whole = rows(llm, prompt, len(prompt))
    for size in (1, 3, 16, 33):
        assert np.array_equal(rows(llm, prompt, size), whole), f"chunks of {size}"
    assert np.array_equal(rows(llm, prompt, None), whole[4:]), "a tree with siblings"
    different = [*prompt[:30], (prompt[30] + 1) % 1000, *prompt[31:]]
    assert not np.array_equal(rows(llm, different, 16)[30:], whole[30:])


@pytest.mark.parametrize(
    ("llm", "temperature"),
    [
        (None, 0.8),
        pytest.param(None, 0.0, marks=pytest.mark.slow),
        *(pytest.param(dtype, 0.8, marks=pytest.mark.slow) for dtype in [*DTYPES[1:], *PLAIN]),
    ],
    indirect=["llm"],
    ids=lambda value: "stored" if value is None else str(value),
)
def test_output_is_equal_in_batches_with_caches_and_drafters(llm: LLM, temperature: float) -> None:
    options = {**OPTIONS, "temperature": temperature, "logprobs": 2}
    llm.clear()
    plain = [llm.generate(p, decoder="autoregressive", **options) for p in PROMPTS]
    for decoder in ("autoregressive", "prompt-lookup", "layerskip", "multi-step", "auto"):
        llm.clear()
        batch = llm.generate(PROMPTS, decoder=decoder, **options)
        assert [out.tokens for out in batch] == [out.tokens for out in plain], decoder
        assert [out.logprobs for out in batch] == [out.logprobs for out in plain], decoder
    warm = [llm.generate(p, decoder="prompt-lookup", **options).tokens for p in PROMPTS]
    assert warm == [out.tokens for out in plain]


@pytest.mark.one_in(3)
def test_output_is_equal_in_a_batch_of_sixteen(llm: LLM) -> None:
    alone = llm.generate(PROMPTS[0], **OPTIONS)
    batch = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(16)], **OPTIONS)
    assert all(out.tokens == alone.tokens for out in batch[:: len(PROMPTS)])


def test_answers_are_plausible(default_model_path: Path) -> None:
    with LLM(default_model_path) as llm:
        assert "Paris" in llm.generate("The capital of France is", max_tokens=4).text
        answer = llm.chat([{"role": "user", "content": "Say hello."}], max_tokens=40)
        assert answer.finish_reason in ("stop", "length") and answer.text
        assert llm.score("The capital of France is", " Paris").total > -3


@pytest.mark.slow
def test_sampled_constrained_text_is_equal_for_every_drafter(default_model_path: Path) -> None:
    """Of text that must follow, a constraint allows one tokenization, with or without drafts."""
    schema = {
        "type": "object",
        "properties": {"name": {"const": "get_weather"}, "city": {"enum": ["London", "Paris"]}},
        "required": ["name", "city"],
        "additionalProperties": False,
    }
    grammar = Grammar(f'start: "<tool_call>" "\\n"? %json {json.dumps(schema)} "</tool_call>"')
    with LLM(default_model_path, cache_positions=4096) as llm:
        for seed in range(6, 9):
            answers = [
                llm.generate(
                    "Weather in London as a tool call:\n",
                    constraint=grammar,
                    decoder=decoder,
                    max_tokens=40,
                    temperature=1.0,
                    seed=seed,
                ).tokens
                for decoder in ("autoregressive", "prompt-lookup", "jump-forward", "auto")
            ]
            assert answers == [answers[0]] * 4
