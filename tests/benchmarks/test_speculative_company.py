"""Company in the speculative benchmark: which prompts are answered together, its arithmetic against
hand computations, and complete runs on scripted models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.benchmarks import speculative_bench as bench
from anydecode.benchmarks.speculative_answers import MULTI_STEP, PLAIN, TimedAnswer, digest, run
from anydecode.benchmarks.speculative_company import (
    TimedGroup,
    company_summary,
    group_sizes,
    groups_of,
    run_groups,
)
from anydecode.benchmarks.speculative_report import print_report
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.tasks.spec_bench import Question

TEXTS = ["one two one two", "abcabcabc", "three", "four four", "a b a b"]
ASKED = [Question("qa", text) for text in TEXTS]


def scripted() -> LLM:
    return LLM(
        ScriptedModel(vocab_size=263, seed=3), tokenizer=ByteTokenizer(), cache_positions=4096
    )


def test_a_group_has_each_prompt_once_in_an_order_that_is_always_the_same() -> None:
    groups = groups_of(4, 11)
    assert [len(group) for group in groups] == [4, 4]
    used = sum(groups, [])
    assert len(set(used)) == 8 and set(used) < set(range(11))
    assert used != sorted(used)
    assert groups == groups_of(4, 11)
    assert sum(groups_of(2, 11), [])[:8] == used
    assert groups_of(16, 11) == []


def test_sizes_are_numbers_from_one() -> None:
    assert group_sizes("4, 8,4") == [4, 8]
    assert group_sizes("") == []
    for text in ("0", "4,-1", "four", "1.5"):
        with pytest.raises(InvalidRequestError, match="--company"):
            group_sizes(text)


def test_ratios_are_paired_by_group() -> None:
    groups = [
        TimedGroup(4, 0, MULTI_STEP, 0.0, 100, 1.0, 4),
        TimedGroup(4, 0, "m", 0.0, 100, 0.5, 4),
        TimedGroup(4, 1, MULTI_STEP, 0.0, 100, 2.0, 4),
        TimedGroup(4, 1, "m", 0.0, 100, 4.0, 3),
        TimedGroup(8, 0, MULTI_STEP, 0.0, 100, 1.0, 8),
        TimedGroup(8, 0, "m", 0.0, 100, 1.0, 8),
    ]
    rows = [row for row in company_summary(groups) if row["method"] == "m"]
    assert [(row["together"], row["groups"], row["same_text"]) for row in rows] == [
        (4, 2, 7), (8, 1, 8),
    ]  # fmt: skip
    four, eight = (row["over_multi_step"] for row in rows)
    assert four["speedup"] == pytest.approx((2 + 0.5) / 2)
    assert four["interval"] == pytest.approx([0.5, 2])
    assert four["smallest"] == pytest.approx(0.5)
    assert rows[0]["tokens_per_second"] == pytest.approx((200 + 25) / 2)
    assert eight["speedup"] == pytest.approx(1.0) and eight["interval"] is None


def _single_answers(llm: LLM, tokens: int = 12) -> list[TimedAnswer]:
    return list(run({"": llm}, ASKED, ["auto"], [0.0, 0.8], tokens, warm=False))


def test_groups_have_the_texts_of_plain_decoding_alone() -> None:
    steps: list[str] = []
    with scripted() as llm:
        answers = _single_answers(llm)
        groups = list(
            run_groups({"": llm}, ASKED, ["auto"], answers, [1, 2], 12, on_step=steps.append)
        )
    pairs = [group for group in groups if group.size == 2]
    assert len(pairs) == 2 * 2 * 2  # temperatures, groups, methods
    assert all(group.same_text == 2 and group.seconds > 0 for group in pairs)
    assert len(steps) == 4 and steps[0] == "2 together: group 1 of 2, T=0"
    single = {(g.temperature, g.number): g for g in groups if g.size == 1 and g.method == "auto"}
    taken = [one for one in answers if one.method == "auto"]
    assert len(single) == len(taken) == 2 * len(TEXTS)
    assert all(single[one.temperature, one.prompt].rate == one.rate for one in taken)


def test_every_group_starts_with_its_prompts_and_nothing_else_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, Any]] = []
    with scripted() as llm:
        answers = _single_answers(llm)
        clear, generate = llm.clear, llm.generate

        def recording(prompts: Any, **options: Any) -> Any:
            found = generate(prompts, **options)
            calls.append((options["decoder"], [one.stats.num_cached_tokens for one in found]))
            return found

        monkeypatch.setattr(llm, "clear", lambda: (calls.append(("clear", None)), clear()))
        monkeypatch.setattr(llm, "generate", recording)
        cold = [one for one in answers if one.temperature == 0]
        list(run_groups({"": llm}, ASKED, ["auto"], cold, [2], 12, rounds=2))
    first, second = ["auto", MULTI_STEP], [MULTI_STEP, "auto"]
    timed = [*first, *first, *second, *second]
    assert [name for name, _ in calls] == [
        name for method in timed for name in ("clear", PLAIN, method)
    ]
    for _, read, answered in zip(*[iter(calls)] * 3, strict=True):
        assert sum(answered[1]) > sum(read[1])  # the prompts of this group alone were kept
    cached = {tuple(cached) for name, cached in calls if name in first}
    assert len(cached) == 2  # one for each group, whatever the method and round


def test_a_different_text_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as llm:
        answers = [one for one in _single_answers(llm) if one.temperature == 0]
        (wrong,) = groups_of(4, len(TEXTS))
        changed = [
            TimedAnswer(**{**vars(one), "digest": digest([1])})
            if (one.method, one.prompt) == (PLAIN, wrong[0])
            else one
            for one in answers
        ]
        groups = list(run_groups({"": llm}, ASKED, ["auto"], changed, [4], 12))
    assert [group.same_text for group in groups] == [3, 3]
    report = {
        "machine": {"cpu": "c", "cores": 2}, "model": "scripted", "tokens": 12, "data": "two",
        "drafting": "fixed", "rows": [], "company": company_summary(groups), "memory": {},
    }  # fmt: skip
    print_report(report)
    printed = capsys.readouterr().out
    assert "auto, 4 together, T=0: 1 of 4 texts differ from plain decoding's" in printed


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, company: str, **options: Any) -> Any:
    monkeypatch.setattr(bench, "LLM", lambda *arguments, **settings: scripted())
    lines = [json.dumps({"category": "qa", "turns": [text]}) for text in TEXTS]
    (folder / "question.jsonl").write_text("\n".join(lines))
    file = folder / "out.json"
    bench.bench_speculative(
        [folder], "auto", "m", tokens=8, temperatures="0", warm=False, company=company,
        json_file=file, **options,
    )  # fmt: skip
    return json.loads(file.read_text())


def test_the_command_reports_company_beside_single_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _run(monkeypatch, tmp_path, "1,2,8")
    captured = capsys.readouterr()
    assert "--company 8: no group, as there are 5 prompts only" in captured.err
    assert "together" in captured.out
    assert "draft policy: smartspec-server" in " ".join(captured.out.split())
    table = captured.out.partition("T=0, ")[2].partition("Prompts answered together")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert max(map(len, captured.out.splitlines())) <= 100
    found = [(row["method"], row["together"], row["groups"]) for row in report["company"]]
    assert found == [("auto", 1, 5), ("auto", 2, 2), (MULTI_STEP, 1, 5), (MULTI_STEP, 2, 2)]
    assert len(report["groups"]) == 2 * 5 + 2 * 2
    report = _run(monkeypatch, tmp_path, "", drafting="fixed")
    assert report["company"] == report["groups"] == []
    printed = capsys.readouterr().out
    assert "together" not in printed and "draft policy: fixed" in printed
    assert report["drafting"] == "fixed"


def test_groups_are_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep = tmp_path / "answers.jsonl"
    report = _run(monkeypatch, tmp_path, "2", keep=keep)
    lines = keep.read_text().splitlines()
    assert len(lines) == 1 + len(TEXTS) + 2  # the settings, single answers, groups
    keep.write_text("\n".join(lines[:-1]) + "\n")
    again = _run(monkeypatch, tmp_path, "2,4", keep=keep)
    assert again["runs"] == report["runs"]
    assert again["groups"][:2] == report["groups"][:2]
    assert again["groups"][2:4] != report["groups"][2:4]  # the second group was timed again
    assert len(keep.read_text().splitlines()) == len(lines) + 1
    whole = _run(monkeypatch, tmp_path, "2,4", keep=keep)
    assert whole["groups"] == again["groups"]
