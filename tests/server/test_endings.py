"""The end of an answer that cannot go on, in the words of every API."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_client import CHAT, COMPLETIONS, RESPONSES, Client  # noqa: E402

#: The only answer contains a banned string, so that it ends behind its first letter.
FIELDS: dict[str, Any] = {
    "structured_outputs": {"choice": ["cab"]}, "banned_strings": ["ab"], "decoder": "autoregressive"
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_finish_reason_is_content_filter(client: Client, path: str) -> None:
    fields = {**FIELDS, "max_tokens": 8}
    [choice] = client.ask(path, **fields)["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert (text, choice["finish_reason"]) == ("c", "content_filter")
    assert client.chunks(path, **fields)[-1]["choices"][0]["finish_reason"] == "content_filter"


def test_a_response_is_incomplete(client: Client) -> None:
    for stream in (False, True):
        response = client.last(RESPONSES, stream, **FIELDS, max_output_tokens=8)
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "content_filter"}
        assert response["output"][0]["content"][0]["text"] == "c"


def test_a_message_of_anthropic_is_a_refusal(client: Client) -> None:
    ask = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, **FIELDS}
    message = client.http.post("/v1/messages", json=ask).json()
    assert message["stop_reason"] == "refusal" and message["content"][0]["text"] == "c"
