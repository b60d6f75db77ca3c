"""Fields of OpenAI's API (supported, listed as ignored, or refused), the prompt's
log-probabilities, and token counts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel  # noqa: E402
from anydecode.sampling.banned_words import BannedWordTable  # noqa: E402
from anydecode.server.anthropic.protocol import MessagesRequest  # noqa: E402
from anydecode.server.protocol import (  # noqa: E402
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)
from server_client import CHAT, COMPLETIONS, RESPONSES, Client, served  # noqa: E402
from server_models import TemplateTokenizer  # noqa: E402

LONG = "a prompt that is long enough to fill several blocks of the cache. "


IGNORED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "flex"},
    CHAT: {
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "high",
        "safety_identifier": "s",
        "service_tier": "priority",
        "store": True,
        "stream_options": {"include_obfuscation": True},
        "user": "me",
        "verbosity": "low",
    },
    RESPONSES: {
        "access_programs": {"cyber": "standard"},
        "background_options": {"completion_window": "24h"},
        "context_management": [{"type": "compaction"}],
        "image": {"context_compression": "auto"},
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 2,
        "reasoning": {"effort": "high", "summary": "auto", "mode": "pro"},
        "text": {"verbosity": "high"},
        "top_logprobs": 2,
        "user": "me",
    },
}


def names(fields: dict[str, Any]) -> list[str]:
    """The names that the server lists for `fields`: those with parts are listed by part."""
    parted = {"reasoning", "text", "stream_options"}
    return sorted(
        name
        for field, value in fields.items()
        for name in ([f"{field}.{part}" for part in value] if field in parted else [field])
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_fields_without_effect_are_listed(client: Client, path: str) -> None:
    fields = IGNORED[path]
    plain = client.ask(path, temperature=0)
    assert "ignored" not in plain["anydecode"]
    answer = client.ask(path, temperature=0, **fields)
    assert answer["anydecode"]["ignored"] == names(fields)
    assert answer.get("choices") == plain.get("choices")
    chunks = [one.get("response", one) for one in client.chunks(path, temperature=0, **fields)]
    found = [chunk["anydecode"] for chunk in chunks if "anydecode" in chunk]
    assert [one["ignored"] for one in found] == [names(fields)]


@pytest.mark.parametrize(
    "path, defaults",
    [
        (COMPLETIONS, {"best_of": 1, "suffix": "", "store": False, "service_tier": "auto"}),
        (
            CHAT,
            {
                "modalities": ["text"], "functions": [], "function_call": "none", "store": False,
                "parallel_tool_calls": True, "verbosity": "medium", "metadata": {}, "tools": [],
                "stream_options": {"include_obfuscation": False},
            },
        ),
        (
            RESPONSES,
            {
                "background": False, "tools": [], "tool_choice": "auto", "include": [],
                "truncation": "disabled", "parallel_tool_calls": False, "top_logprobs": 0,
                "text": {"verbosity": "medium", "format": {"type": "text"}},
                "reasoning": {"effort": None, "summary": None},
            },
        ),
    ],
)  # fmt: skip
def test_defaults_and_nulls_are_not_listed_as_ignored(
    client: Client, path: str, defaults: dict[str, Any]
) -> None:
    assert "ignored" not in client.ask(path, **defaults)["anydecode"]
    shared = ["n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "logit_bias"]
    ours = ["trace", "priority", "decoder", "first_finish", "segment", "resume", "top_k"]
    given = [*shared, *ours, *defaults, *(name.partition(".")[0] for name in IGNORED[path])]
    more_fields = {
        COMPLETIONS: ["echo", "logprobs", "max_tokens"],
        CHAT: ["audio", "moderation", "logprobs", "top_logprobs", "max_completion_tokens",
               "response_format", "tool_choice", "chat_template_kwargs"],
        RESPONSES: ["conversation", "prompt", "previous_response_id", "moderation",
                    "instructions"],
    }[path]  # fmt: skip
    nulls = dict.fromkeys([*given, *more_fields])
    assert "ignored" not in client.ask(path, **nulls)["anydecode"]
    part = {"stream_options": {"include_usage": None, "include_obfuscation": None}}
    assert "ignored" not in client.ask(path, **part)["anydecode"]


@pytest.mark.parametrize(
    "path, field, value",
    [
        (CHAT, "audio", {"voice": "ash", "format": "wav"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "function_call", {"name": "f"}),
        (CHAT, "moderation", {"model": "m"}),
        (CHAT, "web_search_options", {}),
        (RESPONSES, "conversation", "conv_1"),
        (RESPONSES, "personality", "friendly"),
        (RESPONSES, "prompt", {"id": "pmpt_1"}),
    ],
)
def test_fields_that_change_the_answer_are_refused(
    client: Client, path: str, field: str, value: Any
) -> None:
    error = client.refused(path, **{field: value})
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert error["message"].startswith(f"{field} is not supported here: ")


@pytest.mark.parametrize(
    "path, fields, param",
    [
        (CHAT, {"reasoning_effort": "very"}, "reasoning_effort"),
        (CHAT, {"verbosity": "loud"}, "verbosity"),
        (CHAT, {"service_tier": "gold"}, "service_tier"),
        (COMPLETIONS, {"service_tier": "gold"}, "service_tier"),
        (RESPONSES, {"service_tier": "gold"}, "service_tier"),
        (RESPONSES, {"reasoning": {"effort": "very"}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"summary": "long"}}, "reasoning.summary"),
        (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
    ],
)
def test_unknown_values_of_fields_without_effect_are_refused(
    client: Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = client.refused(path, **fields)
    assert (error["code"], error["param"]) == ("invalid_body", param)
    assert error["message"].startswith(f"{param} must be '")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "field, value", [("user", 5), ("safety_identifier", []), ("prompt_cache_options", "x")]
)
def test_fields_without_effect_have_types(
    client: Client, path: str, field: str, value: Any
) -> None:
    error = client.refused(path, **{field: value})
    assert (error["code"], error["param"]) == ("invalid_body", field)
    assert error["message"].startswith(f"{field} must be a")


@pytest.mark.parametrize(
    "tool, param",
    [
        ({"cache_control": {"type": "ephemeral"}}, "tools.1.cache_control"),
        ({"function": {"name": "g", "parametres": {}}}, "tools.1.function.parametres"),
    ],
)
def test_unknown_fields_of_tools_are_refused(tool: dict[str, Any], param: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": True}} for name in "fg"]
    model = ScriptedModel(vocab_size=ByteTokenizer.vocab_size, seed=1)
    template = (
        "{% for tool in tools %}{{ tool.function.name }}{{ tool.function.return }}{% endfor %}"
    )
    with LLM(model, tokenizer=TemplateTokenizer(template)) as llm:
        with served(llm, tool_parser="hermes") as client:
            error = client.refused(CHAT, tools=[tools[0], {**tools[1], **tool}])
            assert (error["code"], error["param"]) == ("unknown_parameter", param)
            assert error["message"] == f"unknown field {param}"
            # Null is no value, and a field that the template reads has an effect.
            known = {"name": "g", "return": {"type": "string"}, "parametres": None}
            client.ask(CHAT, tools=[tools[0], {"function": known, "cache_control": None}])


def test_unknown_fields_of_the_tools_of_a_response() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    with scripted_llm() as llm, served(llm) as client:
        error = client.refused(RESPONSES, tools=[tool, {**tool, "name": "g", "parametres": {}}])
        assert (error["code"], error["param"]) == ("unknown_parameter", "tools.1.parametres")
        answer = client.ask(RESPONSES, tools=[{**tool, "defer_loading": True}])
        assert answer["anydecode"]["ignored"] == ["tools.defer_loading"]
        assert "ignored" not in client.ask(RESPONSES, tools=[tool])["anydecode"]


def test_fields_of_input_items_without_effect_are_listed(client: Client) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "detail": "low"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "phase": "commentary",
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "1", "output": "c", "name": None},
    ]  # fmt: skip
    answer = client.ask(RESPONSES, input=items)
    assert answer["anydecode"]["ignored"] == [
        "input.content.detail", "input.encrypted_content", "input.namespace", "input.phase"
    ]  # fmt: skip
    again = client.ask(RESPONSES, input=[items[0] | {"content": "a"}, *answer["output"]])
    assert "ignored" not in again["anydecode"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_messages_have_a_content(client: Client, role: str, content: dict[str, Any]) -> None:
    messages = [{"role": "assistant"}, {"role": role, **content}]
    error = client.refused(CHAT, messages=messages)
    assert (error["code"], error["param"]) == ("invalid_body", "messages.1.content")
    assert error["message"].startswith("messages.1.content is required")
    client.ask(CHAT, messages=[{"role": "assistant"}, {"role": role, "content": ""}])


def test_null_is_the_same_as_no_field_everywhere(client: Client) -> None:
    schemas = client.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"ChatRequest", "EmbeddingRequest", "MessagesRequest", "Tool"} <= schemas.keys()
    for title, schema in schemas.items():
        if "ValidationError" in title:  # of answers that this server does not give
            continue
        for name, field in schema.get("properties", {}).items():
            is_nullable = {"type": "null"} in field.get("anyOf", ())
            assert is_nullable or name in schema.get("required", ()), (title, name)


def test_the_documentation_lists_all_fields() -> None:
    table = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for request in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest):
        for name in (*request.IGNORED, *request.REFUSED):
            assert name in table or f"`.{name.rpartition('.')[2]}`" in table, name


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("value", [1, None])
def test_misspelt_fields_are_refused(client: Client, path: str, value: Any) -> None:
    for field in ("reasoning_efort", "prompt_logprob"):
        error = client.refused(path, **{field: value})
        assert (error["code"], error["param"]) == ("unknown_parameter", field)
    assert client.refused(RESPONSES, reasoning={"efort": "low"})["param"] == "reasoning.efort"


@pytest.mark.parametrize(
    "template, effort, rendered",
    [
        ("effort: {{ reasoning_effort }}", "low", "effort: low"),
        ("thinking: {{ enable_thinking }}", "none", "thinking: False"),
        ("thinking: {{ enable_thinking }}", "low", None),
        ("nothing", "low", None),
    ],
)
def test_the_reasoning_effort_reaches_the_template(
    template: str, effort: str, rendered: str | None
) -> None:
    with LLM(ScriptedModel(seed=1), tokenizer=TemplateTokenizer(template)) as llm:
        with served(llm) as client:
            for path, fields in (
                (CHAT, {"reasoning_effort": effort}),
                (RESPONSES, {"reasoning": {"effort": effort}}),
            ):
                plain = client.ask(path, temperature=0)
                answer = client.ask(path, temperature=0, **fields)
                if rendered is None:
                    assert answer["anydecode"]["ignored"] == names(fields)
                    assert counts(answer["usage"])[0] == counts(plain["usage"])[0]
                else:
                    assert "ignored" not in answer["anydecode"]
                    assert counts(answer["usage"])[0] == len(rendered)
            if rendered is not None:
                own = {"reasoning_effort": "very high", "enable_thinking": "very high"}
                answer = client.ask(CHAT, reasoning_effort=effort, chat_template_kwargs=own)
                assert counts(answer["usage"])[0] == len(rendered.split()[0] + " very high")


def lists_of(choice: dict[str, Any]) -> list[list[Any]]:
    found = choice["logprobs"]
    return [found[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["the cat sat", [*b"the cat sat"], LONG * 3, "a"])
def test_echo_scores_the_prompt(client: Client, llm: LLM, prompt: Any, max_tokens: int) -> None:
    text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    for _ in range(2):  # the second time, the prompt is in the prefix cache
        answer = client.ask(
            COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        [choice] = answer["choices"]
        alone = llm.generate(text, max_tokens=max_tokens, logprobs=1)
        tokens, values, tops, offsets = lists_of(choice)
        scored = llm.score(text[0], text[1:]).logprobs if len(text) > 1 else []
        assert choice["text"] == text + alone.text
        assert choice["finish_reason"] == alone.finish_reason
        assert values == [None, *scored, *(note.logprob for note in alone.logprobs)]
        assert tokens[: len(text)] == list(text) and tops[0] is None
        assert len(tokens) == len(tops) == len(offsets) == len(text) + max_tokens
        assert offsets[: len(text)] == list(range(len(text)))
        for token, value, top in list(zip(tokens, values, tops, strict=True))[1:]:
            assert top[token] == value and len(top) in (1, 2)
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_unknown_fields_are_refused_by_name(client: Client, path: str, body: Any) -> None:
    answer = client.http.post(path, json={**body, "wings": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (400, "unknown field wings")
    assert (error["param"], error["code"]) == ("wings", "unknown_parameter")
    assert "wings" not in client.http.post(path, json=body).text  # control


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_unknown_stream_options_are_refused(client: Client, path: str) -> None:
    body = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETIONS: {"prompt": "a"},
            RESPONSES: {"input": "a"}}[path]  # fmt: skip
    body = {**body, "stream": True, "stream_options": {"wings": 2}}
    answer = client.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options.wings")


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_messages_with_parts_that_would_be_lost_are_refused(client: Client, name: str) -> None:
    call = {"id": "1", "name": "f", "arguments": "{}"}
    reply = {"role": "assistant", "content": None, name: call}
    ask = {"role": "user", "content": "a"}
    body = {"messages": [ask, reply, ask], "max_tokens": 1}
    answer = client.http.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"messages.1.{name}")
    reply[name] = None
    assert client.http.post(CHAT, json=body).status_code == 200


def test_echo_gives_lm_eval_its_loglikelihoods(client: Client, llm: LLM) -> None:
    """With a context and a continuation in one prompt: the sum of the log-probabilities of the
    continuation's tokens, and whether each is the most probable."""
    context = [*b"the cat"]
    greedy = llm.generate(context, max_tokens=5, ignore_eos=True).tokens
    prompts = [context + greedy, context + [*b" sat on"]]
    answer = client.ask(COMPLETIONS, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1)
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        expected = llm.score(context, prompt[len(context) :])
        tokens, values, tops, _ = lists_of(choice)
        part = slice(len(context), -1)
        assert sum(values[part]) == pytest.approx(expected.total)
        best = [max(top, key=top.__getitem__) for top in tops[part]]
        assert (best == tokens[part]) == expected.greedy


