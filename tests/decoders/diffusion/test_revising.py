"""Methods whose tokens may change: what they stream, and how they work with stop strings, limits,
seeds, constraints, infilling, batches and restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex
from anydecode.certification.checks import Restarts
from anydecode.certification.denoising import bidirectional, dense
from anydecode.certification.oracles.diffusion.token_editing import drifting
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.models.scripted import MASK

METHODS = (
    "p2:block=8,steps=5",
    "remedi:block=8,steps=5",
    "remdm:block=8,eta=0.3",
    "wino:block=8,threshold=0.3",
    "gidd:block=8,steps=5,corrections=6",
    "duo:block=8,steps=5",
    "diffusion-gemma:block=8,steps=5",
)
PROMPTS = [[5, 6, 7], [9], [80, 81, 82, 83, 84], [3, 3]]


def generate(llm: LLM, decoder: str, prompts: Any, **options: Any) -> Any:
    options = {"max_tokens": 20, "ignore_eos": True, "seed": 4, **options}
    return llm.generate(prompts, decoder=decoder, **options)


@pytest.mark.parametrize("decoder", METHODS)
def test_batches_and_restarts_do_not_change_the_text(decoder: str) -> None:
    for temperature in (0.0, 0.8):
        with bidirectional(drifting(5.0)) as llm:
            alone = [generate(llm, decoder, p, temperature=temperature).tokens for p in PROMPTS]
            batch = generate(llm, decoder, PROMPTS, temperature=temperature)
            assert [answer.tokens for answer in batch] == alone
        with bidirectional(drifting(5.0)) as llm, Restarts(llm.engine, seed=2, share=0.4):
            batch = generate(llm, decoder, PROMPTS, temperature=temperature)
            assert [answer.tokens for answer in batch] == alone
            llm.engine.check_integrity()


@pytest.mark.parametrize("decoder", METHODS)
def test_only_what_cannot_change_is_streamed(decoder: str) -> None:
    with bidirectional(drifting(5.0)) as llm:
        chunks = list(
            llm.stream(PROMPTS[0], decoder=decoder, max_tokens=20, ignore_eos=True, seed=4)
        )
        answer = generate(llm, decoder, PROMPTS[0])
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.tokens == answer.tokens
    assert len([chunk for chunk in chunks if chunk.text]) <= 4  # one per block, and the end
    assert "".join(chunk.text for chunk in chunks) == answer.text


@pytest.mark.parametrize("decoder", METHODS)
def test_a_stop_token_ends_the_text_and_the_seed_counts(decoder: str) -> None:
    with bidirectional(dense(spread=5.0)) as llm:
        whole = generate(llm, decoder, PROMPTS[0], temperature=0.9).tokens
        first = whole[11]
        cut = generate(llm, decoder, PROMPTS[0], temperature=0.9, stop_tokens=[first])
        assert cut.tokens == whole[: whole.index(first) + 1] and cut.finish_reason == "stop"
        other = generate(llm, decoder, PROMPTS[0], temperature=0.9, seed=5).tokens
        assert other != whole and MASK not in whole + other


@pytest.mark.parametrize("decoder", METHODS)
def test_a_constraint_holds(decoder: str) -> None:
    with bidirectional(drifting(5.0)) as llm:
        answer = llm.generate(
            PROMPTS[0], decoder=decoder, constraint=Regex("[a-f]{12}"), max_tokens=16, seed=3
        )
    assert len(answer.text) == 12 and set(answer.text) <= set("abcdef")


@pytest.mark.parametrize("decoder", METHODS)
def test_prompts_and_fixed_tokens_do_not_change(decoder: str) -> None:
    template = [5, 6, MASK, MASK, 7, MASK, 8, MASK]
    with bidirectional(dense(spread=9.0)) as llm:
        key = decoder.replace("block=8", "block=0")
        answer = llm.generate(template, decoder=key, max_tokens=6, ignore_eos=True, seed=1)
    assert len(answer.tokens) == 6 and MASK not in answer.tokens
    assert (answer.tokens[2], answer.tokens[4]) == (7, 8)


@pytest.mark.parametrize("decoder", METHODS)
def test_log_probabilities_are_those_of_the_tokens(decoder: str) -> None:
    with bidirectional(drifting(5.0)) as llm:
        answer = generate(llm, decoder, PROMPTS[0], logprobs=0)
    assert [entry.token for entry in answer.logprobs] == answer.tokens


@pytest.mark.parametrize("decoder", [m for m in METHODS if not m.startswith("wino")])
def test_the_cache_of_finished_blocks_is_exact(decoder: str) -> None:
    with LLM("tiny-blocks") as llm:
        key = decoder.replace("block=8,", "").replace(",block=8", "")
        options: dict[str, Any] = {"temperature": 0.7}
        prompts = ["sort Leo Ada Ben:", "copy Mia:"]
        cached = generate(llm, f"{key},cache=block", prompts, **options)
        assert [a.tokens for a in cached] == [
            a.tokens for a in generate(llm, key, prompts, **options)
        ]
        assert cached[0].stats.rows < generate(llm, key, prompts, **options)[0].stats.rows


def test_what_holds_no_token_cannot_be_masked_again() -> None:
    canvas = Canvas(np.array([3, 9, 9]), mask=9)
    canvas.commit([1], [4], [0.5])
    for position in (0, 2):
        with pytest.raises(ValueError, match="masked again"):
            canvas.remask([position])
    canvas.remask([1])
    assert canvas.masks.tolist() == [1, 2] and canvas.meter.committed == 0
    canvas.renoise([2], [6])
    assert canvas.tokens.tolist() == [3, 9, 6] and canvas.masks.tolist() == [1, 2]
    with pytest.raises(ValueError, match="holds no noise"):
        canvas.renoise([0], [6])
