"""The checks before a handler runs, to the byte and to the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anydecode.certification.checks import scripted_llm
from server_client import COMPLETIONS, served

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with scripted_llm() as llm:
        yield llm


def test_only_bearer_keys_are_accepted(llm: Any) -> None:
    with served(llm, api_keys=("one", "two")) as client:

        def status(authorization: str) -> int:
            return int(
                client.http.get("/v1/models", headers={"authorization": authorization}).status_code
            )

        for accepted in ("Bearer one", "bearer two", "BEARER one", "Bearer  two"):
            assert status(accepted) == 200
        for refused in ("Basic one", "one", "Bearer", "Bearer on", "Bearer one two", "Token two"):
            assert status(refused) == 401


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_may_be_as_long_as_the_limit_and_no_longer(llm: Any, is_announced: bool) -> None:
    limit = 1000

    def chunks(content: bytes) -> Iterator[bytes]:
        """Sent without a length."""
        for start in range(0, len(content), 100):
            yield content[start : start + 100]

    with served(llm, max_body=limit) as client:
        for length, status in ((limit, 200), (limit + 1, 413)):
            content = b'{"prompt": "a", "max_tokens": 1}'.ljust(length)
            data: Any = content if is_announced else chunks(content)
            answer = client.http.post(COMPLETIONS, content=data, headers=JSON)
            assert answer.status_code == status
        if is_announced:  # refused before the body is read
            assert answer.json()["error"]["code"] == "body_too_large"
