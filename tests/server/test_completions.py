"""The endpoint `/v1/completions`: the chunks of a stream add up to the whole response."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.models.scripted import EOS
from server_client import COMPLETIONS, served

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_add_up_to_the_response(echo: bool) -> None:
    fields: dict[str, Any] = {
        "prompt": "abc", "n": 2, "seed": 3, "max_tokens": 8, "logprobs": 2, "echo": echo,
        "ignore_eos": True, "decoder": "autoregressive",
        "logit_bias": {str(letter): 20 for letter in b"abcdefgh"},
    }  # fmt: skip
    with scripted_llm() as llm, served(llm) as client:
        response = client.ask(COMPLETIONS, **fields)
        chunks = client.single_chunks(llm, COMPLETIONS, **fields)
    for index, whole in enumerate(response["choices"]):
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        lists = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        assert len(lists) >= 3
        joined = {name: [value for part in lists for value in part[name]] for name in LISTS}
        assert joined == whole["logprobs"]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == whole["finish_reason"] == "length"
        assert "".join(joined["tokens"]) == whole["text"]
        assert joined["text_offset"] == list(range(8 + 3 * echo))  # one character per token


def test_a_resumed_stream_has_each_logprob_once() -> None:
    fields: dict[str, Any] = {
        "prompt": "abc", "seed": 3, "max_tokens": 8, "logprobs": 1, "ignore_eos": True,
        "decoder": "autoregressive", "logit_bias": {str(letter): 20 for letter in b"abcdefgh"},
    }  # fmt: skip
    with scripted_llm() as llm, served(llm) as client:
        whole = client.ask(COMPLETIONS, **fields)["choices"][0]
        start = client.ask(COMPLETIONS, **fields, segment=3)
        resume = start["anydecode"]["resume"]
        chunks = client.single_chunks(llm, COMPLETIONS, **fields, resume=resume)
    parts = [one for chunk in chunks for one in chunk["choices"]]
    values = [
        value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]
    ]
    assert len(parts) >= 3 and values == whole["logprobs"]["token_logprobs"][3:]
    text = start["choices"][0]["text"] + "".join(part["text"] for part in parts)
    assert text == whole["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_token_has_a_logprob_and_no_text(stream: bool) -> None:
    """lm-eval scores a text by the log-probabilities before that of the one generated token."""
    fields: dict[str, Any] = {
        "prompt": "abc", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True,
        "logit_bias": {str(EOS): 100},
    }  # fmt: skip
    with scripted_llm() as llm, served(llm) as client:
        choice = client.last(COMPLETIONS, stream, **fields)["choices"][0]
        expected = llm.score([97], [98, 99]).logprobs
    assert choice["finish_reason"] == "stop" and choice["text"] in ("abc", "")
    first, *of_prompt, _ = choice["logprobs"]["token_logprobs"]
    assert first is None and of_prompt == pytest.approx(expected)
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
