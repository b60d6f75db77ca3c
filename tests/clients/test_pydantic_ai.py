"""The `pydantic-ai` package: agents with tools and typed output."""

from __future__ import annotations

from typing import Any

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai")

from pydantic_ai.models.openai import OpenAIChatModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

from anydecode import LLM  # noqa: E402
from client_shapes import Booking, City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"
SETTINGS = {"temperature": 0.0, "max_tokens": 200}


@pytest.fixture
def model(url: str) -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


async def test_text_and_its_stream_are_the_engine(model: Any, llm: LLM) -> None:
    agent = pydantic_ai.Agent(model, model_settings={"temperature": 0.0, "max_tokens": 12})
    messages = [{"role": "user", "content": "Name a city."}]
    alone = llm.chat(messages, max_tokens=12)
    result = await agent.run("Name a city.")
    assert result.output == alone.text
    assert result.usage.output_tokens == len(alone.tokens)
    async with agent.run_stream("Name a city.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == alone.text


@pytest.mark.parametrize("shape", [City, Trip, Booking])
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_typed_output(model: Any, kind: str, shape: type[Any]) -> None:
    output = getattr(pydantic_ai, kind)(shape)
    agent = pydantic_ai.Agent(model, output_type=output, model_settings=SETTINGS)
    assert type((await agent.run("Plan a trip.")).output) is shape


async def test_alternatives_of_output(model: Any) -> None:
    agent = pydantic_ai.Agent(model, output_type=[City, Trip], model_settings=SETTINGS)
    assert type((await agent.run("Plan a trip.")).output) in (City, Trip)


async def test_typed_output_streams(model: Any) -> None:
    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.NativeOutput(Trip), model_settings=SETTINGS
    )
    async with agent.run_stream("Plan a trip.") as stream:
        parts = [part async for part in stream.stream_output(debounce_by=None)]
    assert type(parts[-1]) is Trip


async def test_a_tool_runs_before_typed_output(model: Any) -> None:
    agent = pydantic_ai.Agent(
        model,
        output_type=pydantic_ai.ToolOutput(City),
        model_settings=SETTINGS,
    )
    calls: list[Any] = []

    async def before_its_first_call(context: Any, definition: Any) -> Any:
        # A model this small may call a tool in every round; without it, only the output is left.
        return None if calls else definition

    @agent.tool_plain(prepare=before_its_first_call)
    def look_up(trip: Trip) -> str:
        """Look a trip up."""
        calls.append(trip)
        return "found"

    result = await agent.run("Which city?", usage_limits=pydantic_ai.UsageLimits(request_limit=9))
    assert type(result.output) is City
    assert calls and all(type(call) is Trip for call in calls)


async def test_errors_are_typed(url: str, keyed_url: str, model: Any) -> None:
    for name, address, key, status in (
        ("gpt-4o", url, "none", 404),
        (MODEL, keyed_url, "wrong", 401),
    ):
        other = OpenAIChatModel(name, provider=OpenAIProvider(base_url=address, api_key=key))
        with pytest.raises(pydantic_ai.ModelHTTPError) as caught:
            await pydantic_ai.Agent(other).run("Hello.")
        assert caught.value.status_code == status


async def test_embeddings(url: str, llm: LLM) -> None:
    from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel

    provider = OpenAIProvider(base_url=url, api_key="none")
    embedder = pydantic_ai.Embedder(OpenAIEmbeddingModel(MODEL, provider=provider))
    found = await embedder.embed_query("a cat")
    assert list(found.embeddings[0]) == pytest.approx(llm.embed("a cat"), abs=1e-4)
