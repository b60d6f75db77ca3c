"""The Python API with an encoder: what it offers, and what it refuses in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.errors import AnydecodeError, InvalidRequestError, UnsupportedCombinationError
from encoder_models import hf_encoder, save_encoder


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_encoder(hf_encoder("Bert"), tmp_path_factory.mktemp("encoder"))
    with LLM(folder, threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a"),
        lambda llm: llm.generate("a", max_tokens=0),
        lambda llm: llm.generate("a", decoder="llada"),
        lambda llm: llm.chat([{"role": "user", "content": "a"}]),
        lambda llm: list(llm.stream("a")),
        lambda llm: llm.score("a", "b"),
    ],
)
def test_an_encoder_refuses_to_generate(llm: LLM, call: Callable[[LLM], Any]) -> None:
    with pytest.raises(UnsupportedCombinationError, match="is an encoder") as error:
        call(llm)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed(""), None),  # the special tokens alone
        (lambda llm: llm.embed([]), "the prompt is empty"),
        (lambda llm: llm.embed("a " * 63), "maximum context length is 64 tokens; the text has 65"),
        (lambda llm: llm.embed("a", dimensions=8), "embeddings have 48"),
        (lambda llm: llm.embed("a", prompt_name="query"), "prompts are: none"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=0), "allowed are 1 to 64"),
        (lambda llm: llm.relevance("a", "b"), "documents is 'b'; it must be a list of texts"),
        (lambda llm: llm.relevance("a", ["b"], instruction="c"), "instruction has no effect"),
        (lambda llm: llm.rerank("a", ["b"], top_n=0), "top_n is 0"),
        (lambda llm: llm.rerank("a", ["b"], top_n="1"), "top_n is '1'; it must be an integer"),
        (lambda llm: llm.embed("a", task=[1]), r"task is \[1\]; it must be a text or None"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens="5"), "truncate_prompt_tokens is '5'"),
    ],
)
def test_wrong_input_is_refused(llm: LLM, call: Callable[[LLM], Any], message: str | None) -> None:
    if message is None:
        assert len(call(llm)) == 48
        return
    with pytest.raises(InvalidRequestError, match=message) as error:
        call(llm)
    assert "\n" not in str(error.value)


def test_a_text_of_the_full_length_is_embedded(llm: LLM) -> None:
    """No position is left to generate."""
    assert len(llm.embed("a " * 62)) == 48


def test_asynchronous_callers_share_passes(llm: LLM) -> None:
    texts = [chr(97 + index) * 3 for index in range(20)]
    expected = llm.embed(texts)
    passes = llm.engine.runners["target"].num_passes

    async def embed_all() -> list[Any]:
        ranked = await llm.arerank("a", texts, top_n=2)
        assert ranked == llm.rerank("a", texts, top_n=2)
        assert await llm.arelevance("a", texts) == llm.relevance("a", texts)
        return await asyncio.gather(*(llm.aembed(text) for text in texts))

    assert asyncio.run(embed_all()) == expected
    assert llm.engine.runners["target"].num_passes - passes < 60
    llm.engine.check_integrity()


def test_passes_are_scratch_memory(llm: LLM) -> None:
    """Nothing of a text stays in the cache."""
    pool = llm.engine.runners["target"].pool
    llm.embed(["abc", "de"])
    assert pool.num_used == 0
    assert pool.cache.format == "float32"


def test_no_documents_give_no_scores(llm: LLM) -> None:
    assert llm.relevance("a", []) == [] == llm.rerank("a", [])


def test_a_model_for_chats_does_not_rank() -> None:
    with scripted_llm() as llm, pytest.raises(AnydecodeError, match="neither an embedding model"):
        llm.rerank("a", ["b"])
