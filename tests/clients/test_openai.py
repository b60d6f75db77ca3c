"""The `openai` package: its typed helpers, streams, asynchronous client and errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from anydecode import LLM  # noqa: E402
from client_shapes import Booking, City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"
ASK: list[Any] = [{"role": "user", "content": "Name a city."}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_and_its_stream_are_the_engine(client: Any, llm: LLM) -> None:
    alone = llm.chat(ASK, max_tokens=12)
    answer = client.chat.completions.create(**GREEDY, max_completion_tokens=12)
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].finish_reason == alone.finish_reason
    assert answer.usage.completion_tokens == len(alone.tokens)
    with client.chat.completions.stream(**GREEDY, max_tokens=12) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        message = stream.current_completion_snapshot.choices[0].message
    assert text == message.content == alone.text


def test_samples_seeds_stops_and_logprobs(client: Any, llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "n": 2}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, **options, logprobs=True, top_logprobs=2
    )
    alone = llm.chat(ASK, **options, logprobs=2)
    for choice, sample in zip(answer.choices, alone.samples, strict=True):
        assert choice.message.content == sample.text
        values = [entry.logprob for entry in choice.logprobs.content]
        assert values == pytest.approx([entry.logprob for entry in sample.logprobs])
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    plain = llm.chat(ASK, max_tokens=12).text
    stopped = client.chat.completions.create(**GREEDY, max_tokens=12, stop=[plain[5:8]])
    assert stopped.choices[0].message.content == plain[: plain.index(plain[5:8])]


@pytest.mark.parametrize("shape", [City, Trip, Booking])
def test_a_pydantic_model_is_parsed(client: Any, shape: type[Any]) -> None:
    answer = client.chat.completions.parse(**GREEDY, max_tokens=120, response_format=shape)
    assert isinstance(answer.choices[0].message.parsed, shape)
    with client.chat.completions.stream(**GREEDY, max_tokens=120, response_format=shape) as stream:
        deltas = [event for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    assert deltas[-1].parsed is not None


@pytest.mark.parametrize("parallel", [False, True])
def test_typed_tools_are_called_and_their_results_answered(client: Any, parallel: bool) -> None:
    options: dict[str, Any] = {
        **GREEDY,
        "max_tokens": 200,
        "tools": [openai.pydantic_function_tool(shape) for shape in (Booking, Trip)],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
    }
    answer = client.chat.completions.parse(**options)
    choice = answer.choices[0]
    calls = choice.message.tool_calls
    assert calls and (parallel or len(calls) == 1)
    if choice.finish_reason == "length":  # more calls than there is room for
        calls = calls[:-1]
    assert all(isinstance(call.function.parsed_arguments, (Booking, Trip)) for call in calls)
    with client.chat.completions.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0].message
    pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) >= len(calls)
    assert [call.function.arguments for call in streamed.tool_calls] == [
        call.function.arguments for call in choice.message.tool_calls
    ]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"}
        for call in choice.message.tool_calls
    ]
    after = client.chat.completions.create(
        model=MODEL,
        messages=[*ASK, choice.message, *results],
        tools=options["tools"],
        max_tokens=8,
    )
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_named_tool_is_called(client: Any) -> None:
    answer = client.chat.completions.create(
        **GREEDY,
        max_tokens=120,
        tools=[openai.pydantic_function_tool(shape, name=shape.__name__) for shape in (City, Trip)],
        tool_choice={"type": "function", "function": {"name": "City"}},
    )
    calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["City"]
    City.model_validate_json(calls[0].function.arguments)


def test_completions_echo_with_logprobs(client: Any, llm: LLM) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The sky is", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs.token_logprobs
    head, *tail = llm.encode("The sky is")
    assert found[0] is None and found[1:] == pytest.approx(llm.score([head], tail).logprobs)


def test_embeddings_are_the_engine(client: Any, llm: LLM) -> None:
    for form in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=MODEL, input=["a cat", "the sea"], **form)
        for entry, text in zip(found.data, ("a cat", "the sea"), strict=True):
            assert entry.embedding == pytest.approx(llm.embed(text), abs=1e-4)


async def test_the_asynchronous_client_runs_requests_together(url: str, llm: LLM) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(seed: int) -> str:
            text = ""
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=ASK, max_tokens=8, seed=seed, stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            return text

        found = await asyncio.gather(*map(ask, range(4)))
    assert found == [llm.chat(ASK, max_tokens=8, temperature=1, seed=n).text for n in range(4)]


async def test_what_a_client_leaves_is_cancelled(url: str, llm: LLM) -> None:
    before = llm.engine.num_tokens
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            **GREEDY, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.5).chat.completions.create(
                **GREEDY, max_tokens=4000, extra_body={"ignore_eos": True}
            )
        while llm.engine.running:
            await asyncio.sleep(0.05)
    assert llm.engine.num_tokens - before < 4000


def test_errors_are_the_clients_exceptions(client: Any, keyed_url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist on this server"):
        client.chat.completions.create(model="gpt-4o", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 20000}]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    for key, error in (("wrong", openai.AuthenticationError), ("secret", None)):
        other = openai.OpenAI(base_url=keyed_url, api_key=key, max_retries=0)
        if error is None:
            assert [model.id for model in other.models.list()] == [MODEL]
        else:
            with pytest.raises(error, match="API key"):
                other.chat.completions.create(model=MODEL, messages=ASK)


def test_a_schema_that_no_value_matches_is_refused(client: Any) -> None:
    schema = {"type": "integer", "minimum": 2, "maximum": 1}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **GREEDY,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema, "strict": True},
            },
        )
    assert caught.value.code == "constraint_error"
    assert json.loads(caught.value.response.text)["error"]["message"]


def test_a_batch_has_the_answers_of_direct_requests(client: Any) -> None:
    bodies = [{**GREEDY, "max_tokens": 8}, {**GREEDY, "max_tokens": 8, "temperature": 1, "seed": 2}]
    url = "/v1/chat/completions"
    lines = [
        json.dumps({"custom_id": f"id {number}", "method": "POST", "url": url, "body": body})
        for number, body in enumerate(bodies)
    ]
    content = "\n".join(lines).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    end = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    for body, line in zip(
        bodies, client.files.content(batch.output_file_id).text.splitlines(), strict=True
    ):
        message = json.loads(line)["response"]["body"]["choices"][0]["message"]
        direct = client.chat.completions.create(**body)
        assert message["content"] == direct.choices[0].message.content


def test_files_are_described_and_deleted_and_a_batch_is_cancelled(client: Any) -> None:
    url = "/v1/chat/completions"
    body = {**GREEDY, "max_tokens": 4000, "ignore_eos": True}
    line = json.dumps({"custom_id": "long", "method": "POST", "url": url, "body": body})
    file = client.files.create(file=("requests.jsonl", line.encode()), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(line)
    assert file.id in [one.id for one in client.files.list()]
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    end = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status != "cancelled":
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    assert batch.id in [one.id for one in client.batches.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
