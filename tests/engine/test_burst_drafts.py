"""Drafts that the kernels copy in multi-step bursts: the text is that without drafts, and they are
those of the rule that `auto` follows outside bursts."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_llm
from anydecode.decoders.framework.ngram_index import SEPARATOR
from anydecode.decoders.speculative.auto import FIRST_BURST_PASSES
from anydecode.engine import costs
from anydecode.engine.plan import Plan
from anydecode.kernels.cache import KeyValues
from anydecode.kernels.drafting import BoundDrafts
from anydecode.kernels.interface import (
    MAX_BURST_DRAFTS,
    MAX_MATCH,
    BurstDrafts,
    CopyText,
    Output,
    OutputSpec,
    Rows,
)
from anydecode.kernels.library import load_library
from anydecode.scoring.cost import CostTable
from bursts import drafts_by_rule, recorded

pytestmark = pytest.mark.skipif(load_library() is None, reason="needs the native kernels")

PROMPTS = ["one two three one two three one", "a lazy dog and a lazy", "zqzqzqzq"]


def native_llm(row_cost: float = 0.01) -> LLM:
    llm = tiny_llm()
    llm.cost_model = FixedCosts(lambda rows, _: 1e-6 * (1 + row_cost * rows))
    return llm


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_that_without_drafts_and_the_drafts_follow_the_rule(
    temperature: float,
) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 150}
    options["ignore_eos"] = True
    with native_llm() as llm, recorded(llm) as bursts:
        expected = [llm.generate(p, decoder="autoregressive", **options).tokens for p in PROMPTS]
        assert not bursts
        answers = [llm.generate(p, decoder="auto", trace=True, **options) for p in PROMPTS]
        again = llm.generate(PROMPTS[0], decoder="auto", prediction="one two", **options)
        llm.engine.check_integrity()
    assert [answer.tokens for answer in answers] == expected and again.tokens == expected[0]
    drafts = [draft for burst in bursts for draft in burst.drafts.drafts]
    assert sum(map(len, drafts)) > 100 and max(map(len, drafts)) > 3
    assert max(len(burst.texts) for burst in bursts) == 3
    assert drafts == [draft for burst in bursts for draft in drafts_by_rule(burst)]
    wrong = [draft for burst in bursts for draft in drafts_by_rule(burst, sizes=(3, 1))]
    assert drafts != wrong
    assert sum(answer.stats.passes for answer in answers) < 0.95 * sum(map(len, expected))
    for answer in answers:
        steps, stats = answer.trace or [], answer.stats
        assert stats.num_tokens == len(steps) + sum(len(step["accepted"]) for step in steps)
        num_scored = stats.num_prompt_tokens - stats.num_cached_tokens + len(steps) - 1
        assert stats.rows == num_scored + sum(len(step["drafted"]) for step in steps)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 64, 65, 66])
def test_the_text_ends_where_it_should(max_tokens: int) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": max_tokens}
    with native_llm() as llm:
        plain = llm.generate(PROMPTS[2], decoder="autoregressive", **options)
        assert llm.generate(PROMPTS[2], decoder="auto", **options).tokens == plain.tokens
        stop = plain.tokens[max_tokens // 2]
        options["stop_tokens"] = [stop]
        plain = llm.generate(PROMPTS[2], decoder="autoregressive", **options)
        found = llm.generate(PROMPTS[2], decoder="auto", **options)
        assert found.tokens == plain.tokens and found.finish_reason == plain.finish_reason
        llm.engine.check_integrity()


def test_rows_that_cost_more_than_they_bring_are_not_drafted() -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100}
    with native_llm(row_cost=1000.0) as llm, recorded(llm) as bursts:
        llm.generate(PROMPTS[0], decoder="auto", **options)
    assert len(bursts) > 1 and not any(any(burst.drafts.drafts) for burst in bursts)


def test_the_passes_of_a_burst_correct_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny_llm() as llm:
        table = CostTable({1: {1: 1e-3, 64: 1.1e-3}})
        monkeypatch.setattr(costs, "load", lambda model: table)
        seen: list[int] = []
        record = llm.cost_model.record
        llm.cost_model.record = lambda rows, *rest: (seen.append(rows), record(rows, *rest))
        plans: list[Plan] = []
        on_pass = llm.engine.on_pass
        llm.engine.on_pass = lambda plan, seconds: (plans.append(plan), on_pass(plan, seconds))
        llm.generate(PROMPTS[0], decoder="auto", ignore_eos=True, max_tokens=100)
    copied = [plan.output_spec.drafts for plan in plans if plan.output_spec.drafts is not None]
    assert copied and all(len(one.rows) == len(one.seconds) > 0 for one in copied)
    rows: list[int] = []
    for plan in plans:  # a last token alone is scored without drafts
        drafts = plan.output_spec.drafts
        rows += drafts.rows if drafts is not None else [len(plan.rows)] * (plan.num_passes == 1)
    num_copied = sum(len(one.rows) for one in copied)
    assert rows[-num_copied:] == seen[-num_copied:]


@pytest.mark.parametrize("decoder", ["auto", "multi-step"])
def test_an_interrupted_burst_ends_after_its_present_step(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40}
    with native_llm() as llm:
        expected = llm.generate(PROMPTS[2], decoder="autoregressive", **options).tokens
        passes: list[int] = []
        llm.engine.on_pass = lambda plan, _: passes.append(plan.num_passes)
        assert llm.generate(PROMPTS[2], decoder=decoder, **options).tokens == expected
        assert max(passes) > 1
        passes.clear()
        for runner in llm.engine.runners.values():
            runner.interrupt[0] = 1
        monkeypatch.setattr(llm.engine, "interrupt", lambda is_wanted=True: None)
        assert llm.generate(PROMPTS[2], decoder=decoder, **options).tokens == expected
        assert max(passes) == 1
        llm.engine.check_integrity()


def test_what_another_thread_submits_ends_the_burst_that_runs() -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40, "decoder": "multi-step"}
    with native_llm() as llm:
        expected = llm.generate(PROMPTS[2], **options).tokens
        llm.driver.run_in_background()
        runner, counts = llm.engine.runners["target"], []
        run = runner.model.run

        def disturbed(rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
            if is_first := bool(output_spec.step_limits) and not counts:
                other = Thread(target=llm.driver.post, args=(lambda: None,))
                other.start()
                other.join()
            output = run(rows, cache, output_spec)
            if output_spec.step_limits:
                counts.append((output.num_passes, is_first))
            return output

        runner.model.run = disturbed
        assert llm.generate(PROMPTS[2], **options).tokens == expected
    assert counts[0] == (1, True) and max(counts[1:])[0] > 1


def test_bursts_grow_while_the_chances_of_drafts_are_unknown() -> None:
    with native_llm() as llm, recorded(llm) as bursts:
        llm.generate(PROMPTS[0], decoder="auto", ignore_eos=True, max_tokens=200)
    assert len(bursts[0].drafts.rows) <= FIRST_BURST_PASSES
    assert max(len(burst.drafts.rows) for burst in bursts) > 2 * FIRST_BURST_PASSES


def copies(**changes: Any) -> BurstDrafts:
    tokens = np.array([1, 2, 1, SEPARATOR, 0, 0, 0, 0], np.int32)
    text = CopyText(tokens, 4, 1, 1, np.full(MAX_MATCH + 1, 0.5))
    given = BurstDrafts([text._replace(**changes.pop("text", {}))], np.ones(3), 1.0, 0.02)
    return replace(given, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": []}, "need a text"),
        ({"max_passes": 0}, "need a text"),
        ({"costs": np.ones(MAX_BURST_DRAFTS + 2)}, "need a text"),
        ({"text": {"tokens": np.zeros(8, np.int64)}}, "int32"),
        ({"text": {"chances": np.zeros(3)}}, "every match length"),
        ({"text": {"tokens": np.zeros(16, np.int32)[::2]}}, "contiguous"),
        ({"text": {"length": 0}}, "is empty"),
        ({"text": {"length": 5}}, "no room"),
        ({"text": {"position": 4}}, "outside its text"),
        ({"text": {"match": -1}}, "outside its text"),
    ],
)
def test_arrays_that_the_kernels_would_read_outside_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    BoundDrafts(copies(), 4)
    with pytest.raises(ValueError, match=message):
        BoundDrafts(copies(**changes), 4)
