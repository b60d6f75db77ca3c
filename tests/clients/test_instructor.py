"""The `instructor` package: typed answers through tools, JSON schemas and JSON in text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pytest

instructor = pytest.importorskip("instructor")

import openai  # noqa: E402
from instructor.core import InstructorRetryException  # noqa: E402

from client_shapes import Booking, City, Trip  # noqa: E402

MODEL = "smollm2-135m-instruct"
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Book a seat in Rome."}],
    "temperature": 0,
    "max_tokens": 160,
    "max_retries": 0,
}
MODES = ("TOOLS", "JSON_SCHEMA")


@pytest.fixture(scope="module")
def raw(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("shape", [City, Trip, Booking])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_filled(raw: Any, mode: str, shape: type[Any]) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode[mode])
    value, answer = client.chat.completions.create_with_completion(**ASK, response_model=shape)
    assert isinstance(value, shape)
    assert answer.usage.completion_tokens > 0


def test_json_of_no_schema_is_sent_back_with_its_error(raw: Any) -> None:
    """This mode describes the schema in the prompt only, and a failure is answered by a retry."""
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON)
    requests: list[Any] = []
    client.on("completion:kwargs", lambda **fields: requests.append(fields))
    try:
        value = client.chat.completions.create(
            **{**ASK, "max_retries": 1, "max_tokens": 40}, response_model=City
        )
        assert isinstance(value, City)
    except InstructorRetryException as error:
        assert error.n_attempts == len(requests) == 2


def test_json_in_a_code_block(raw: Any) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.MD_JSON)
    block = {"regex": '```json\\n\\{"name": "(Oslo|Rome)"\\}\\n```'}
    value = client.chat.completions.create(
        **ASK, response_model=City, extra_body={"structured_outputs": block}
    )
    assert isinstance(value, City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_models_grow(raw: Any, mode: str) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode[mode])
    options = {name: value for name, value in ASK.items() if name != "max_retries"}
    parts = list(  # strictly, the package refuses enums given as text
        client.chat.completions.create_partial(**options, response_model=Trip, strict=False)
    )
    assert isinstance(Trip.model_validate(parts[-1].model_dump()), Trip)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_list_is_streamed_element_by_element(raw: Any, mode: str) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode[mode])
    options = {name: value for name, value in ASK.items() if name != "max_retries"}
    # The package's schema of a list allows other properties, also instead of the list.
    closed = {"structured_outputs": {"disable_additional_properties": True}}
    cities = client.chat.completions.create_iterable(
        **options, response_model=City, extra_body=closed
    )
    # To the end: a stream that is dropped may be collected while httpcore holds its lock, for ever.
    found = list(cities)
    assert found and all(isinstance(city, City) for city in found)


def test_parallel_tools(raw: Any) -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.PARALLEL_TOOLS)
    calls = list(
        client.chat.completions.create(
            **ASK,
            response_model=Iterable[City | Trip],
            extra_body={"tool_choice": "required"},  # the package's choice is "auto"
        )
    )
    assert calls and all(isinstance(call, (City, Trip)) for call in calls)


def test_a_literal_is_chosen(raw: Any) -> None:
    client = instructor.from_openai(raw)
    found = client.chat.completions.create(**ASK, response_model=Literal["spam", "no spam"])
    assert found in ("spam", "no spam")


async def test_the_asynchronous_client(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as raw:
        client = instructor.from_openai(raw)
        assert isinstance(await client.chat.completions.create(**ASK, response_model=Trip), Trip)


def test_an_invalid_request_is_the_servers_error(raw: Any) -> None:
    client = instructor.from_openai(raw)
    with pytest.raises(InstructorRetryException, match="does not exist on this server"):
        client.chat.completions.create(**{**ASK, "model": "gpt-4o"}, response_model=City)
