"""Where embeddings may lie in a prompt, of what shape they are, and the text that they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer
from anydecode.scoring.media import Media
from anydecode.scoring.prompt_embeds import PromptEmbeds

PROMPT, WIDTH = [0] * 6, 4


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 5), (4, 1), (2, 3)])
def test_embeddings_within_the_prompt(first: int, count: int) -> None:
    embeds = PromptEmbeds(first, np.zeros((count, WIDTH), np.float32), np.zeros(count))
    embeds.check(PROMPT, WIDTH)
    assert embeds.stop == first + count


@pytest.mark.parametrize(("first", "count"), [(-1, 3), (0, 6), (5, 1), (4, 2), (2, 0)])
def test_embeddings_elsewhere_are_refused(first: int, count: int) -> None:
    with pytest.raises(InvalidRequestError, match="within the prompt, before its last token"):
        PromptEmbeds(first, np.zeros((count, WIDTH), np.float32)).check(PROMPT, WIDTH)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"\[count, 4\], not \[2, 5\]"):
        PromptEmbeds(0, np.zeros((2, 5), np.float32)).check(PROMPT, WIDTH)
    with pytest.raises(InvalidRequestError, match="one importance per embedding"):
        PromptEmbeds(0, np.zeros((2, 4), np.float32), np.zeros(3)).check(PROMPT, WIDTH)


def test_embeddings_that_overlap_are_refused() -> None:
    both = [PromptEmbeds(1, np.zeros((3, 64), np.float32)), PromptEmbeds(0, np.ones((2, 64), "f4"))]
    with opened() as llm, pytest.raises(InvalidRequestError, match="given for position 1"):
        llm.generate([0] * 20, prompt_embeds=both)


def test_images_need_the_encoder_of_a_fleet() -> None:
    media = Media(0, np.zeros((8, 8, 3), np.uint8))
    with opened() as llm, pytest.raises(UnsupportedCombinationError, match="FleetLLM"):
        llm.generate([0] * 20, prompt_embeds=[media])


TOKENS = [40 + 7 * number % 90 for number in range(90)]
RANGES = (3, 9), (20, 41), (41, 70)


def opened(**options: Any) -> LLM:
    return LLM(tiny_model(), tokenizer=ByteTokenizer(), cache_positions=400, threads=1, **options)


def given_as_embeddings(llm: LLM) -> tuple[list[int], list[PromptEmbeds]]:
    """The prompt with zeros in place of some tokens, and the embeddings of these tokens."""
    prompt = list(TOKENS)
    for first, stop in RANGES:
        prompt[first:stop] = [0] * (stop - first)
    model: Any = llm.model
    rows = [model.embed(np.array(TOKENS[first:stop])) for first, stop in RANGES]
    return prompt, [PromptEmbeds(first, one) for (first, _), one in zip(RANGES, rows, strict=True)]


@pytest.mark.parametrize(
    "options",
    [{}, {"row_budget": 7}, {"schedule": "layered-prefill"}, {"prefix_cache": False}],
    ids=str,
)
def test_the_embeddings_of_tokens_give_the_text_of_the_tokens(options: dict[str, Any]) -> None:
    with opened(**options) as llm:
        prompt, embeds = given_as_embeddings(llm)
        sampled: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "logprobs": 2}
        expected = llm.generate(TOKENS, decoder="autoregressive", **sampled)
        for _ in range(2):  # the second time from cached blocks
            found = llm.generate(prompt, prompt_embeds=embeds, **sampled)
            assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
        if options.get("prefix_cache", True):
            assert found.stats.num_cached_tokens == 80


def test_cached_blocks_belong_to_their_embeddings() -> None:
    with opened() as llm:
        prompt, embeds = given_as_embeddings(llm)
        llm.generate(prompt, prompt_embeds=embeds, max_tokens=1)
        assert llm.generate(prompt, max_tokens=1).stats.num_cached_tokens == 0
        moved = [embeds[0], PromptEmbeds(20, embeds[1].rows[::-1].copy()), embeds[2]]
        others = [[embeds[0]], moved, [PromptEmbeds(2, embeds[0].rows), *embeds[1:]]]
        for other in others:
            found = llm.generate(prompt, prompt_embeds=other, max_tokens=1)
            assert found.stats.num_cached_tokens == 0
        named = [PromptEmbeds(one.first, one.rows, key=str(one.first)) for one in embeds]
        for number in (0, 80):
            found = llm.generate(prompt, prompt_embeds=named, max_tokens=1)
            assert found.stats.num_cached_tokens == number
        found = llm.generate(prompt, prompt_embeds=named, namespace="tenant", max_tokens=1)
        assert found.stats.num_cached_tokens == 0
