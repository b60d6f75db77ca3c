"""The endpoint `/v1/chat/completions`: the chunks of a stream add up to the whole response."""

from __future__ import annotations

from typing import Any

from anydecode.certification.checks import scripted_llm
from server_client import CHAT, served


def test_streamed_logprobs_add_up_to_the_response() -> None:
    fields: dict[str, Any] = {
        "n": 2, "seed": 3, "max_tokens": 8, "logprobs": True, "top_logprobs": 2,
        "ignore_eos": True, "decoder": "autoregressive",
    }  # fmt: skip
    with scripted_llm() as llm, served(llm) as client:
        response = client.ask(CHAT, **fields)
        chunks = client.single_chunks(llm, CHAT, **fields)
    for index, whole in enumerate(response["choices"]):
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        lists = [part["logprobs"]["content"] for part in parts if part["logprobs"] is not None]
        assert len(lists) >= 3
        assert sum(lists, []) == whole["logprobs"]["content"]
        assert len(whole["logprobs"]["content"]) == 8
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["message"]["content"]
        assert parts[-1]["finish_reason"] == whole["finish_reason"] == "length"
