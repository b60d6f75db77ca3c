"""Invalid values in every field of every endpoint: a 400 whose one-line message names the field,
never a 500, and no leaks."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from pydantic import ValidationError  # noqa: E402

from anydecode import catalogue  # noqa: E402
from anydecode.certification.checks import scripted_llm  # noqa: E402
from anydecode.decoders.diffusion.chains import ChainDenoiser  # noqa: E402
from anydecode.decoders.diffusion.denoiser import Denoiser  # noqa: E402
from anydecode.sampling.params import SamplingParams  # noqa: E402
from anydecode.server.anthropic.protocol import (  # noqa: E402
    CountTokensRequest,
    MessagesRequest,
)
from anydecode.server.app import create_app  # noqa: E402
from anydecode.server.bodies import check_size  # noqa: E402
from anydecode.server.errors import ApiError  # noqa: E402
from anydecode.server.ollama.protocol import (  # noqa: E402
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from anydecode.server.protocol import (  # noqa: E402
    ChatRequest,
    CompletionRequest,
    ConstraintRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    FillInRequest,
    Options,
    ResponsesRequest,
    TokenizeRequest,
)
from anydecode.server.settings import Settings  # noqa: E402

DIFFUSION = {Denoiser, ChainDenoiser}
#: Parameters whose cost grows with their value.
SLOW = {"size", "depth", "width", "group"}
JSON = {"content-type": "application/json"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "b", "signature": "c"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "d"}]},
    ]},
]  # fmt: skip
OLLAMA_TURNS = [
    {"role": "assistant", "content": "a", "thinking": "b",
     "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "c", "tool_name": "f"},
]  # fmt: skip
FEW = {"num_predict": 2}
RESUME = {"seed": 1, "samples": [{"number": 0, "tokens": [97]}]}

#: By endpoint: its body model, a minimal body, and larger bodies of which every part is replaced in
#: turn.
ENDPOINTS: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "/v1/completions": (
        CompletionRequest,
        {"prompt": "a", "max_tokens": 2},
        [
            {"prompt": ["a", "b"], "stop": ["x"], "logit_bias": {"97": 1}, "max_tokens": 2},
            {"prompt": [[97], [98]], "stream_options": {"include_usage": True}, "stream": True},
            {"prompt": [97], "response_format": FORMAT, "max_tokens": 2},
            {"prompt": "a", "resume": RESUME, "max_tokens": 3, "seed": 1},
        ],
    ),
    "/v1/fim/completions": (FillInRequest, {"prompt": "a", "max_tokens": 2}, []),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        [
            {"messages": TURNS, "max_tokens": 2},
            {"messages": TURNS[:1], "tools": [TOOL], "max_tokens": 2,
             "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"messages": TURNS[:1], "response_format": FORMAT, "max_tokens": 2},
        ],
    ),
    "/v1/responses": (
        ResponsesRequest,
        {"input": "a", "max_output_tokens": 2},
        [{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
          "text": {"format": {**FORMAT, "schema": SCHEMA}}, "max_output_tokens": 2},
         {"input": ITEMS, "tools": [{"type": "function", **TOOL["function"]}], "stream": True,
          "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 2,
          "metadata": {"a": "b"}}],
    ),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}, [{"input": ["a", "b"]}]),
    "/v1/messages": (
        MessagesRequest,
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        [
            {"messages": BLOCKS, "max_tokens": 2, "system": [{"type": "text", "text": "a"}]},
            {"messages": BLOCKS[:1], "max_tokens": 2, "thinking": {"type": "disabled"},
             "tools": [{"name": "f", "input_schema": SCHEMA}],
             "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"messages": BLOCKS[:1], "max_tokens": 2, "stream": True, "stop_sequences": ["x"],
             "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ],
    ),
    "/v1/messages/count_tokens": (
        CountTokensRequest, {"messages": [{"role": "user", "content": "a"}]}, []
    ),
    "/api/chat": (
        OllamaChatRequest,
        {"messages": [{"role": "user", "content": "a"}], "options": FEW},
        [
            {"messages": OLLAMA_TURNS, "options": {**FEW, "stop": ["x"], "seed": 1}},
            {"messages": OLLAMA_TURNS[1:], "tools": [TOOL], "options": FEW, "think": True},
            {"messages": OLLAMA_TURNS[1:], "format": SCHEMA, "options": FEW, "stream": False},
        ],
    ),
    "/api/generate": (
        GenerateRequest,
        {"prompt": "a", "options": FEW},
        [{"prompt": "a", "raw": True, "options": {**FEW, "temperature": 0}, "logprobs": True}],
    ),
    "/api/embed": (EmbedRequest, {"input": "a"}, [{"input": ["a", "b"]}]),
    "/api/embeddings": (EmbeddingsRequest, {"prompt": "a"}, []),
    "/api/show": (ShowRequest, {}, []),
    "/tokenize": (
        TokenizeRequest, {"prompt": "a"}, [{"messages": TURNS, "tools": [TOOL]}]
    ),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}, []),
    "/v1/constraints/validate": (
        ConstraintRequest, {"structured_outputs": {"choice": ["a"]}}, [],
    ),
}  # fmt: skip


#: Other words by which an error may identify a field.
ALTERNATIVE_WORDS = {
    "prompt": ("the prompt", "token "), "input": ("the prompt", "token "),
    "decoder": ("decoding method",), "max_output_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_tokens",), "stop_sequences": ("stop",),
    "name": ("the model",), "format": ("the schema",),
}  # fmt: skip


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


#: JSON texts, since `json.dumps` cannot produce all of them. Nested parts use every second one.
INVALID_VALUES = [
    "null", "true", "-1", "0", "1e400", "-1e400", "NaN", "1.5", "1" + "0" * 40, '"NaN"', '"x"',
    '""', '"\\ud800"', '["\\ud800"]', "[null]", "[-1]", "[]", "[{}]", "{}", '"\\u0000"', "[[]]",
    '{"\\ud800": 1}', '{"a": {"b": [1]}}', "1", nested(150, "[", "]"), nested(150, '{"a":', "}"),
]  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield (*path, name)
        if isinstance(inner, (dict, list)):
            yield from paths(inner, (*path, name))


def replaced(body: dict[str, Any], path: tuple[Any, ...], invalid: str) -> bytes:
    """`body` with the JSON text `invalid` at `path`."""
    changed: Any = copy.deepcopy(body)
    inner = changed
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = "HERE"
    return json.dumps(changed).replace('"HERE"', invalid).encode()


def cases() -> Iterator[tuple[str, str | None, bytes]]:
    """Yield (endpoint, field that an error must name, body). Fields that the endpoints share are
    tested at one of them."""
    for endpoint, (model, base, bodies) in ENDPOINTS.items():
        names = set(model.model_fields)
        if model is CompletionRequest:
            names |= {field.name for field in fields(SamplingParams)}
        elif model is not EmbeddingRequest:
            names -= set(Options.model_fields)
        for name in sorted(names):
            for invalid in INVALID_VALUES:
                field = (
                    None if "\\ud800" in invalid else name
                )  # invalid JSON: the error gives a column instead
                yield endpoint, field, replaced(base, (name,), invalid)
        for body in bodies:
            for path in paths(body):
                for invalid in INVALID_VALUES[::2] if len(path) > 1 else ():
                    yield endpoint, None, replaced(body, path, invalid)


def check(endpoint: str, body: bytes, answer: Any, field: str | None = None) -> None:
    """Assert that an answer is a complete 200, or an error of the API that names the field."""
    case = (endpoint, body[:300], answer.text[:500])
    if answer.status_code == 200:
        assert "internal_error" not in answer.text, case
        lines = [] if answer.text.startswith(("data:", "event:")) else [answer.text]
        if answer.headers["content-type"] == "application/x-ndjson":
            lines = answer.text.splitlines()
            assert json.loads(lines[-1])["done"], case
        for line in lines:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name}: {case}"))
        return
    is_name = field in ("model", "name", "previous_response_id")
    assert answer.status_code == 400 or (is_name and answer.status_code == 404), case
    error = answer.json()["error"]
    if endpoint.startswith("/api/"):
        error = {"message": error, "param": None}
        assert len(answer.json()) == 1, case
    elif endpoint.startswith("/v1/messages"):
        assert (answer.json()["type"], set(error)) == ("error", {"type", "message"}), case
        error["param"] = None
    else:
        assert set(error) == {"message", "type", "param", "code"}, case
    assert error["message"] and "\n" not in error["message"], case
    text = f"{error['message']} {error['param']}"
    assert field is None or any(
        word in text for word in (field, *ALTERNATIVE_WORDS.get(field, ()))
    ), case


#: JSON of all kinds: numbers that no field allows, texts, and anything nested in lists and objects.
numbers = st.one_of(
    st.integers(-3, 40), st.integers(), st.floats(), st.just(10**400), st.just(-(10**30))
)
texts = st.one_of(st.text(max_size=5), st.sampled_from(["\ud800", "a\nb", "none", "auto", "1"]))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def post() -> Iterator[Any]:
    """Sends a body to an application and returns the answer."""
    loop = asyncio.new_event_loop()
    with scripted_llm(max_running=4) as llm:
        transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        yield lambda path, body: loop.run_until_complete(
            http.post(path, content=body, headers=JSON)
        )
        loop.run_until_complete(http.aclose())
        loop.close()
        assert llm.driver.error is None and not llm.engine.has_work
        llm.engine.check_integrity()


def _fields() -> Iterator[Any]:
    """Endpoints and their fields. Those that endpoints share are slow but for one of these, each
    field another one. Those of Anthropic's API that it shares with the others are tested there."""
    shared = [*Options.model_fields]
    sharing = [path for path, (model, _, _) in ENDPOINTS.items() if issubclass(model, Options)]
    sharing = [path for path in sharing if not path.startswith("/v1/messages")]
    for endpoint, (model, _, _) in ENDPOINTS.items():
        for field in model.model_fields:
            if field not in shared or not issubclass(model, Options):
                yield pytest.param(endpoint, field)
            elif endpoint in sharing:
                is_fast = endpoint == sharing[shared.index(field) % len(sharing)]
                yield pytest.param(endpoint, field, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("endpoint, field", [*_fields()])
@given(value=json_values)
@settings(
    max_examples=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_any_value_of_a_field_is_accepted_or_refused_by_its_name(
    post: Any, endpoint: str, field: str, value: Any
) -> None:
    body = json.dumps({**ENDPOINTS[endpoint][1], field: value}).encode()
    is_invalid_json = b"\\ud800" in body.lower() or b"Infinity" in body or b"NaN" in body
    check(endpoint, body, post(endpoint, body), None if is_invalid_json else field)


TYPES = [
    ("resume", {"seed": 1, "samples": 5}), ("resume", {"seed": True, "samples": []}),
    ("resume", {"samples": [{"number": "x", "tokens": [1]}], "seed": 1}), ("resume", []),
    ("banned_words", [["a"]]), ("banned_words", "ab"), ("banned_words", [[1.5]]),
    ("dry_breakers", "ab"), ("dry_breakers", [True]), ("dry_breakers", {"1": 2}),
    ("stop_tokens", "abc"), ("stop_tokens", ["1"]), ("stop", 5), ("stop", [1]),
    ("seed", 10**400), ("seed", "1"), ("seed", 1.0), ("max_tokens", 10**30), ("n", True),
    ("max_tokens", "5"), ("temperature", "1"), ("temperature", 10**400), ("top_p", float("nan")),
    ("temperature", float("inf")), ("top_k", False), ("top_k", 2.5), ("top_n_sigma", 1e40),
    ("top_w_mass", 1e40), ("logit_bias", {"97": 1e39}), ("logit_bias", {"97": True}),
    ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("ignore_eos", 1), ("top_w", "yes"),
    ("dola_layers", 3), ("dola_layers", [[1]]), ("trace", "xml"), ("stream", "true"),
    ("stream_options", {"include_usage": 1}), ("priority", 10**400), ("segment", 10**40),
    ("decoder", ["beam"]), ("decoder", "x" * 5000), ("logprobs", 10**20), ("model", 5),
    ("prompt", [0, "a"]), ("prompt", {"a": 1}), ("prompt", [[1], "a"]), ("prompt", [10**30]),
]  # fmt: skip


@pytest.mark.parametrize("field, value", TYPES, ids=lambda value: str(value)[:40])
def test_a_wrong_type_is_refused_in_one_line(post: Any, field: str, value: Any) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, field: value}).encode()
    answer = post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert field in message and "\n" not in message and len(message) <= 600


