"""The `litellm` package, with the provider for OpenAI-compatible servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

from anydecode import LLM  # noqa: E402
from client_shapes import Booking, City, Trip, tool  # noqa: E402

MODEL = "smollm2-135m-instruct"
ASK = [{"role": "user", "content": "Name a city."}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    """A request to the server, as litellm's provider for it and as that for vLLM."""
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 12,
        "max_retries": 0,
    }


def test_chat_and_its_stream_are_the_engine(ask: dict[str, Any], llm: LLM) -> None:
    alone = llm.chat(ASK, max_tokens=12)
    answer = litellm.completion(**ask)
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.completion_tokens == len(alone.tokens)
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == alone.text
    assert built.usage.completion_tokens == len(alone.tokens)


async def test_asynchronous_samples_logprobs_and_stops(ask: dict[str, Any], llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 2, "n": 2, "max_tokens": 6}
    answer = await litellm.acompletion(**{**ask, **options}, logprobs=True, top_logprobs=1)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [sample.text for sample in llm.chat(ASK, **options).samples]
    assert len(answer.choices[0].logprobs.content) == 6
    plain = llm.chat(ASK, max_tokens=12).text
    stopped = await litellm.acompletion(**ask, stop=[plain[4:6]])
    assert stopped.choices[0].message.content == plain[: plain.index(plain[4:6])]
    chunks = [chunk async for chunk in await litellm.acompletion(**ask, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain


@pytest.mark.parametrize("shape", [City, Trip, Booking])
def test_structured_output(ask: dict[str, Any], shape: type[Any]) -> None:
    answer = litellm.completion(**{**ask, "max_tokens": 150}, response_format=shape)
    shape.model_validate_json(answer.choices[0].message.content)


def test_tools_are_called_and_their_results_answered(ask: dict[str, Any]) -> None:
    shape = Booking
    options = {**ask, "max_tokens": 150}
    if ask["model"].startswith("hosted_vllm/"):  # additionalProperties is removed from its schemas
        shape = Trip
        options["extra_body"] = {"structured_outputs": {"disable_additional_properties": True}}
    options["tools"] = [tool(shape, "book")]
    required = {**options, "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(**required).choices[0].message
    (call,) = message.tool_calls
    shape.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**required, stream=True))
    built = litellm.stream_chunk_builder(chunks)
    (streamed,) = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "booked"}
    after = litellm.completion(
        **{**options, "messages": [*ASK, message.model_dump(), result], "max_tokens": 8}
    )
    assert after.usage.completion_tokens <= 8


@pytest.mark.parametrize("provider", ["anthropic", "ollama_chat"])
def test_other_apis_of_the_server(provider: str, root: str, llm: LLM) -> None:
    """Text and its stream, a typed answer, and a tool where the API can require its call."""
    ask: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": root,
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
    }
    alone = llm.chat(ASK, max_tokens=12)
    answer = litellm.completion(**ask, max_tokens=12)
    assert answer.choices[0].message.content == alone.text
    chunks = list(litellm.completion(**ask, max_tokens=12, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.text
    typed = litellm.completion(**ask, max_tokens=150, response_format=Trip)
    Trip.model_validate_json(typed.choices[0].message.content)
    if provider == "anthropic":
        book = [tool(Trip, "book")]
        called = litellm.completion(**ask, max_tokens=150, tools=book, tool_choice="required")
        for call in called.choices[0].message.tool_calls:
            Trip.model_validate_json(call.function.arguments)


def test_embeddings_and_completions(ask: dict[str, Any], llm: LLM) -> None:
    address = {name: ask[name] for name in ("model", "api_base", "api_key")}
    found = litellm.embedding(**address, input=["a cat"])
    assert found.data[0]["embedding"] == pytest.approx(llm.embed("a cat"), abs=1e-4)
    if ask["model"].startswith("openai/"):
        address["model"] = f"text-completion-openai/{MODEL}"
        text = (
            litellm.text_completion(**address, prompt="The sky is", max_tokens=6, temperature=0)
            .choices[0]
            .text
        )
        assert text == llm.generate("The sky is", max_tokens=6).text


def test_errors_are_typed(ask: dict[str, Any], keyed_url: str) -> None:
    provider = ask["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**ask, "model": f"{provider}/gpt-4o"})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**ask, "api_base": keyed_url, "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "word " * 20000}]
        litellm.completion(**{**ask, "messages": long})
