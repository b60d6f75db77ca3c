"""Inputs as conversations, for templates with and without the feature asked for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.api.llm import LLM  # noqa: E402
from anydecode.constraints.tools.families import TOOL_FORMATS  # noqa: E402
from anydecode.models.scripted import ScriptedModel  # noqa: E402
from anydecode.server.errors import ApiError  # noqa: E402
from anydecode.server.prompts import (  # noqa: E402
    conversation,
    effort_variables,
    prompt_list,
    with_calls,
    with_tools,
)
from anydecode.server.protocol import Message, Tool  # noqa: E402
from server_client import served  # noqa: E402
from server_models import TemplateTokenizer  # noqa: E402


@pytest.mark.parametrize(
    ("effort", "template", "expected"),
    [
        (None, "{{ reasoning_effort }}", {}),
        ("low", None, {}),  # the tokenizer has no chat template
        ("low", "{{ content }}", {}),
        ("low", "{{ reasoning_effort }}", {"reasoning_effort": "low"}),
        ("none", "{{ enable_thinking }}", {"enable_thinking": False}),
        ("low", "{{ enable_thinking }}", {}),
    ],
)
def test_an_effort_reaches_templates_that_know_it(
    effort: str | None, template: str | None, expected: dict[str, Any]
) -> None:
    assert effort_variables(effort, template) == expected


@pytest.mark.parametrize("template", [None, "{{ content }}"])
def test_tools_are_described_in_one_system_message(template: str | None) -> None:
    tools = [Tool.model_validate({"function": {"name": "weather"}})]
    user = {"role": "user", "content": "hi"}
    (note, *rest), variables = with_tools([user], tools, template, "CALL")
    assert (note["role"], rest, variables) == ("system", [user], {})
    assert "weather" in note["content"] and "CALL" in note["content"]
    system = {"role": "system", "content": "be brief"}
    (joined, *rest), _ = with_tools([system, user], tools, template, "CALL")
    assert joined["content"] == f"be brief\n\n{note['content']}" and rest == [user]
    messages, variables = with_tools([user], tools, "{{ tools }}", "CALL")
    assert messages == [user]
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["weather"]


def called(content: str | None, *arguments: str) -> list[dict[str, Any]]:
    """A conversation with a message of calls of the function "f"."""
    calls = [{"id": "1", "function": {"name": "f", "arguments": one}} for one in arguments]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return conversation([Message.model_validate(message)])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_calls_are_text_for_templates_that_leave_them_out(name: str) -> None:
    call_format = TOOL_FORMATS[name]
    text = call_format.render([("f", {"a": 1})])
    for template in (None, "{{ content }}"):
        (message,) = with_calls(called(None, '{"a": 1}'), template, call_format)
        assert message["content"] == text
        (message,) = with_calls(called("so", '{"a": 1}'), template, call_format)
        assert message["content"] == f"so\n{text}"
    (message,) = with_calls(called(None, '{"a": '), None, call_format)  # was cut
    assert message["content"] == call_format.render([("f", {})])
    for template in ("{{ message.tool_calls }}", "{{ message['tool_calls'] }}"):
        messages = called(None, "{}")
        assert with_calls(messages, template, call_format) == messages
    assert with_calls(called("so"), None, None)[0]["content"] == "so"


def test_a_prompt_contains_the_calls_of_its_conversation() -> None:
    pytest.importorskip("uvicorn")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    llm = LLM(ScriptedModel(seed=1), tokenizer=TemplateTokenizer(template), cache_positions=4096)
    with llm, served(llm) as client:
        tokens = client.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert bytes(tokens).decode() == f"user: go\nassistant: {text}\ntool: done\n"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'(' + a + ')'", '({"x": "é", "y": [1]})'),  # DeepSeek-V3, functionary
        ("'(' + a|string + ')'", '({"x": "é", "y": [1]})'),  # Apriel
        ("'(' ~ a ~ ')'", '({"x": "é", "y": [1]})'),
        ("a|tojson", '{"x": "é", "y": [1]}'),
        ("a.items()|map('first')|join if a is mapping else 'text'", "xy"),
    ],
)
def test_templates_read_arguments_as_an_object_or_as_json(expression: str, text: str) -> None:
    pytest.importorskip("uvicorn")
    template = f"{{% set a = messages[0].tool_calls[0].function.arguments %}}{{{{ {expression} }}}}"
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x":"é","y":[1]}'},
    }
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    llm = LLM(ScriptedModel(seed=1), tokenizer=TemplateTokenizer(template), cache_positions=4096)
    with llm, served(llm) as client:
        for _ in range(2):  # in a worker process, then in this one
            tokens = client.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
            assert bytes(tokens).decode() == text


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_calls_without_arguments_have_an_empty_object(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (turn,) = conversation([Message(role="assistant", content=None, tool_calls=[call])])
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_prompts_are_texts_or_lists_of_tokens() -> None:
    assert prompt_list("a") == ["a"]
    assert prompt_list(["a", "b"]) == ["a", "b"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], [2, 3]]) == [[1], [2, 3]]
    with pytest.raises(ApiError, match="^prompt is empty"):
        prompt_list([])