@pytest.mark.parametrize("name", ["messages", "self", "template"])
def test_template_variables_cannot_replace_arguments(post: Any, name: str) -> None:
    ask = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
    for endpoint in ("/v1/chat/completions", "/tokenize"):
        answer = post(endpoint, json.dumps(ask).encode())
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def num_errors(model: Any, body: bytes) -> int:
    try:
        model.model_validate_json(body)
    except ValidationError as error:
        return error.error_count()
    return 0


#: Fields of different types; those of all others take long.
_TYPICAL = ("prompt", "stop", "logit_bias", "structured_outputs", "temperature")


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(name, marks=() if name in _TYPICAL else pytest.mark.slow)
        for name in CompletionRequest.model_fields
    ],
)
def test_a_large_body_of_errors_has_few_errors(field: str) -> None:
    """The time and memory of a refusal do not grow with the number of errors."""
    many = {str(number): None for number in range(99999)}
    for values in ([None] * 9999, [[None]] * 9999, [{}] * 9999, many):
        body = json.dumps({"prompt": "a", field: values}).encode()
        assert num_errors(CompletionRequest, body) < 20


@pytest.mark.slow
def test_a_response_has_few_errors() -> None:
    many = {str(number): None for number in range(99999)}
    for field in ("reasoning", "text", "input", "resume"):
        body = json.dumps({"input": "a", field: many}).encode()
        assert num_errors(ResponsesRequest, body) < 20
    body = json.dumps({"input": "a", "resume": {"seed": 1, "samples": [many] * 9}}).encode()
    assert num_errors(ResponsesRequest, body) < 20


