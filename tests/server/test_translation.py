"""What the translators of other APIs share."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.server.protocol import Options, StructuredOutputs  # noqa: E402
from anydecode.server.translation import (  # noqa: E402
    arguments_object,
    chat_request,
    thinking_variables,
)

LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, {"b": "x"}], "c": null}', {"a": [1, {"b": "x"}], "c": None}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": tr', {}),
        ("", {}),
        ("{", {}),
        ("[1]", {}),
        ("no JSON", {}),
        ('{"a": NaN}', {}),
        ('{"a": 1e400, "b": [-1e400]}', {"a": LARGEST, "b": [-LARGEST]}),
        ('{"a": 1' + "0" * 9999 + "}", {}),
    ],
)
def test_arguments_are_an_object_of_json(text: str, value: dict[str, Any]) -> None:
    assert arguments_object(text) == value
    assert json.loads(json.dumps(value, allow_nan=False)) == value


@pytest.mark.parametrize(
    ("is_enabled", "template", "variables"),
    [
        (True, "{{ enable_thinking }}", {"enable_thinking": True, "thinking": True}),
        (False, "{{ thinking }}", {"thinking": False}),
        (True, "{{ messages }}", {}),
        (None, "{{ thinking }}", {}),
        (True, None, {}),
    ],
)
def test_the_variables_of_reasoning(
    is_enabled: bool | None, template: str | None, variables: dict[str, bool]
) -> None:
    assert thinking_variables(is_enabled, template) == variables


def test_a_request_has_the_options_that_are_set() -> None:
    structured = StructuredOutputs(regex="a")
    options = Options(
        model="m", stream=True, logprobs=2, top_k=3, structured_outputs=structured, seed=None
    )
    request: Any = chat_request(options, messages=[], top_k=4)
    assert request.model_fields_set == {"messages", "model", "structured_outputs", "top_k"}
    assert (request.top_k, request.structured_outputs, request.stream) == (4, structured, None)
