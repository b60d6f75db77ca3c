"""Drafts that the kernels copy in multi-step bursts: the text is that without drafts, and they are
those of the rule that `auto` follows outside bursts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from threading import Thread
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.auto import BatchCosts
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.tiny import tiny_llm
from anydecode.decoders.framework.ngram_index import SEPARATOR
from anydecode.decoders.speculative import auto
from anydecode.decoders.speculative.auto import FIRST_BURST_PASSES, Auto
from anydecode.decoders.speculative.draft_sources import CopySource, SharedDrafts
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
from bursts import drafts_by_rule, recorded, recorded_calls, shared_drafts_by_rule

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
    copied = [one for plan in plans for one in plan.output_spec.drafts]
    assert copied and all(len(one.rows) == len(one.seconds) > 0 for one in copied)
    rows: list[int] = []
    for plan in plans:  # a last token alone is scored without drafts
        drafts = plan.output_spec.drafts
        rows += drafts[0].rows if drafts else [len(plan.rows)] * (plan.num_passes == 1)
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


@pytest.mark.parametrize("num_others", [0, 2])
def test_drafts_of_a_prediction_are_counted_in_bursts(num_others: int) -> None:
    """As many as the trace has tokens that the prediction has behind the same two."""
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60, "temperature": 0.7, "seed": 3}
    with native_llm() as llm:
        llm.cost_model = BatchCosts(lambda rows, _: 1e-3 * (1 + 0.002 * rows), llm)
        plain = llm.generate(PROMPTS[2], decoder="autoregressive", **options)
        others = [
            llm.request(prompt, decoder="auto", **options)
            for prompt in TOGETHER[3 : 3 + num_others]
        ]
        request = llm.request(
            PROMPTS[2], decoder="auto", prediction=plain.tokens, trace=True, **options
        )
        for one in [request, *others]:
            llm.start(one, background=False)
        llm.driver.advance(lambda: all(one.done for one in [request, *others]))
        answer, prompt = request.generation(), llm.encode(PROMPTS[2])
    assert answer.tokens == plain.tokens
    known, text = [*prompt[-20:], *plain.tokens], list(prompt)
    triples, counts = set(zip(known, known[1:], known[2:], strict=False)), [0, 0]
    for step in answer.trace or ():
        for number, token in enumerate(step["drafted"]):
            before = [*text, *step["drafted"][:number]][-2:]
            counts[number not in step["accepted"]] += (*before, token) in triples
        text += step["tokens"]
    stats = answer.stats
    assert [stats.num_accepted_predictions, stats.num_rejected_predictions] == counts
    assert counts[0] > 10


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


#: More prompts that are answered together.
TOGETHER = [*PROMPTS, "abc abd abc abd abc", "tick tock tick"]


def test_texts_in_company_are_those_without_drafts_and_share_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedDrafts, "pays", lambda *_: True)  # all bursts have drafts
    found, apart, unweighted = [], [], []
    for temperature in (0.0, 0.3, 0.7):
        options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 120}
        options["ignore_eos"] = True
        with native_llm() as llm, recorded_calls(llm) as calls:
            plain = [llm.generate(p, decoder="autoregressive", **options) for p in TOGETHER]
            llm.cost_model = BatchCosts(lambda rows, _: 1e-3 * (1 + 0.002 * rows**2), llm)
            answers = llm.generate(TOGETHER, decoder="auto", trace=True, **options)
            llm.engine.check_integrity()
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        assert len(calls) > 1 and max(map(len, calls)) == len(TOGETHER)
        for bursts in calls:
            passes = list(zip(*(one.drafts.drafts for one in bursts), strict=True))
            assert passes == [tuple(one) for one in shared_drafts_by_rule(bursts)]
            found += passes
            apart += [tuple(one) for one in shared_drafts_by_rule(bursts, apart=True)]
            unweighted += [tuple(one) for one in shared_drafts_by_rule(bursts, unweighted=True)]
        num_rows = [sum(map(sum, zip(*(one.drafts.rows for one in b), strict=True))) for b in calls]
        assert max(num_rows) > len(TOGETHER)
        for answer in answers:
            steps, stats = answer.trace or [], answer.stats
            assert [token for step in steps for token in step["tokens"]] == answer.tokens
            num_scored = stats.num_prompt_tokens - stats.num_cached_tokens + len(steps) - 1
            assert stats.rows == num_scored + sum(len(step["drafted"]) for step in steps)
    assert sum(len(draft) for drafts in found for draft in drafts) > 30
    # The texts differ between instruction sets, and a wrong rule agrees with the right one in some.
    num_apart = sum(one != other for one, other in zip(found, apart, strict=True))
    num_unweighted = sum(one != other for one, other in zip(found, unweighted, strict=True))
    assert num_apart and num_unweighted


def test_bursts_in_company_rarely_ask_for_drafts_that_save_too_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}
    asked, texts = [], []
    for seconds in (0.0, 1.0):  # of preparing them
        monkeypatch.setattr(auto, "perf_counter", partial(next, count(0, seconds)))
        with native_llm() as llm, recorded_calls(llm) as calls:
            llm.cost_model = BatchCosts(lambda rows, _: 8e-3 * (1 + 0.002 * rows), llm)
            answers = llm.generate(TOGETHER, decoder="auto", **options)
        texts.append([answer.tokens for answer in answers])
        asked.append(sum(bool(one.drafts.texts) for bursts in calls for one in bursts))
    assert texts[0] == texts[1]
    assert 0 < asked[1] < 0.7 * asked[0]


def test_drafts_in_company_pay_if_they_save_more_than_preparing_them_takes() -> None:
    shared = SharedDrafts(share=0.5, drafts=4.0, accepted=2.0)
    for seconds in (3e-4, 1e-4):  # half of a shorter time counts, and a tenth of a longer one
        shared.record([1, 1], 0, seconds)
    assert shared.seconds == pytest.approx(1.25e-4)
    shared.record([1], 0, 2.25e-4)
    assert shared.seconds == pytest.approx(1.35e-4)
    assert (shared.drafts, shared.accepted) == (4.0, 2.0)
    assert shared.share == pytest.approx(0.5 * 0.98**3)
    # A useful draft saves 2 tokens and takes 4 rows.
    assert shared.pays(0.2, 4.5e-4, 0.5e-4) and not shared.pays(0.19, 4.5e-4, 0.5e-4)
    assert not shared.pays(1.0, 1e-4, 0.5e-4)
    shared.record([8, 1, 22, 1], 24, 1.35e-4)  # 14 drafts and 12 accepted ones in two passes
    assert (shared.drafts, shared.accepted) == pytest.approx((4.2, 2.2))


def test_a_new_sequence_in_company_begins_with_what_others_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After texts without a useful draft, one that begins asks for few. What texts bring themselves
    does not count here."""
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100}
    monkeypatch.setattr(auto, "DRAFTED_RATE", 0.0)
    monkeypatch.setattr(SharedDrafts, "record", lambda *_: None)
    asked = []
    for share in (1.0, 0.0):
        decoder = Auto()
        for shared in decoder.shared_drafts.values():
            shared.share, shared.seconds = share, 1e-9
        with native_llm() as llm, recorded_calls(llm) as calls:
            llm.cost_model = BatchCosts(lambda rows, _: 8e-3 * (1 + 0.002 * rows), llm)
            llm.generate(TOGETHER, decoder=decoder, **options)
        asked.append(sum(bool(one.drafts.texts) for bursts in calls for one in bursts))
    assert 0 < asked[1] < 0.7 * asked[0]