def test_messages_and_tools_stop_at_the_first_error() -> None:
    for field in ("messages", "tools"):
        for values in ([None] * 9999, [{"role": 1}] * 9999):
            body = json.dumps({"messages": [{"role": "user"}], field: values}).encode()
            assert num_errors(ChatRequest, body) < 20


@pytest.mark.slow
def test_messages_of_other_apis_have_few_errors() -> None:
    many = {str(number): None for number in range(9999)}
    values = [many, [{"role": "user", **many}] * 2, [None] * 9999, {"type": "enabled", **many}]
    for model in (MessagesRequest, OllamaChatRequest, GenerateRequest, EmbedRequest):
        for field in model.model_fields.keys() - Options.model_fields.keys():
            for value in values:
                body = json.dumps({"messages": [], "max_tokens": 1, field: value}).encode()
                assert num_errors(model, body) < 20


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_is_refused(post: Any, opening: str) -> None:
    for field in ("prompt", "metadata", "response_format"):
        answer = post("/v1/completions", f'{{"prompt": "a", "{field}": {opening * 250}'.encode())
        assert answer.status_code == 400 and "recursion limit" in answer.text


def test_messages_quote_little_of_a_request(post: Any) -> None:
    for extra in ({"x" * 10**6: 1}, {"model": "x" * 999}, {"decoder": "x" * 999},
                  {"logit_bias": {"x\ny" * 10**5: 1}}):  # fmt: skip
        answer = post("/v1/completions", json.dumps({"prompt": "a", **extra}).encode())
        assert answer.status_code in (400, 404) and len(answer.content) < 1200
        error = answer.json()["error"]
        assert "\n" not in error["message"] + str(error["param"])


