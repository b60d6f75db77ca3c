"""Samples of a queue: rounds under several adapters, and mistakes that the certificate rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_files import save_adapter
from anydecode import LLM, RolloutQueue, RolloutSegment
from anydecode.api.rollout_queue import Rollout
from anydecode.certification.checks import scripted_llm
from anydecode.certification.tiny import tiny_model
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_rejected

OPTIONS: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "ignore_eos": True}


def test_every_round_is_generated_by_its_own_weights(tmp_path: Path) -> None:
    """Equal to calls that resume with the adapter of each round."""
    names = (None, "first", "second")
    with LLM(tiny_model(), tokenizer=ByteTokenizer(), cache_positions=1024) as llm:
        for number, name in enumerate(names[1:]):
            llm.add_adapter(name, save_adapter(tmp_path / name, number))
        queue = RolloutQueue(llm, segment=4, capacity=8, **OPTIONS)
        queue.add("a long prompt that fills a block", n=2, seed=3)
        ended = [queue.round(adapter=name) for name in names]
        answer = None
        for name in names:
            resume = answer.resume if answer else None
            options = {"seed": 3, "n": 2} if resume is None else {"resume": resume}
            answer = llm.generate(
                "a long prompt that fills a block", segment=4, adapter=name, **OPTIONS, **options
            )
        plain = llm.generate("a long prompt that fills a block", n=2, seed=3, **OPTIONS)
    assert [len(one) for one in ended] == [0, 0, 2] and not len(queue)
    assert [one.tokens for one in ended[2]] == [one.tokens for one in answer.samples]
    assert ended[2][0].tokens != plain.tokens
    expected = [RolloutSegment(name, 4 * i, 4 * i + 4) for i, name in enumerate(names)]
    assert ended[2][0].segments == expected


def test_a_round_that_fails_leaves_the_queue_as_it_was() -> None:
    with scripted_llm() as llm:
        queue = RolloutQueue(llm, 4, **OPTIONS)
        queue.add("abc", seed=1)
        queue.round()
        (before,) = queue.unfinished
        tokens = list(before.tokens)
        with pytest.raises(InvalidRequestError, match="adapter"):
            queue.round(adapter="none")
        assert queue.unfinished == [before] and before.tokens == tokens
        assert len(before.segments) == 1


def test_what_no_round_can_run_is_refused() -> None:
    with scripted_llm() as llm:
        for sizes in ((0, 1), (1, 0)):
            with pytest.raises(InvalidRequestError, match="needs 1 or more of both"):
                RolloutQueue(llm, *sizes)
        with pytest.raises(InvalidRequestError, match="sets seed itself"):
            RolloutQueue(llm, seed=1)
        queue = RolloutQueue(llm)
        for given in ({"n": 0}, {"prompt": ""}, {"seed": "x"}):
            with pytest.raises(InvalidRequestError):
                queue.add(**{"prompt": "abc", **given})
        with pytest.raises(InvalidRequestError, match="token-exact"):
            RolloutQueue(llm, decoder="typical-acceptance").add("abc")
        assert not len(queue) and queue.round() == []


def test_certificate_rejects_new_samples_first(monkeypatch: pytest.MonkeyPatch) -> None:
    played = RolloutQueue.round

    def reversed_round(self: RolloutQueue, adapter: str | None = None) -> list[Rollout]:
        self._rollouts.reverse()
        ended = played(self, adapter)
        self._rollouts.reverse()
        return ended

    monkeypatch.setattr(RolloutQueue, "round", reversed_round)
    assert_rejected("segment-rollout")


def test_certificate_rejects_samples_that_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RolloutQueue._request

    def fresh(self: RolloutQueue, one: Rollout, adapter: str | None = None) -> Any:
        copy = Rollout(one.prompt, 0, one.seed, one.tokens)
        return request(self, copy, adapter)

    monkeypatch.setattr(RolloutQueue, "_request", fresh)
    assert_rejected("segment-rollout")
