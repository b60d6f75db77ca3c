"""Every operation of `/openapi.json`, with values that schemathesis generates from the schema: the
answers are those that the schema describes, and no request is an internal error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
requests = pytest.importorskip("requests")
schemathesis = pytest.importorskip("schemathesis")  # needs Python 3.11

from hypothesis import HealthCheck, Phase, given  # noqa: E402
from hypothesis import settings as hypothesis_settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    negative_data_rejection,
    positive_data_acceptance,
)

from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.server.app import create_app  # noqa: E402
from anydecode.server.running import LiveServer  # noqa: E402
from anydecode.server.settings import Settings  # noqa: E402

VALID = schemathesis.GenerationMode.POSITIVE
INVALID = schemathesis.GenerationMode.NEGATIVE
ASK = [{"role": "user", "content": "a"}]
PARTS = re.compile(r"{(\w+)}")


def api_schema() -> dict[str, Any]:
    with scripted_llm() as llm:
        schema: dict[str, Any] = create_app(llm).app.openapi()
    return schema


SCHEMA = api_schema()
#: By their name, as "POST /v1/completions".
OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok() for result in schemathesis.openapi.from_dict(SCHEMA).get_all_operations()
    )
}


class Api:
    """A server, and ids of what it has stored."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        lines = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a", "max_tokens": 2},
        }
        files = {"file": ("in.jsonl", json.dumps(lines))}
        file = self.session.post(f"{url}/v1/files", data={"purpose": "batch"}, files=files).json()
        batch = {
            "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        ask = {"input": "a", "max_output_tokens": 2}
        self.ids = {
            "file_id": file["id"],
            "batch_id": self.session.post(f"{url}/v1/batches", json=batch).json()["id"],
            "response_id": self.session.post(f"{url}/v1/responses", json=ask).json()["id"],
            "name": "scripted",
        }

    def check(self, case: Any) -> Any:
        """Send a case, check its answer, and return it."""
        answer = case.call(base_url=self.url, session=self.session, timeout=30)
        # A valid body may be refused for a reason that no schema has: the prompt is too long, the
        # token is not one of the model's, a field is unknown.
        excluded = [positive_data_acceptance]
        if answer.status_code == 413:  # a refusal too: some lists of too many items are that large
            excluded.append(negative_data_rejection)
        case.validate_response(answer, excluded_checks=excluded)
        return answer


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    settings = Settings(name="scripted", port=0, max_choices=4)
    with scripted_llm(max_running=4) as llm:
        with LiveServer(llm, settings) as server:
            yield Api(server.url)
            assert llm.driver.error is None
        llm.engine.check_integrity()


def fields(operation: Any) -> set[str]:
    """The fields of the JSON body of an operation."""
    described = SCHEMA["paths"][operation.path][operation.method]
    schema = described.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = schema.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return set(SCHEMA["components"]["schemas"].get(name, {}).get("properties", {}))


def narrowed(body: Any, known: set[str]) -> Any:
    """A JSON body without unknown fields, which asks for few tokens."""
    if not isinstance(body, dict):
        return body
    limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"} & known
    kept = {name: value for name, value in body.items() if name in known}
    return kept | dict.fromkeys(sorted(limits), 2)


def run(operation: Any, api: Api, mode: Any, num_examples: int) -> None:
    """Send generated requests, and check their answers."""
    known = fields(operation)

    @given(case=operation.as_strategy(generation_mode=mode), is_narrow=st.booleans())
    @hypothesis_settings(
        max_examples=num_examples, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def check(case: Any, is_narrow: bool) -> None:
        if mode is VALID and is_narrow:
            if known:  # schemathesis would take a form that is set for an invalid one
                case.body = narrowed(case.body, known)
            case.path_parameters = {
                name: api.ids.get(name, value) for name, value in case.path_parameters.items()
            }
        api.check(case)

    check()


def has_invalid(operation: Any) -> bool:
    """Whether there are values that the schema of an operation does not allow."""
    described = SCHEMA["paths"][operation.path][operation.method]
    places = {parameter["in"] for parameter in described.get("parameters", ())}
    return "requestBody" in described or "query" in places


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_valid_values_are_answered_as_the_schema_says(api: Api, name: str) -> None:
    run(OPERATIONS[name], api, VALID, 4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in OPERATIONS if has_invalid(OPERATIONS[name])])
def test_invalid_values_are_refused(api: Api, name: str) -> None:
    run(OPERATIONS[name], api, INVALID, 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [VALID, INVALID], ids=["valid", "invalid"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_values(api: Api, name: str, mode: Any) -> None:
    if mode is VALID or has_invalid(OPERATIONS[name]):
        run(OPERATIONS[name], api, mode, 40)


#: Bodies that are answered with a 200. Operations without one need another model, or a folder of
#: adapters.
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "POST /v1/chat/completions": [
        {"messages": ASK, "max_tokens": 2, "stream": stream} for stream in (False, True)
    ],
    "POST /v1/completions": [
        {"prompt": "a", "max_tokens": 2, "stream": stream} for stream in (False, True)
    ],
    "POST /v1/fim/completions": [
        {"prompt": "a", "max_tokens": 2, "stream": stream} for stream in (False, True)
    ],
    "POST /v1/responses": [
        {"input": "a", "max_output_tokens": 2, "stream": stream} for stream in (False, True)
    ],
    "POST /v1/responses/input_tokens": [{"input": "a"}],
    "POST /v1/embeddings": [{"input": ["a", "b"]}],
    "POST /v1/messages": [
        {"messages": ASK, "max_tokens": 2, "stream": stream} for stream in (False, True)
    ],
    "POST /v1/messages/count_tokens": [{"messages": ASK}],
    "POST /v1/constraints/validate": [{"structured_outputs": {"choice": ["a"]}}],
    "POST /tokenize": [{"prompt": "a"}, {"messages": ASK}],
    "POST /detokenize": [{"tokens": [97]}],
    "POST /api/chat": [
        {"messages": ASK, "options": {"num_predict": 2}, "stream": stream}
        for stream in (False, True)
    ],
    "POST /api/generate": [
        {"prompt": "a", "options": {"num_predict": 2}, "stream": stream} for stream in (False, True)
    ],
    "POST /api/embed": [{"input": "a"}],
    "POST /api/embeddings": [{"prompt": "a"}],
    "POST /api/show": [{}],
}
NEED_MORE = {
    f"POST {path}"
    for path in (
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    )
}  # fmt: skip
#: They need what is stored, and change it.
STORED = {
    "POST /v1/files", "POST /v1/batches", "POST /v1/batches/{batch_id}/cancel",
    "POST /v1/responses/{response_id}/cancel",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_bodies_are_answered_as_the_schema_says(api: Api, name: str) -> None:
    for body in ACCEPTED[name]:
        case = OPERATIONS[name].Case(body=body, media_type="application/json")
        assert api.check(case).status_code == 200


def test_what_is_stored_is_answered_as_the_schema_says(api: Api) -> None:
    names = [name for name in OPERATIONS if name.startswith("GET ")]
    assert len(names) > 15
    ids = Api(api.url).ids  # those of `api` may be deleted
    for name in names:
        operation = OPERATIONS[name]
        values = {part: ids[part] for part in PARTS.findall(operation.path)}
        assert api.check(operation.Case(path_parameters=values)).status_code == 200, name


def test_every_operation_is_accepted_once() -> None:
    posts = {name for name in OPERATIONS if name.startswith("POST ")}
    assert posts == ACCEPTED.keys() | NEED_MORE | STORED


def test_a_405_has_all_methods_of_the_path(api: Api) -> None:
    for path, described in SCHEMA["paths"].items():
        answer = api.session.put(api.url + PARTS.sub("a", path))
        assert answer.status_code == 405
        assert answer.headers["allow"].split(", ") == sorted(map(str.upper, described)), path
