"""Inspect: an evaluation through its provider for OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageTool,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import ToolFunction, tool  # noqa: E402
from inspect_ai.util import json_schema  # noqa: E402

from anydecode import LLM  # noqa: E402

MODEL = "smollm2-135m-instruct"
SAMPLES = [
    Sample(input="What colour is the sky?", target="blue"),
    Sample(input="Name a city.", target="no such text"),
]


def evaluate(url: str, folder: Path, task: Task, **options: Any) -> Any:
    """The samples of the log of an evaluation that succeeded."""
    # Not kept for later calls: another test's server has another address.
    model = get_model(f"openai-api/anydecode/{MODEL}", base_url=url, api_key="none", memoize=False)
    (log,) = eval(task, model=model, display="none", log_dir=str(folder), max_retries=0, **options)
    assert log.status == "success", log.error
    return log


def test_an_evaluation_has_the_texts_of_the_engine(url: str, llm: LLM, tmp_path: Path) -> None:
    task = Task(dataset=SAMPLES, solver=generate(), scorer=includes())
    log = evaluate(url, tmp_path, task, temperature=0, max_tokens=24)
    found = [sample.output.completion for sample in log.samples]
    prompts = [[{"role": "user", "content": sample.input}] for sample in SAMPLES]
    alone = [llm.chat(prompt, max_tokens=24) for prompt in prompts]
    assert found == [answer.text for answer in alone]
    assert [sample.output.usage.output_tokens for sample in log.samples] == [
        len(answer.tokens) for answer in alone
    ]
    right = ["blue" in answer.text.lower() for answer in alone]
    assert log.results.scores[0].metrics["accuracy"].value == sum(right) / 2


@tool
def population() -> Any:
    async def execute(city: str) -> str:
        """The population of a city.

        Args:
            city: Its name.
        """
        return f"{len(city)} people"

    return execute


def test_a_tool_is_called_and_its_result_answered(url: str, tmp_path: Path) -> None:
    solver = [use_tools(population(), tool_choice=ToolFunction("population")), generate("single")]
    task = Task(dataset=SAMPLES[1:], solver=[*solver, generate("none")])
    log = evaluate(url, tmp_path, task, temperature=0, max_tokens=64)
    messages = log.samples[0].messages
    (call,) = messages[1].tool_calls
    assert call.function == "population" and call.parse_error is None
    assert isinstance(messages[2], ChatMessageTool) and messages[2].error is None
    assert messages[2].text == f"{len(call.arguments['city'])} people"
    assert messages[3].role == "assistant"


class Town(BaseModel):
    """A town, without bounds of numbers, which this client does not send."""

    name: Literal["Oslo", "Rome"]
    is_large: bool


def test_a_schema_is_enforced_and_log_probabilities_are_read(url: str, tmp_path: Path) -> None:
    schema = ResponseSchema(name="town", json_schema=json_schema(Town), strict=True)
    config = GenerateConfig(response_schema=schema, logprobs=True, top_logprobs=2, seed=3)
    task = Task(dataset=SAMPLES[1:], solver=generate(), config=config)
    choice = evaluate(url, tmp_path, task, max_tokens=60).samples[0].output.choices[0]
    Town.model_validate_json(choice.message.text)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_an_error_of_the_server_is_in_the_log(url: str, tmp_path: Path) -> None:
    model = get_model("openai-api/anydecode/another", base_url=url, api_key="none", memoize=False)
    task = Task(dataset=SAMPLES[:1], solver=generate())
    (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), max_retries=0)
    assert log.status == "error" and "does not exist on this server" in log.error.message
