"""The server, used through Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

ollama = pytest.importorskip("ollama")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402
from server_models import THINKING, TOWN, TemplateTokenizer, answering  # noqa: E402

ASK = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
RENDERED = f"user: {ASK[0]['content']}\nassistant: "
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: Any) -> Iterator[Any]:
    with LiveServer(llm, Settings(name="scripted", port=0, api_keys=("key",))) as server:
        yield ollama.Client(host=server.url, headers={"authorization": "Bearer key"})


def test_answers_match_the_engine(client: Any, llm: Any) -> None:
    alone = llm.generate(RENDERED, max_tokens=24)
    chat = client.chat("scripted", ASK, options=GREEDY)
    assert chat.message.content == alone.text
    assert (chat.eval_count, chat.prompt_eval_count) == (len(alone.tokens), len(RENDERED))
    assert chat.done and chat.done_reason == alone.finish_reason
    parts = list(client.chat("scripted", ASK, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == alone.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    prompt = ASK[0]["content"]
    assert client.generate("scripted", prompt, options=GREEDY).response == alone.text
    parts = list(client.generate("scripted:latest", prompt, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == alone.text
    raw = client.generate("scripted", "abc", raw=True, options=GREEDY)
    assert raw.response == llm.generate("abc", max_tokens=24).text
    options = ollama.Options(seed=3, num_predict=24, temperature=0.8, num_ctx=512)
    sampled = llm.generate(
        RENDERED, max_tokens=24, seed=3, temperature=0.8, top_k=40, top_p=0.9
    ).text
    assert client.chat("scripted", ASK, options=options).message.content == sampled


def weather(town: str) -> str:
    """The weather of a town.

    Args:
        town: Its name.
    """
    return town


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
    with answering(f"I ask.{call}".encode(), TemplateTokenizer(THINKING)) as llm:
        settings = Settings(name="scripted", port=0, reasoning_parser="none")
        with LiveServer(llm, settings) as server:
            client = ollama.Client(host=server.url)
            ask: list[Any] = [{"role": "user", "content": "abc"}]
            options = {"temperature": 0, "num_predict": 200}
            answer = client.chat("scripted", ask, tools=[weather], options=options, stream=stream)
            parts = list(answer) if stream else [answer]
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            (function,) = [call.function for call in calls]
            assert (function.name, function.arguments) == ("weather", {"town": "Oslo"})
            turns = [
                *ask,
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": "rain", "tool_name": "weather"},
            ]
            assert client.chat("scripted", turns, tools=[weather], options=GREEDY).done


def test_formats_are_enforced(client: Any) -> None:
    options = {"num_predict": 80, "seed": 1}
    found = client.chat("scripted", ASK, format=TOWN, options=options).message.content
    assert json.loads(found)["town"] in ("Oslo", "Rome")
    found = client.generate("scripted", "abc", format="json", options=options).response
    assert isinstance(json.loads(found), dict)


def test_reasoning_is_apart_from_the_answer() -> None:
    with answering(b"hm</think>yes", TemplateTokenizer(THINKING)) as llm:
        with LiveServer(llm, Settings(name="scripted", port=0)) as server:
            client = ollama.Client(host=server.url)
            ask = [{"role": "user", "content": "abc"}]
            message = client.chat("scripted", ask, think=True, options=GREEDY).message
            assert (message.thinking, message.content) == ("hm", "yes")
            assert client.show("scripted").capabilities == ["completion", "tools", "thinking"]


def test_models_are_listed_and_described(client: Any) -> None:
    (listed,) = client.list().models
    assert listed.model == "scripted:latest" and listed.modified_at
    (loaded,) = client.ps().models
    assert loaded.context_length == 4096
    assert client.show("scripted").modelinfo["scripted.context_length"] == 4096


def test_embeddings_are_equal_by_both_endpoints(client: Any) -> None:
    found = client.embed("scripted", ["hello", "quite another"]).embeddings
    assert len(found) == 2 and found[0] != found[1]
    assert client.embeddings("scripted", "hello").embedding == found[0]


def test_errors_have_the_status_and_the_reason(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat("another", ASK)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="suffix needs a fill-in-the-middle model"):
        list(client.generate("scripted", "a", suffix="b", stream=True))
    with pytest.raises(ollama.ResponseError, match="/api/pull is not supported"):
        client.pull("scripted")
    host = str(client._client.base_url)
    with pytest.raises(ollama.ResponseError, match="requires an API key") as caught:
        ollama.Client(host=host).chat("scripted", ASK)
    assert caught.value.status_code == 401
