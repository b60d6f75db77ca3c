"""The texts of a search and their scores over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.rewards import registry  # noqa: E402
from anydecode.rewards.programmatic import Length  # noqa: E402
from server_client import served  # noqa: E402
from toy_models import letters_llm  # noqa: E402

BODY: dict[str, Any] = {"input_text": "ab", "temperature": 1.0, "seed": 5, "max_tokens": 8}


def test_the_best_texts_come_with_their_scores() -> None:
    decoder = "best-of-n:n=4,reward=keywords:words=a b c"
    with letters_llm() as llm, served(llm) as client:
        answer = client.ask("/v1/completions", **BODY, n=3, decoder=decoder)
        local = llm.generate(
            "ab", n=3, temperature=1.0, seed=5, max_tokens=8, decoder=decoder
        ).samples
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in local]
    assert answer["anydecode"]["scores"] == [one.score for one in local]


def test_a_failing_reward_of_the_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Length):
        def values(self, prompt, texts):  # type: ignore[no-untyped-def]
            return [float("nan") for _ in texts]

    monkeypatch.setitem(registry.REWARDS, "length", Broken)
    with letters_llm() as llm, served(llm) as client:
        error = client.refused("/v1/completions", **BODY, decoder="best-of-n:reward=length")
    assert error["code"] == "reward_error"
    assert error["message"] == "the reward Broken returned nan; its values must be from 0 to 1"
