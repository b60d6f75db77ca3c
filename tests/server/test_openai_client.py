"""The server, used through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

pytestmark = pytest.mark.clients
ASK = [{"role": "user", "content": "the cat sat on the mat and the cat sat on"}]
RENDERED = "user: the cat sat on the mat and the cat sat on\nassistant: "
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Oslo", "Rome"]}},
                "required": ["town"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: Any) -> Iterator[Any]:
    with LiveServer(llm, Settings(name="scripted", port=0)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield client


def test_chat_matches_the_engine(client: Any, llm: Any) -> None:
    for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}):
        answer = client.chat.completions.create(
            model="scripted", messages=ASK, max_tokens=24, **options
        )
        alone = llm.generate(RENDERED, max_tokens=24, **options)
        assert answer.choices[0].message.content == alone.text
        assert answer.choices[0].finish_reason == alone.finish_reason
        assert answer.usage.prompt_tokens == len(RENDERED)
        assert answer.usage.completion_tokens == len(alone.tokens)
    other = client.chat.completions.create(
        model="scripted", messages=ASK, max_tokens=24, temperature=0.9, seed=6
    )
    assert other.choices[0].message.content != alone.text


def test_stream_chunks_add_up_to_the_response(client: Any) -> None:
    options: dict[str, Any] = {"model": "scripted", "messages": ASK, "max_tokens": 40, "seed": 3}
    response = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    texts, notes, reasons = ["", ""], [[], []], [None, None]
    usage = None
    stream = client.chat.completions.create(
        **options, n=2, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            notes[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in response.choices]
    assert reasons == [choice.finish_reason for choice in response.choices]
    assert notes == [choice.logprobs.content for choice in response.choices]
    assert usage == response.usage
    assert usage.prompt_tokens == len(RENDERED)
    # Stop tokens count too, but are not part of the text.
    generated = sum(map(len, notes)) + sum(reason == "stop" for reason in reasons)
    assert usage.completion_tokens == generated
    assert texts[0] != texts[1]


def test_logprobs_match_the_engine(client: Any, llm: Any) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ASK, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    alone = llm.generate(RENDERED, max_tokens=8, logprobs=3)
    for entry, note in zip(answer.choices[0].logprobs.content, alone.logprobs, strict=True):
        assert bytes(entry.bytes) == llm.tokenizer.token_bytes(note.token)
        assert entry.logprob == pytest.approx(note.logprob)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
            [value for _, value in note.top]
        )


def test_stop_bias_and_penalties_reach_the_engine(client: Any, llm: Any) -> None:
    plain = llm.generate("abc", max_tokens=30)
    stop = plain.text[6:8]
    cut = client.completions.create(
        model="scripted", prompt="abc", max_tokens=30, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == plain.text[: plain.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    forced = client.completions.create(
        model="scripted", prompt="abc", max_tokens=5, temperature=0, logit_bias={"122": 100}
    )
    assert forced.choices[0].text == "zzzzz"
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "frequency_penalty": 2.0}
    penalised = client.completions.create(model="scripted", prompt="abc", **options)
    assert penalised.choices[0].text == llm.generate("abc", **options).text != plain.text


def test_completions_take_many_prompts_tokens_and_echo(client: Any, llm: Any) -> None:
    answer = client.completions.create(
        model="scripted", prompt=["ab", "cd"], n=2, seed=4, max_tokens=6, logprobs=1, echo=True
    )
    expected = [
        sample.text
        for prompt in ("ab", "cd")
        for sample in llm.generate(prompt, n=2, seed=4, max_tokens=6, temperature=1.0).samples
    ]
    found = [choice.text for choice in answer.choices]
    assert found == [p + text for p, text in zip(["ab", "ab", "cd", "cd"], expected, strict=True)]
    assert answer.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
    ids = client.completions.create(
        model="scripted", prompt=[97, 98], temperature=0, max_tokens=6, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in ids)
    assert text == llm.generate("ab", max_tokens=6).text


def test_decoder_and_trace_fields_work(client: Any, llm: Any) -> None:
    options: dict[str, Any] = {"model": "scripted", "messages": ASK, "max_tokens": 40}
    options["logit_bias"] = {"122": 100}
    plain = client.chat.completions.create(**options, temperature=0)
    fast = client.chat.completions.create(
        **options, temperature=0, extra_body={"decoder": "prompt-lookup:size=4", "trace": True}
    )
    assert fast.choices[0].message.content == plain.choices[0].message.content
    extension = fast.anydecode
    assert extension["decoder"] == "prompt-lookup:size=4"
    assert extension["passes"] < 40
    rounds = extension["trace"][0]
    assert any(entry["accepted"] for entry in rounds)
    assert all(len(entry["drafted"]) == len(entry["drafted_text"]) for entry in rounds)
    page = client.chat.completions.create(
        **options, temperature=0, extra_body={"decoder": "prompt-lookup", "trace": "html"}
    ).anydecode["trace_html"][0]
    assert page.startswith("<!doctype html>")


def test_response_formats_are_enforced(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="scripted",
        messages=ASK,
        max_tokens=300,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"a", "b"} and value["b"] in ("x", "y")
    with pytest.raises(openai.BadRequestError, match="response_format has type 'xml'"):
        client.chat.completions.create(
            model="scripted", messages=ASK, response_format={"type": "xml"}
        )


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_arguments_match_their_schema(client: Any, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=ASK,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        seed=2,
        stream=stream,
    )
    if stream:
        chunks = list(answer)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["town"] in ("Oslo", "Rome")
    assert reason == "tool_calls"


def test_tool_results_are_accepted_in_conversations(client: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = client.chat.completions.create(
        model="scripted",
        messages=[
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=4,
    )
    assert answer.usage.completion_tokens <= 4


def test_responses_match_the_engine_with_and_without_streaming(client: Any, llm: Any) -> None:
    prompt = "system: be brief\nuser: hello\nassistant: "
    alone = llm.generate(prompt, max_tokens=12)
    options: dict[str, Any] = {
        "model": "scripted", "input": "hello", "instructions": "be brief",
        "max_output_tokens": 12, "temperature": 0,
    }  # fmt: skip
    response = client.responses.create(**options)
    assert response.output_text == alone.text
    assert response.usage.output_tokens == len(alone.tokens)
    events = list(client.responses.create(**options, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == alone.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == alone.text
    with pytest.raises(openai.NotFoundError, match="no stored response 'resp_1'"):
        client.responses.create(**options, previous_response_id="resp_1")


RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]


def test_calls_of_responses_are_answered(client: Any) -> None:
    options: dict[str, Any] = {
        "model": "scripted", "tools": RESPONSE_TOOLS, "max_output_tokens": 200,
        "extra_body": {"seed": 2},
    }  # fmt: skip
    forced: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    response = client.responses.create(**options, **forced, input="hello")
    [call] = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments)["town"] in ("Oslo", "Rome")
    with client.responses.stream(**options, **forced, input="hello") as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        final = stream.get_final_response()
    [streamed] = [item for item in final.output if item.type == "function_call"]
    assert streamed.arguments == call.arguments == snapshots[-1]
    result: dict[str, Any] = {
        "type": "function_call_output", "call_id": call.call_id, "output": "rain",
    }  # fmt: skip
    stored = client.responses.create(
        **options, previous_response_id=response.id, input=[result], tool_choice="none"
    )
    ask = {"role": "user", "content": "hello"}
    sent = client.responses.create(
        **options, input=[ask, *response.output, result], tool_choice="none", store=False
    )
    assert stored.output_text == sent.output_text
    assert stored.usage.input_tokens == sent.usage.input_tokens


def test_responses_are_parsed(client: Any) -> None:
    from typing import Literal

    import pydantic

    class Town(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        name: Literal["Oslo", "Rome"]

    options: dict[str, Any] = {"model": "scripted", "input": "hello", "text_format": Town}
    response = client.responses.parse(**options, extra_body={"seed": 1})
    assert response.output_parsed.name in ("Oslo", "Rome")
    with client.responses.stream(**options, extra_body={"seed": 1}) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_stored_responses_are_listed_and_deleted(client: Any) -> None:
    options: dict[str, Any] = {"model": "scripted", "max_output_tokens": 4, "temperature": 0}
    included: Any = ["message.output_text.logprobs"]
    first = client.responses.create(**options, input="one", include=included, top_logprobs=2)
    entries = first.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == first.output_text
    second = client.responses.create(
        **options, input="two", previous_response_id=first.id, metadata={"a": "b"}
    )
    assert client.responses.retrieve(second.id) == second
    counted = client.responses.input_tokens.count(input="two", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens
    pages = client.responses.input_items.list(second.id, order="asc", limit=2)
    texts = [item.content[0].text for item in pages]
    assert texts == ["one", first.output_text, "two"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_responses_run_in_the_background(client: Any) -> None:
    options: dict[str, Any] = {"model": "scripted", "input": "one", "background": True}
    long = {"ignore_eos": True, "temperature": 0}
    running = client.responses.create(**options, max_output_tokens=3000, extra_body=long)
    assert running.status == "queued"
    assert client.responses.retrieve(running.id).status in ("queued", "in_progress")
    assert client.responses.cancel(running.id).status == "cancelled"
    events = list(
        client.responses.create(**options, max_output_tokens=8, extra_body=long, stream=True)
    )
    assert [event.type for event in events[:2]] == ["response.created", "response.queued"]
    identity = events[0].response.id
    assert list(client.responses.retrieve(identity, stream=True, starting_after=3)) == events[4:]
    with client.responses.stream(response_id=identity) as stream:
        assert [event.sequence_number for event in stream] == list(range(len(events)))


def test_embeddings_have_unit_length(client: Any) -> None:
    found = client.embeddings.create(model="scripted", input=["hello", "hello", "quite another"])
    one, two, other = (entry.embedding for entry in found.data)
    assert one == two != other
    assert sum(x * x for x in one) == pytest.approx(1.0)
    listed = client.embeddings.create(model="scripted", input="hello", encoding_format="float")
    assert listed.data[0].embedding == pytest.approx(one, abs=1e-6)


def test_errors_map_to_openai_exceptions(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist on this server"):
        client.chat.completions.create(model="another", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="unknown field wings") as caught:
        client.chat.completions.create(model="scripted", messages=ASK, extra_body={"wings": 2})
    assert caught.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError, match="model.s maximum context length") as caught:
        client.completions.create(model="scripted", prompt="a" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
