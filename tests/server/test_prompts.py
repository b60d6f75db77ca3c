"""Inputs as conversations, for templates with and without the feature asked for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.server.errors import ApiError  # noqa: E402
from anydecode.server.prompts import (  # noqa: E402
    effort_variables,
    prompt_list,
    with_tools,
)
from anydecode.server.protocol import Tool  # noqa: E402


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


def test_prompts_are_texts_or_lists_of_tokens() -> None:
    assert prompt_list("a") == ["a"]
    assert prompt_list(["a", "b"]) == ["a", "b"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], [2, 3]]) == [[1], [2, 3]]
    with pytest.raises(ApiError, match="the prompt is empty"):
        prompt_list([])
