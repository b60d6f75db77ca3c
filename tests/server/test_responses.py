"""The endpoint `/v1/responses`: the status of a response."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.models.scripted import EOS, ByteTokenizer, ScriptedModel
from server_client import RESPONSES, served

ANSWER = b"yes"


def answering() -> LLM:
    """A model that answers with `ANSWER` and the end of the text."""
    start = len("user: abc\nassistant: ")

    def script(path: tuple[int, ...]) -> Any:
        logits = np.zeros(ByteTokenizer.vocab_size, np.float32)
        logits[[*ANSWER, EOS][len(path) - start]] = 30.0
        return logits

    return LLM(ScriptedModel(script), tokenizer=ByteTokenizer())


@pytest.mark.parametrize(
    ("limit", "status", "details", "text"),
    [
        (2, "incomplete", {"reason": "max_output_tokens"}, "ye"),
        (3, "incomplete", {"reason": "max_output_tokens"}, "yes"),
        (4, "completed", None, "yes"),
    ],
)
def test_a_response_that_the_limit_cuts_is_incomplete(
    limit: int, status: str, details: dict[str, str] | None, text: str
) -> None:
    fields: dict[str, Any] = {"max_output_tokens": limit, "temperature": 0}
    fields["decoder"] = "autoregressive"
    with answering() as llm, served(llm) as client:
        response = client.ask(RESPONSES, **fields)
        events = client.chunks(RESPONSES, **fields)
    assert events[-1]["type"] == f"response.{status}"
    for found in (response, events[-1]["response"]):
        assert (found["status"], found["incomplete_details"]) == (status, details)
        (message,) = found["output"]
        assert (message["status"], message["content"][0]["text"]) == (status, text)
        assert found["usage"]["output_tokens"] == limit
    (done,) = [event for event in events if event["type"] == "response.output_item.done"]
    assert done["item"] == events[-1]["response"]["output"][0]
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text


def test_the_deltas_of_a_stream_add_up_to_the_text_of_its_last_events() -> None:
    fields: dict[str, Any] = {"max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
    with scripted_llm() as llm, served(llm) as client:
        events = client.single_chunks(llm, RESPONSES, **fields, decoder="autoregressive")
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    text = "".join(deltas)
    assert len(deltas) >= 3
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_text.done"]["text"] == text
    assert by_type["response.content_part.done"]["part"]["text"] == text
    assert by_type["response.incomplete"]["response"]["output"][0]["content"][0]["text"] == text
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
