"""The endpoint that says whether a constraint can be compiled."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from anydecode import LLM  # noqa: E402
from server_client import COMPLETIONS, Client, served  # noqa: E402

VALIDATE = "/v1/constraints/validate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

VALID: dict[str, dict[str, Any]] = {
    "json": {"structured_outputs": {"json": SCHEMA}},
    "json text": {"structured_outputs": {"json": '{"type": "null"}'}},
    "regex": {"structured_outputs": {"regex": "[ab]+"}},
    "gbnf": {"structured_outputs": {"grammar": 'root ::= "x"'}},
    "lark": {"structured_outputs": {"grammar": 'start: "x"'}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
}
#: By name: the constraint, and a part of the reason.
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": {"type": "nothing"}}, "nothing"),
    "json text": ({"json": '{"type"'}, "not valid JSON"),
    "regex": ({"regex": "[a"}, "unclosed character class"),
    "grammar": ({"grammar": 'start: "x" missing'}, "missing"),
    "choice": ({"choice": []}, "choice"),
}


def validated(client: Client, **body: Any) -> dict[str, Any]:
    answer = client.http.post(VALIDATE, json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.mark.parametrize("body", VALID.values(), ids=VALID)
def test_a_valid_constraint_is_accepted_and_nothing_is_generated(
    client: Client, llm: LLM, body: dict[str, Any]
) -> None:
    num_tokens = llm.engine.num_tokens
    result = validated(client, **body)
    assert result["valid"] is True and result["reason"] is None
    assert result["constraint"]["engine"]
    assert llm.engine.num_tokens == num_tokens


def test_the_report_says_what_is_masked_and_what_is_checked_afterwards(client: Client) -> None:
    report = validated(client, structured_outputs={"json": SCHEMA})["constraint"]
    assert "properties" in report["masked"]
    assert report["checked"] == ["uniqueItems at #/properties/a"]


@pytest.mark.parametrize("constraint, reason", INVALID.values(), ids=INVALID)
def test_an_invalid_constraint_has_the_reason_that_a_request_with_it_gets(
    client: Client, constraint: dict[str, Any], reason: str
) -> None:
    result = validated(client, structured_outputs=constraint)
    assert result["valid"] is False and result["constraint"] is None
    assert reason in result["reason"] and "\n" not in result["reason"]
    error = client.refused(COMPLETIONS, structured_outputs=constraint)
    assert error["message"] == result["reason"]


@pytest.mark.slow
def test_a_constraint_beyond_the_limits_is_invalid_and_the_reason_names_the_limit(llm: LLM) -> None:
    with served(llm, prepare_seconds=0.5) as client:
        result = validated(client, structured_outputs={"json": {"const": "x" * 100_000}})
        assert result["valid"] is False
        assert any(limit in result["reason"] for limit in ("deadline", "memory limit"))
        assert validated(client, structured_outputs={"regex": "a"})["valid"] is True


@pytest.mark.parametrize(
    "body, part",
    [
        ({}, "no constraint is given"),
        ({"structured_outputs": {}}, "no constraint is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one constraint"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "prompt": "x"}, "prompt"),
    ],
)
def test_a_request_that_is_not_one_constraint_is_refused(
    client: Client, body: dict[str, Any], part: str
) -> None:
    answer = client.http.post(VALIDATE, json=body)
    assert answer.status_code == 400 and part in answer.json()["error"]["message"]


def test_another_model_is_refused(client: Client) -> None:
    body = {"structured_outputs": {"regex": "a"}, "model": "other"}
    assert client.http.post(VALIDATE, json=body).status_code == 404


def test_validation_needs_the_api_key_and_counts_as_a_request(llm: LLM) -> None:
    body = {"structured_outputs": {"regex": "a"}}
    with served(llm, api_keys=("one",)) as client:
        assert client.http.post(VALIDATE, json=body).status_code == 401
        key = {"authorization": "Bearer one"}
        assert client.http.post(VALIDATE, json=body, headers=key).status_code == 200
    with served(llm, max_requests=0) as client:
        assert client.http.post(VALIDATE, json=body).status_code == 429
