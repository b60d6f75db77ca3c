"""LangChain: `langchain-openai`'s chat model, tools, structured output and embeddings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

langchain_openai = pytest.importorskip("langchain_openai")

import openai  # noqa: E402
from langchain_core.messages import HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

from anydecode import LLM  # noqa: E402
from client_shapes import Booking, City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"
ASK = "Name a city."
MESSAGES = [{"role": "user", "content": ASK}]


@tool
def visit(city: City, days: int) -> str:
    """Visit a city."""
    return f"{days} days in {city.name}"


@pytest.fixture(scope="module")
def model(url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=150, max_retries=0
    )


def test_chat_and_its_stream_are_the_engine(model: Any, llm: LLM) -> None:
    short = model.model_copy(update={"max_tokens": 12})
    alone = llm.chat(MESSAGES, max_tokens=12)
    answer = short.invoke(ASK)
    assert answer.content == alone.text
    assert answer.usage_metadata["output_tokens"] == len(alone.tokens)
    chunks = list(short.stream(ASK, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == alone.text
    assert sum(chunks[1:], chunks[0]).usage_metadata == answer.usage_metadata
    assert [one.content for one in short.batch([ASK, ASK])] == [alone.text, alone.text]


async def test_asynchronous_calls_and_logprobs(model: Any, llm: LLM) -> None:
    short = model.model_copy(update={"max_tokens": 6}).bind(logprobs=True, top_logprobs=2, seed=1)
    first, second = await asyncio.gather(short.ainvoke(ASK), short.ainvoke(ASK))
    assert first.content == second.content == llm.chat(MESSAGES, max_tokens=6).text
    assert len(first.response_metadata["logprobs"]["content"]) == 6
    assert "".join([chunk.content async for chunk in short.astream(ASK)]) == first.content


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("shape", [City, Trip, Booking])
def test_structured_output(model: Any, method: str, strict: Any, shape: type[Any]) -> None:
    chain = model.with_structured_output(shape, method=method, strict=strict, include_raw=True)
    found = chain.invoke(ASK)
    assert found["parsing_error"] is None
    assert type(found["parsed"]) is shape


def test_structured_output_streams(model: Any) -> None:
    chain = model.with_structured_output(Trip.model_json_schema(), method="json_schema")
    parts = list(chain.stream(ASK))
    Trip.model_validate(parts[-1])


def test_tools_are_called_and_their_results_answered(model: Any) -> None:
    bound = model.bind_tools([visit], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(ASK)
    (call,) = answer.tool_calls
    assert call["name"] == "visit" and not answer.invalid_tool_calls
    result = visit.invoke(call)
    assert isinstance(result, ToolMessage) and "days in" in result.content
    chunks = list(bound.stream(ASK))
    joined = sum(chunks[1:], chunks[0])
    assert joined.tool_calls[0]["args"] == call["args"]
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 1
    after = model.bind_tools([visit]).invoke([HumanMessage(ASK), answer, result])
    assert after.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


def test_a_schema_beside_tools(model: Any) -> None:
    chain = model.bind_tools([visit], response_format=City, strict=True, tool_choice="auto")
    answer = chain.invoke(ASK)
    if not answer.tool_calls:
        assert type(answer.additional_kwargs["parsed"]) is City


def test_completions_and_embeddings(url: str, llm: LLM) -> None:
    completion = langchain_openai.OpenAI(
        model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=6
    )
    assert completion.invoke("The sky is") == llm.generate("The sky is", max_tokens=6).text
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", check_embedding_ctx_length=False
    )
    (found,) = embeddings.embed_documents(["a cat"])
    assert found == pytest.approx(llm.embed("a cat"), abs=1e-4)


def test_embeddings_with_the_models_tokenizer(url: str, llm: LLM, tokenizer: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", tiktoken_enabled=False,
        tiktoken_model_name=tokenizer,
    )  # fmt: skip
    for text in ("a cat", "a cat and the sea"):
        assert embeddings.embed_query(text) == pytest.approx(llm.embed(text), abs=1e-4)


def test_token_ids_of_another_vocabulary_are_refused(url: str) -> None:
    # As OpenAIEmbeddings sends with OpenAI's tokenizer, which it downloads.
    client = openai.OpenAI(base_url=url, api_key="none")
    with pytest.raises(openai.BadRequestError, match="100000"):
        client.embeddings.create(model=MODEL, input=[[64, 100000]])


def test_errors_are_openais(model: Any, keyed_url: str) -> None:
    with pytest.raises(openai.NotFoundError):
        model.model_copy(update={"model_name": "gpt-4o"}).invoke(ASK)
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        model.invoke("word " * 20000)
    assert json.loads(caught.value.response.text)["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        langchain_openai.ChatOpenAI(model=MODEL, base_url=keyed_url, api_key="wrong").invoke(ASK)
