"""What a token of each of several texts saves."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.engine.costs import VERSION_PASSES
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring import goodput
from anydecode.scoring.cost import COST_CONTEXT
from anydecode.scoring.goodput import token_weights


def duration(lengths: list[int], pass_seconds: float, row_seconds: float) -> float:
    """The time of passes until all texts have ended, one token of each in every pass."""
    return sum(
        pass_seconds + row_seconds * (sum(length > step for length in lengths) - 1)
        for step in range(max(lengths))
    )


def test_the_weights_are_what_a_token_fewer_saves() -> None:
    """Where the order in which the texts end is certain."""
    lengths, first, row = [400, 250, 300, 90], 1.0, 0.2
    whole, together = duration(lengths, first, row), first + 3 * row
    saved = []
    for index in range(len(lengths)):
        shorter = list(lengths)
        shorter[index] -= 1
        saved.append((whole - duration(shorter, first, row)) * len(lengths) / together)
    found = token_weights(lengths, first, together, 0.0)
    assert found == pytest.approx(saved)
    assert found != pytest.approx([1.0] * len(lengths))  # the wrong twin: all count alike


def test_texts_that_end_before_their_limits_count_alike() -> None:
    found = token_weights([4000, 90, 2000], 1.0, 1.4, end_rate=0.01)
    assert found == pytest.approx([1.0] * 3, abs=1e-9)
    shares = [token_weights([400, 90], 1.0, 1.2, rate)[0] for rate in (0.0, 0.001, 0.01)]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] > 1.0


def test_a_lead_lowers_the_weight_step_by_step() -> None:
    weights = [token_weights([200 - lead, 200], 1.0, 1.2, 0.0) for lead in range(0, 31, 5)]
    ahead, behind = zip(*weights, strict=True)
    assert list(ahead) == sorted(ahead, reverse=True) and list(behind) == sorted(behind)
    assert ahead[0] == behind[0] and ahead[-1] == pytest.approx(0.2 * 2 / 1.2)
    steps = np.abs(np.diff(ahead))
    assert steps.max() < 0.4 * (ahead[0] - ahead[-1])


def test_the_engine_weighs_running_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], float]] = []

    def recorded(remaining: list[int], alone: float, together: float, rate: float) -> list[float]:
        seen.append((remaining, rate))
        return goodput.token_weights(remaining, alone, together, rate)

    monkeypatch.setattr("anydecode.engine.model_runner.token_weights", recorded)
    model = ScriptedModel(lambda text: np.eye(32)[(text[-1] + 1) % 32], vocab_size=32)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        lengths = (40, 30, 38)
        requests = [
            llm.request([0, 1, index], decoder="multi-step", max_tokens=length)
            for index, length in enumerate(lengths)
        ]
        for request in requests:
            llm.start(request, background=False)
        sequences = [request.jobs[0].sequence for request in requests]
        llm.driver.advance(lambda: len(sequences[0].tokens) > 0)
        assert not seen  # no decoder reads the weights
        for sequence in sequences:
            sequence.needs_weight = True
        weights: list[list[float]] = []
        llm.driver.advance(
            lambda: weights.append([one.token_weight for one in sequences]) or requests[1].done
        )
        llm.driver.advance(lambda: all(request.done for request in requests))
        assert llm.cost_model.end_rate() == 0.0
        stopped = llm.generate([0, 1], stop_tokens=[9], max_tokens=40)
        assert stopped.finish_reason == "stop"
        assert llm.cost_model.end_rate() == 1 / (sum(lengths) + len(stopped.tokens))
    most, least, middle = weights[-1]
    assert most > middle > least
    assert seen[0] == ([39, 29, 37], 0.0)


def test_all_tokens_count_alike_while_others_wait() -> None:
    model = ScriptedModel(lambda text: np.eye(32)[(text[-1] + 1) % 32], vocab_size=32)
    with LLM(model, tokenizer=ByteTokenizer(), max_running=2) as llm:
        lengths = (20, 10, 30)
        requests = [llm.request([0], decoder="multi-step", max_tokens=n) for n in lengths]
        for request in requests:
            llm.start(request, background=False)
        sequences = [request.jobs[0].sequence for request in requests]
        for sequence in sequences:
            sequence.needs_weight = True
        llm.driver.advance(lambda: requests[1].done)
        assert [one.token_weight for one in sequences[:2]] == [1.0, 1.0]
        llm.driver.advance(lambda: len(sequences[2].tokens) > 5)
        assert sequences[0].token_weight < sequences[2].token_weight
        llm.driver.advance(lambda: all(request.done for request in requests))


def test_costs_of_passes_are_shared_and_follow_corrections() -> None:
    from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts

    calls: list[int] = []

    def cost(rows: int, context: int) -> float:
        calls.append(rows)
        return float(rows + context)

    costs = FixedCosts(cost)
    expected = (67.0, 69.0, 71.0)
    assert costs.pass_seconds(3, 2, 70, width=2) == expected == costs.pass_seconds(3, 2, 120, 2)
    assert calls == [3, 5, 7]
    costs.cost = lambda rows, context: 1.0
    assert costs.pass_seconds(3, 2, 70, width=2) == expected
    costs.version = lambda: 1  # type: ignore[method-assign]
    assert costs.pass_seconds(3, 2, 70, width=2) == (1.0, 1.0, 1.0)


def test_the_costs_of_an_engine_follow_the_passes_that_it_runs() -> None:
    model = ScriptedModel(lambda text: np.eye(32)[1], vocab_size=32)
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        costs, before = llm.cost_model, llm.cost_model.pass_seconds(1, 1, 0)
        for _ in range(VERSION_PASSES - 1):
            costs.record(1, 0, 2 * before[0])
        assert costs.pass_seconds(1, 1, 0) == before
        costs.record(1, 0, 2 * before[0])
        after = costs.pass_seconds(1, 1, 0)
    assert all(one > other for one, other in zip(after, before, strict=True))
    assert after == tuple(costs.seconds(rows, COST_CONTEXT // 2) for rows in (1, 2))
