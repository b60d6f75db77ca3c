"""The texts of a search and their scores over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from anydecode.rewards import registry  # noqa: E402
from anydecode.rewards.programmatic import Length  # noqa: E402
from server_client import CHAT, COMPLETIONS, Client, served  # noqa: E402
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


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_texts_that_a_search_finds(client: Client, path: str) -> None:
    """They may be fewer than `n`."""
    fields: dict[str, Any] = {"n": 4, "decoder": "beam", "max_tokens": 8, "temperature": 0}
    fields["structured_outputs"] = {"choice": ["yes", "no"]}
    choices = client.ask(path, **fields)["choices"]
    texts = [one["message"]["content"] if path == CHAT else one["text"] for one in choices]
    assert sorted(texts) == ["no", "yes"]
    streamed, reasons = ["", ""], []
    for chunk in client.chunks(path, **fields):
        [choice] = chunk["choices"]
        text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        streamed[choice["index"]] += text
        if choice["finish_reason"] is not None:
            reasons.append((choice["index"], choice["finish_reason"]))
    assert streamed == texts and reasons == [(0, "stop"), (1, "stop")]