def test_echo_with_samples_prompts_and_streams(client: Client) -> None:
    fields: dict[str, Any] = {
        "prompt": ["the cät sat", "ab", LONG * 3], "n": 3, "seed": 3, "max_tokens": 6,
        "echo": True, "logprobs": 2,
    }  # fmt: skip
    response = client.ask(COMPLETIONS, **fields)
    joined = [["", [[], [], [], []]] for _ in response["choices"]]
    for chunk in client.chunks(COMPLETIONS, **fields):
        for choice in chunk["choices"]:
            found = joined[choice["index"]]
            found[0] += choice["text"]
            if choice["logprobs"] is not None:
                found[1] = [a + b for a, b in zip(found[1], lists_of(choice), strict=True)]
    assert joined == [[choice["text"], lists_of(choice)] for choice in response["choices"]]
    tokens, values, _, offsets = lists_of(response["choices"][0])
    assert tokens[5:7] == ["bytes:\\xc3", "bytes:\\xa4"]
    assert offsets[4:9] == [4, 5, 5, 6, 7]  # the character is complete with its second byte
    for first in range(0, 9, 3):  # the samples of one prompt
        prompts = [lists_of(choice)[1][:10] for choice in response["choices"][first : first + 3]]
        length = min(10, len(fields["prompt"][first // 3].encode()))
        assert [one[:length] for one in prompts] == [prompts[0][:length]] * 3
        assert prompts[0][0] is None and None not in prompts[0][1:]


def test_zero_max_tokens_generates_nothing(client: Client) -> None:
    for path, limit in (
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
    ):
        usage = client.ask(path, **{limit: 0})["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    response = client.ask(COMPLETIONS, prompt="abc", max_tokens=0, echo=True, n=2, seed=1)
    assert [choice["text"] for choice in response["choices"]] == ["abc", "abc"]
    assert {choice["finish_reason"] for choice in response["choices"]} == {"length"}


def test_best_of_returns_the_most_probable_samples(client: Client, llm: LLM) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 8, "temperature": 1.0}
    answer = client.ask(COMPLETIONS, prompt=["ab", "cd"], best_of=4, n=2, logprobs=0, **options)
    expected, total = [], 0
    for prompt in ("ab", "cd"):
        samples = llm.generate(prompt, n=4, logprobs=0, **options).samples
        total += sum(len(one.tokens) for one in samples)
        samples.sort(key=lambda one: -sum(note.logprob for note in one.logprobs) / len(one.tokens))
        expected += [one.text for one in samples[:2]]
        assert len({one.text for one in samples}) == 4
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == total
    assert client.ask(COMPLETIONS, best_of=2, **options)["choices"][0]["logprobs"] is None
    assert client.ask(COMPLETIONS, best_of=3, temperature=0)["usage"]["completion_tokens"] == 3
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}):
        assert client.refused(COMPLETIONS, **wrong)["param"] == "best_of"


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Numbers of prompt, cached and generated tokens."""
    if "input_tokens" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, usage["output_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_cached_tokens_are_not_computed_again(path: str, stream: bool) -> None:
    with scripted_llm() as llm:
        runner = llm.engine.runners["target"]
        with served(llm) as client:
            fields: dict[str, Any] = {"temperature": 0, "decoder": "autoregressive"}
            if stream and path != RESPONSES:
                fields["stream_options"] = {"include_usage": True}
            found, rows = [], [0]
            for _ in range(2):
                found.append(counts(client.last(path, stream, LONG * 3, **fields)["usage"]))
                rows.append(runner.num_rows)
    prompt = found[0][0]
    cached = (prompt - 1) // 16 * 16
    assert found == [(prompt, 0, 3), (prompt, cached, 3)]
    assert rows == [0, prompt + 2, 2 * (prompt + 2) - cached]


def test_usage_counts_every_sample_and_each_prompt_once(client: Client) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 1, "ignore_eos": True}
    assert counts(client.ask(COMPLETIONS, prompt=["xyz", "uvwxyz"], **fields)["usage"]) == (
        9,
        0,
        18,
    )
    one = counts(client.ask(CHAT, "what", **fields)["usage"])
    assert one[2] == 9 and one[0] == len("user: what\nassistant: ")
    race = client.ask(COMPLETIONS, prompt="xyz", first_finish=1, **fields)
    assert len(race["choices"]) == 1
    assert counts(race["usage"])[2] == 9


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include", [True, None])
def test_usage_of_every_chunk(client: Client, path: str, include: bool | None) -> None:
    stream_options = {"include_usage": include, "continuous_usage_stats": True}
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    chunks = client.chunks(path, **fields, stream_options=stream_options)
    whole = client.ask(path, **fields)["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole["completion_tokens"] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["prompt_tokens"]}
    assert (chunks[-1]["choices"] == []) is bool(include)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_choices_at_temperature_0_are_equal(client: Client, path: str) -> None:
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}

    def texts(answer: dict[str, Any]) -> list[str]:
        return [one.get("text") or one["message"]["content"] for one in answer["choices"]]

    one = client.ask(path, **fields)
    three = client.ask(path, **fields, n=3)
    assert texts(three) == texts(one) * 3
    assert three["usage"]["completion_tokens"] == 24
    streamed = ["", "", ""]
    for chunk in client.chunks(path, **fields, n=3):
        for choice in chunk["choices"]:
            delta = choice.get("text") or choice.get("delta", {}).get("content") or ""
            streamed[choice["index"]] += delta
    assert streamed == texts(one) * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("closed", [True, False])
def test_reasoning_tokens_are_counted(closed: bool, stream: bool) -> None:
    """The model generates a fixed text, byte by byte."""
    reasoning = "<think>so it is"
    generated = [*(reasoning + ("</think>" + "yes" if closed else "")).encode(), EOS]

    def script(path: tuple[int, ...]) -> Any:
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        logits[generated[len(path) - start]] = 30.0
        return logits

    with LLM(ScriptedModel(script), tokenizer=ByteTokenizer()) as llm:
        start = len("user: abc\nassistant: ")
        with served(llm) as client:
            for path, limit in ((CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")):
                fields: dict[str, Any] = {"temperature": 0, limit: 100, "decoder": "autoregressive"}
                if stream and path == CHAT:
                    fields["stream_options"] = {"include_usage": True}
                usage = client.last(path, stream, **fields)["usage"]
                kind = "completion" if path == CHAT else "output"
                assert usage[f"{kind}_tokens"] == len(generated)
                details = usage[f"{kind}_tokens_details"]
                assert details == {"reasoning_tokens": len(reasoning)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_drafted_from_and_counted(client: Client, stream: bool) -> None:
    def ask(**fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The text, the `anydecode` object and the details of `usage`."""
        options = {"temperature": 0, "max_tokens": 60, **fields}
        if not stream:
            answer = client.ask(CHAT, **options)
            text = answer["choices"][0]["message"]["content"]
            return text, answer["anydecode"], answer["usage"]["completion_tokens_details"]
        chunks = client.chunks(CHAT, **options, stream_options={"include_usage": True})
        text = "".join(c["delta"].get("content") or "" for one in chunks for c in one["choices"])
        extension = next(one["anydecode"] for one in chunks if "anydecode" in one)
        return text, extension, chunks[-1]["usage"]["completion_tokens_details"]

    text, plain, details = ask(decoder="prompt-lookup")
    assert "accepted_prediction_tokens" not in details
    for content in (text, [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]):
        prediction = {"type": "content", "content": content}
        same, predicted, details = ask(decoder="prompt-lookup", prediction=prediction)
        assert same == text and predicted["passes"] < plain["passes"]
        assert "ignored" not in predicted and details["accepted_prediction_tokens"] > 0
        assert details["rejected_prediction_tokens"] >= 0
        same, ignoring, details = ask(decoder="autoregressive", prediction=prediction)
        assert same == text and ignoring["ignored"] == ["prediction"]
        assert "accepted_prediction_tokens" not in details


def test_a_prediction_must_be_text(client: Client) -> None:
    for value in ("abc", {"type": "content"}, {"type": "content", "content": [{"type": "image"}]}):
        assert client.refused(CHAT, prediction=value)["param"].startswith("prediction")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_banned_strings_and_a_thinking_budget_are_fields(client: Client, path: str) -> None:
    def ask(**fields: Any) -> str:
        choice = client.ask(path, temperature=0, max_tokens=40, **fields)["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    text = ask()
    banned = next(text[at : at + 2] for at in range(4, 30) if "�" not in text[at : at + 2])
    answer = ask(banned_strings=[banned.upper()], banned_strings_ignore_case=True)
    assert banned in text and banned not in answer
    assert ask(thinking_token_budget=5) == text  # there is no reasoning
    assert ask(max_thinking_tokens=5) == text
    for wrong in (
        {"banned_strings": "x"}, {"thinking_token_budget": -1}, {"max_thinking_tokens": -1},
    ):  # fmt: skip
        assert client.refused(path, **wrong)["param"] == next(iter(wrong))


@pytest.mark.parametrize("field", ["stop", "banned_strings"])
def test_strings_that_the_text_is_searched_for_are_few(client: Client, field: str) -> None:
    for value in (["a"] * 257, ["a" * 1001]):
        error = client.refused(COMPLETIONS, **{field: value})
        assert error["param"].startswith(field) and "\n" not in error["message"]
    assert client.ask(COMPLETIONS, **{field: ["~" * 1000] * 256})


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ["~" * 1000] * 256), ("stop_tokens", [5] * 16384)],
)
def test_requests_with_long_options_are_built_off_the_event_loop(
    client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    request, threads = llm.request, []

    def counted(*arguments: Any, **options: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        threads.append(threading.current_thread())
        return request(*arguments, **options)

    monkeypatch.setattr(llm, "request", counted)
    client.ask(COMPLETIONS, **{field: value})
    assert threads


@pytest.mark.parametrize("field", ["stop_tokens", "dry_breakers"])
def test_sets_of_tokens_are_limited(client: Client, field: str) -> None:
    assert "16384" in client.refused(COMPLETIONS, **{field: [5] * 16385})["message"]


def test_banned_words_are_short_and_may_be_many(
    client: Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many words are tokenised in a worker process, once for all prompts and samples."""
    assert "1000 characters" in client.refused(COMPLETIONS, banned_words=["a" * 1001])["message"]
    words = [f"w{number}" for number in range(2000)]
    text = client.ask(COMPLETIONS, temperature=0)["choices"][0]["text"]
    encode, encoded = ByteTokenizer.encode, []

    def counted(self: ByteTokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode", counted)
    tables, build = [], BannedWordTable.__init__

    def counted_build(self: BannedWordTable, words: Any) -> None:
        tables.append(words)
        build(self, words)

    monkeypatch.setattr(BannedWordTable, "__init__", counted_build)
    answer = client.ask(COMPLETIONS, temperature=1, n=4, banned_words=words, prompt=["a"] * 8)
    assert len(answer["choices"]) == 32 and encoded == ["a"] * 8 and not tables
    client.ask(COMPLETIONS, temperature=1, n=4, banned_words=words[:2], prompt=["a"] * 8)
    assert len(tables) == 1
    monkeypatch.undo()
    banned = client.ask(COMPLETIONS, temperature=0, banned_words=[text[:1], *words])
    assert banned["choices"][0]["text"][0] != text[0]
    named = client.ask(COMPLETIONS, temperature=0, bad_words=[text[:1], *words])
    assert named["choices"][0]["text"] == banned["choices"][0]["text"]
    few = client.ask(COMPLETIONS, temperature=0, banned_words=[text[:1]])
    assert few["choices"][0]["text"] == banned["choices"][0]["text"]


def test_stop_tokens_have_the_names_of_vllm_too(client: Client) -> None:
    fields = {"temperature": 0, "max_tokens": 8}
    text = client.ask(COMPLETIONS, **fields)["choices"][0]["text"]
    end = next(letter for letter in text[1:] if letter.isascii())
    fields |= {"stop_token_ids": [ord(end)], "include_stop_str_in_output": True}
    choice = client.ask(COMPLETIONS, **fields)["choices"][0]
    assert choice["text"] == text[: text.index(end) + 1]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "words", [["a"] * 2000 + [""], [[97]] * 2000 + [[]], [[97]] * 2000 + [[9999]]]
)
def test_wrong_words_in_long_lists_are_refused(client: Client, words: Any) -> None:
    assert "banned_words contains" in client.refused(COMPLETIONS, banned_words=words)["message"]


def test_predictions_and_negative_prompts_may_be_long(client: Client, llm: LLM) -> None:
    text = client.ask(CHAT, temperature=0)["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": "long " * 100_000}
    answer = client.ask(CHAT, temperature=0, prediction=prediction)
    assert answer["choices"][0]["message"]["content"] == text
    error = client.refused(COMPLETIONS, negative_prompt="long " * 1000, guidance_scale=2.0)
    assert f"maximum context length is {llm.max_length}" in error["message"]


def test_fields_of_messages_that_the_template_does_not_read_are_listed() -> None:
    loop = "{% for one in messages %}{{ one.content }}{{ one.reasoning_content }}{% endfor %}"
    template = f"an assistant named Ada: {loop}"
    message = {"role": "user", "content": "a", "tool_call_id": "c", "refusal": None}
    model = ScriptedModel(seed=1)
    with LLM(model, tokenizer=TemplateTokenizer(template)) as llm, served(llm) as client:
        for extra, listed in (
            ({}, None),
            ({"reasoning_content": "b"}, None),
            ({"name": "me", "cache_control": {"type": "ephemeral"}}, ["cache_control", "name"]),
            (
                {"content": [{"type": "text", "text": "a", "cache_control": {"a": 1}, "x": 1,
                              "annotations": [], "y": None}]},
                ["content.cache_control", "content.x"],
            ),
            (
                {"role": "assistant", "tool_calls": [
                    {"id": "1", "index": 0, "type": "function", "x": 1,
                     "function": {"name": "f", "arguments": "{}", "y": 1}}
                ]},
                ["tool_calls.function.y", "tool_calls.x"],
            ),
        ):  # fmt: skip
            answer = client.ask(CHAT, messages=[{**message, **extra}, message], max_tokens=2)
            names = None if listed is None else [f"messages.{name}" for name in listed]
            assert answer["anydecode"].get("ignored") == names


def test_the_user_of_an_embedding_is_listed_as_ignored(client: Client) -> None:
    for fields, extra in (({}, None), ({"user": "me"}, {"ignored": ["user"]})):
        answer = client.http.post("/v1/embeddings", json={"input": "a", **fields}).json()
        assert answer.get("anydecode") == extra
