"""The server, used through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

anthropic = pytest.importorskip("anthropic")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from server_models import THINKING, TOWN, TemplateTokenizer, answering  # noqa: E402

ASK: list[Any] = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
RENDERED = "user: the cat sat on the mat and the cat sat on\nassistant: "
OPTIONS: dict[str, Any] = {"model": "scripted", "messages": ASK, "max_tokens": 24}
#: The client has no argument for the temperature.
GREEDY = {"temperature": 0}
TOOLS: list[Any] = [{"name": "weather", "description": "d", "input_schema": TOWN}]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: Any) -> Iterator[Any]:
    settings = Settings(name="scripted", port=0, api_keys=("key",))
    with LiveServer(llm, settings) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("options", [GREEDY, {"temperature": 1.0, "seed": 5}])
def test_messages_match_the_engine(client: Any, llm: Any, options: dict[str, Any]) -> None:
    alone = llm.generate(RENDERED, max_tokens=24, **options)
    message = client.messages.create(**OPTIONS, extra_body=options)
    with client.messages.stream(**OPTIONS, extra_body=options) as stream:
        assert "".join(stream.text_stream) == alone.text
        streamed = stream.get_final_message()
    for found in (message, streamed):
        assert [block.text for block in found.content] == [alone.text]
        usage = found.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == len(RENDERED)
        assert usage.output_tokens == len(alone.tokens)
        assert found.stop_reason in ("max_tokens", "end_turn")
    assert message.anydecode["passes"] > 0


def test_stop_sequences(client: Any, llm: Any) -> None:
    text = llm.generate(RENDERED, max_tokens=24).text
    message = client.messages.create(**OPTIONS, stop_sequences=[text[5:7]], extra_body=GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[5:7])
    assert message.content[0].text == text[:5]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_called_and_answered(client: Any, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    options = {**OPTIONS, "max_tokens": 200, "tools": TOOLS, "tool_choice": choice}
    message = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    for found in (message, streamed):
        (block,) = found.content
        assert (block.type, block.name, found.stop_reason) == ("tool_use", "weather", "tool_use")
        assert block.input["town"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    turns = [
        *ASK,
        {"role": "assistant", "content": streamed.content},
        {"role": "user", "content": [result]},
    ]
    options = {**OPTIONS, "messages": turns, "tools": TOOLS, "tool_choice": {"type": "none"}}
    answer = client.messages.create(**options)
    counted = client.messages.count_tokens(
        model="scripted", messages=turns, tools=TOOLS, tool_choice={"type": "none"}
    )
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_blocks_are_read_and_sent_back() -> None:
    with answering(b"hm</think>yes", TemplateTokenizer(THINKING)) as llm:
        with LiveServer(llm, Settings(port=0)) as server:
            with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
                ask: list[Any] = [{"role": "user", "content": "abc"}]
                options: dict[str, Any] = {
                    "model": "model", "max_tokens": 2000, "messages": ask, "extra_body": GREEDY,
                    "thinking": {"type": "enabled", "budget_tokens": 1024},
                }  # fmt: skip
                message = client.messages.create(**options)
                with client.messages.stream(**options) as stream:
                    kinds = [event.type for event in stream]
                    streamed = stream.get_final_message()
                for found in (message, streamed):
                    assert [block.type for block in found.content] == ["thinking", "text"]
                    assert found.content[0].thinking == "hm" and found.content[0].signature
                    assert found.content[1].text == "yes"
                assert {"thinking", "signature", "text"} <= set(kinds)
                turns = [*ask, {"role": "assistant", "content": message.content}, *ask]
                assert client.messages.create(**{**options, "messages": turns}).content


def test_schemas_are_enforced(client: Any) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": TOWN}}
    message = client.messages.create(**{**OPTIONS, "max_tokens": 80}, output_config=config)
    assert json.loads(message.content[0].text)["town"] in ("Oslo", "Rome")


def test_errors_map_to_anthropics_exceptions(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        client.messages.create(**{**OPTIONS, "model": "another"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="has type 'image'"):
        client.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        long = [{"role": "user", "content": "a" * 5000}]
        client.messages.create(**{**OPTIONS, "messages": long})
    with pytest.raises(anthropic.AuthenticationError, match="requires an API key"):
        client.with_options(api_key="wrong").messages.create(**OPTIONS)


def test_bearer_tokens_are_keys(client: Any) -> None:
    with anthropic.Anthropic(base_url=client.base_url, auth_token="key") as other:
        assert other.messages.create(**OPTIONS).content


def test_the_tool_runner(client: Any) -> None:
    """Newer versions ask the server first to keep the conversation."""
    towns = []

    @anthropic.beta_tool
    def weather(town: Literal["Oslo", "Rome"]) -> str:
        """The weather.

        Args:
            town: A town.
        """
        towns.append(town)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        **{**OPTIONS, "max_tokens": 200}, tools=[weather], max_iterations=2,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    messages = list(runner)
    assert [one.stop_reason for one in messages] == ["tool_use", "tool_use"]
    assert towns and set(towns) <= {"Oslo", "Rome"}


def test_models(client: Any) -> None:
    [found] = client.models.list()
    assert (found.id, found.type, found.display_name) == ("scripted", "model", "scripted")
    assert found.created_at == client.models.retrieve("scripted").created_at