@pytest.mark.slow
def test_invalid_values_are_refused(caplog: Any) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    statuses = []
    with scripted_llm(max_running=4) as llm:
        transport = httpx.ASGITransport(create_app(llm), raise_app_exceptions=False)

        async def ask_all() -> None:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                for endpoint, field, body in cases():
                    answer = await http.post(endpoint, content=body, headers=JSON)
                    check(endpoint, body, answer, field)
                    statuses.append(answer.status_code)
                broken = [
                    b"", b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b"[]", b'"x"', b"1", b"null",
                    b"NaN", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"input": "a",}',
                    b"\xef\xbb\xbf{}", '{"prompt": "a"}'.encode("utf-16"),
                    b'{"prompt": 1' + b"0" * 9999,
                ]  # fmt: skip
                for endpoint in ENDPOINTS:
                    for body in broken:
                        answer = await http.post(endpoint, content=body, headers=JSON)
                        # Ollama's API has endpoints without required fields.
                        is_complete = endpoint.startswith("/api/") and body == b"{}"
                        assert answer.status_code == 400 or is_complete, (endpoint, body[:20])
                        check(endpoint, body, answer)
                for path in ("/v1/models/%ff", "/v1/models/%00", "/page/%2e%2e", "/v1/none"):
                    answer = await http.get(path)
                    assert answer.status_code == 404 and answer.json()["error"]["message"]

        asyncio.run(ask_all())
        assert llm.driver.error is None
        llm.engine.check_integrity()
        assert not llm.engine.has_work
    assert min(statuses.count(200), statuses.count(400)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_invalid_decoder_parameters_are_refused(causal: bool, caplog: Any) -> None:
    """An invalid decoder parameter (an invalid token, infinity, a list, a text) is a 400, and ends
    only its own request. The bounds for requests are lifted, so that the methods' own checks are
    tested too."""
    caplog.set_level(logging.CRITICAL + 1)
    built = {key: catalogue.kind_of(key) for key in catalogue.entries()}
    choices = [
        f"{key}:{name}={value}"
        for key, kind in built.items()
        if (kind in DIFFUSION) != causal
        for name in inspect.signature(catalogue.entries()[key].build).parameters
        for value in ("-4000", "Infinity", "[4000]", '["x"]', "{}", "300")
        if name not in SLOW or value != "300"
    ]
    for allowed in ((), tuple(choices)):
        with scripted_llm(causal=causal) as llm:
            app = create_app(llm, Settings(allowed_decoders=allowed))

            async def ask_all(app: Any) -> None:
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                base = "http://localhost"
                async with httpx.AsyncClient(transport=transport, base_url=base) as http:
                    for choice in choices:
                        ask = {"prompt": "a", "max_tokens": 2, "temperature": 0, "decoder": choice}
                        body = json.dumps(ask).encode()
                        answer = await http.post("/v1/completions", content=body, headers=JSON)
                        check("/v1/completions", body, answer)

            asyncio.run(ask_all(app))
            assert llm.driver.error is None and not llm.engine.has_work


@pytest.mark.parametrize(
    "values, allowed",
    [
        ("1," * (1 << 18), False),
        ("{}," * (1 << 13), False),
        ("{" + '"a":1,' * (1 << 14) + '"b":1},', False),
        ("{}," * 8000, True),
        ("1," * 100_000, True),
        ('"' + ',[{"'[:3] * 200_000 + '",', True),
        ('"' + r"\",[{\\" * 100_000 + '",', True),
    ],
    ids=["values", "objects", "members", "fewer objects", "fewer values", "text", "escaped text"],
)
def test_the_values_of_a_body_are_limited(post: Any, values: str, allowed: bool) -> None:
    answer = post("/v1/completions", f'{{"prompt": "a", "n": [{values}1]}}'.encode())
    assert answer.status_code == 400
    assert ("lists and objects; allowed are" in answer.text) != allowed, answer.text


@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_values_are_counted_in_parts_of_any_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydecode.server.bodies._PART", size)
    generator = Random(size)
    for _ in range(50):
        texts = ["".join(generator.choices('a\\",:[{', k=generator.randrange(9))) for _ in range(9)]
        value = [{text: [text, 1]} for text in texts]
        # One value more than there are commas: 8 between the objects, and one in each list.
        counts = {"MAX_VALUES": 1 + 8 + 9, "MAX_MEMBERS": 9, "MAX_CONTAINERS": 1 + 9 + 9}
        content = json.dumps(value).encode()
        for name, count in counts.items():
            monkeypatch.setattr(f"anydecode.server.bodies.{name}", count)
        check_size(content)
        for name, count in counts.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"anydecode.server.bodies.{name}", count - 1)
                with pytest.raises(ApiError, match="the body has at least"):
                    check_size(content)
