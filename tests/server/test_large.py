"""Answers of many values, which are built and encoded beside the event loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from anydecode.server import large  # noqa: E402
from server_client import CHAT, COMPLETIONS, RESPONSES, Client  # noqa: E402

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)  # fmt: skip


@settings(max_examples=40)
@given(JSON, st.integers(1, 3))
def test_a_value_that_is_encoded_in_parts_is_the_same(value: Any, max_elements: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "MAX_ELEMENTS", max_elements)
        encoded = large.encode(value)
    assert encoded == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    "path, fields",
    [
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (CHAT, {"prompt_logprobs": 1, "trace": True}),
        (COMPLETIONS, {"logprobs": 2, "n": 2, "echo": True}),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"prompt": "a", "logprobs": True, "stream": False}),
        ("/api/embed", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("/detokenize", {"tokens": [97, 98]}),
    ],
)
def test_a_large_answer_is_that_of_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    threads: list[str] = []
    encode = large.encode

    def recorded(value: Any, depth: int = 0) -> str:
        threads.append(threading.current_thread().name)
        return encode(value, depth)

    monkeypatch.setattr(large, "encode", recorded)
    bodies = []
    for max_values in (large.MAX_VALUES, -1):
        assert not threads
        monkeypatch.setattr(large, "MAX_VALUES", max_values)
        if path in (CHAT, COMPLETIONS, RESPONSES):
            bodies.append(client.ask(path, **fields, temperature=0))
        else:
            answer = client.http.post(path, json={**fields, **OPTIONS.get(path, {})})
            assert answer.status_code == 200, answer.text
            bodies.append(answer.json())
    assert threads and all(name.startswith("asyncio_") for name in threads)
    assert stable(bodies[0]) == stable(bodies[1])


#: Fields that make an answer short, and the same each time.
OPTIONS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"temperature": 0},
    "/api/generate": {"options": {"temperature": 0, "num_predict": 3}},
}
#: Fields that differ between equal answers.
UNSTABLE = {
    "id", "created", "created_at", "completed_at", "anydecode", "usage", "total_duration",
    "eval_duration", "prompt_eval_duration",
}  # fmt: skip


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: stable(one) for name, one in value.items() if name not in UNSTABLE}
    return [stable(one) for one in value] if isinstance(value, list) else value