def test_a_match_may_reach_the_end_of_an_earlier_text() -> None:
    """A part of the earlier texts is full in the middle of an answer, and the same answer again
    follows it up to there."""
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 150}
    decoder = Auto(memory=24_000)
    with native_llm() as llm, recorded(llm) as bursts:
        expected = llm.generate(PROMPTS[1], decoder="autoregressive", **options).tokens
        for _ in range(8):
            assert llm.generate(PROMPTS[1], decoder=decoder, **options).tokens == expected
    parts = [text for burst in bursts for text in burst.texts[1:]]
    assert any(text.match and text.position == text.length for text in parts)
    drafts = [draft for burst in bursts for draft in burst.drafts.drafts]
    assert drafts == [draft for burst in bursts for draft in drafts_by_rule(burst)]


@pytest.mark.parametrize("max_tokens", [2, 3, 9, 40])
def test_texts_in_company_end_where_they_should(max_tokens: int) -> None:
    options: dict[str, Any] = {"ignore_eos": True}
    lengths = [max_tokens, 30, max_tokens + 1, 64, 17]
    with native_llm() as llm:
        plain = [
            llm.generate(prompt, decoder="autoregressive", max_tokens=length, **options)
            for prompt, length in zip(TOGETHER, lengths, strict=True)
        ]
        stop = plain[1].tokens[20]
        plain[1] = llm.generate(
            TOGETHER[1], decoder="autoregressive", max_tokens=30, stop_tokens=[stop], **options
        )
        llm.cost_model = BatchCosts(lambda rows, _: 1e-3 * (1 + 0.01 * rows), llm)
        requests = [
            llm.request(
                prompt, max_tokens=length, stop_tokens=[stop] * (index == 1), decoder="auto",
                **options,
            )
            for index, (prompt, length) in enumerate(zip(TOGETHER, lengths, strict=True))
        ]  # fmt: skip
        for request in requests:
            llm.start(request, background=False)
        llm.driver.advance(lambda: all(request.done for request in requests))
        found = [request.generation() for request in requests]
        llm.engine.check_integrity()
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in plain]


def test_no_text_is_read_where_no_draft_in_company_can_save_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 60}
    reads: list[Any] = []
    with native_llm() as llm:
        llm.cost_model = BatchCosts(lambda rows, _: 1e-3 * rows, llm)
        run, calls = llm.model.run, []

        def running(rows: Rows, cache: KeyValues, spec: OutputSpec) -> Output:
            output = run(rows, cache, spec)
            calls.append((len(spec.drafts), output.num_passes))
            return output

        llm.model.run = running  # type: ignore[method-assign]
        monkeypatch.setattr(CopySource, "as_text", lambda *given: reads.append(given))
        llm.generate(TOGETHER, decoder="auto", **options)
    assert not reads and max(number for number, _ in calls) == 0
    assert max(passes for _, passes in calls) > 2


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
        ({"text": {"position": 5}}, "outside its text"),
        ({"text": {"position": -1}}, "outside its text"),
        ({"text": {"match": -1}}, "outside its text"),
    ],
)
def test_arrays_that_the_kernels_would_read_outside_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    BoundDrafts([copies()], [4])
    with pytest.raises(ValueError, match=message):
        BoundDrafts([copies(**changes)], [4])
