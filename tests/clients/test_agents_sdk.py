"""The `openai-agents` package: agents on the chat-completions and the responses model."""

from __future__ import annotations

from typing import Any

import pytest

agents = pytest.importorskip("agents")

import openai  # noqa: E402

from client_shapes import City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"


@pytest.fixture(params=["chat", "responses"])
async def model(request: pytest.FixtureRequest, url: str) -> Any:
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield kinds[request.param](model=MODEL, openai_client=client)


#: Answers that end, which the SDK expects of a stream of responses.
CITIES = {"structured_outputs": {"choice": ["Oslo", "Rome"]}}


def settings(**fields: Any) -> Any:
    return agents.ModelSettings(**{"temperature": 0, "max_tokens": 120, **fields})


async def test_text_and_its_stream(model: Any) -> None:
    agent = agents.Agent(
        name="a", instructions="Be brief.", model=model, model_settings=settings(extra_body=CITIES)
    )
    result = await agents.Runner.run(agent, "Name a city.")
    assert result.final_output in ("Oslo", "Rome")
    streamed = agents.Runner.run_streamed(agent, "Name a city.")
    events = [event async for event in streamed.stream_events()]
    assert streamed.final_output == result.final_output
    deltas = [
        event.data.delta
        for event in events
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output


async def test_a_tool_runs_and_its_result_is_answered(model: Any) -> None:
    visited: list[City] = []

    # Offered once: so small a model calls it again and again.
    @agents.function_tool(is_enabled=lambda context, agent: not visited)
    def visit(city: City, days: int) -> str:
        """Visit a city."""
        visited.append(city)
        return "done"

    agent = agents.Agent(
        name="a",
        model=model,
        tools=[visit],
        model_settings=settings(tool_choice="required", parallel_tool_calls=False),
    )  # after the first call the SDK resets tool_choice
    result = await agents.Runner.run(agent, "Visit Rome.", max_turns=8)
    assert visited and all(type(city) is City for city in visited)
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert kinds[-1] == "message_output_item"


@pytest.mark.parametrize("streamed", [False, True])
async def test_typed_output(model: Any, streamed: bool) -> None:
    agent = agents.Agent(
        name="a",
        model=model,
        output_type=agents.AgentOutputSchema(Trip, strict_json_schema=False),
        model_settings=settings(),
    )
    if streamed:
        run = agents.Runner.run_streamed(agent, "Plan a trip.")
        async for _ in run.stream_events():
            pass
        assert type(run.final_output) is Trip
    else:
        assert type((await agents.Runner.run(agent, "Plan a trip.")).final_output) is Trip


async def test_a_handoff(model: Any) -> None:
    expert = agents.Agent(
        name="Expert",
        model=model,
        output_type=agents.AgentOutputSchema(City, strict_json_schema=False),
        model_settings=settings(),
    )
    front = agents.Agent(
        name="Front",
        model=model,
        handoffs=[expert],
        model_settings=settings(tool_choice="transfer_to_expert", parallel_tool_calls=False),
    )
    result = await agents.Runner.run(front, "Which city?")
    assert result.last_agent is expert
    assert type(result.final_output) is City


async def test_an_error_is_the_servers(model: Any) -> None:
    agent = agents.Agent(name="a", model=model, model_settings=settings(temperature=-1))
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        await agents.Runner.run(agent, "Hello.")
