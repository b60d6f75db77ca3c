"""The speculative benchmark: its arithmetic against hand computations, and complete runs on
scripted models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.benchmarks import speculative_answers as answers
from anydecode.benchmarks import speculative_bench as bench
from anydecode.benchmarks.baselines import Worker
from anydecode.benchmarks.speculative_answers import (
    MULTI_STEP,
    PLAIN,
    TimedAnswer,
    digest,
    loops,
    memory,
)
from anydecode.benchmarks.speculative_report import draw, print_report
from anydecode.benchmarks.speculative_summary import interval, summary
from anydecode.certification import rounds
from anydecode.cli.main import run as main
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.sequence import Sequence
from anydecode.tasks.spec_bench import Question, questions


def answer(
    method: str, prompt: int, seconds: float, category: str = "a", **facts: object
) -> TimedAnswer:
    values = {"passes": 11, "draft_seconds": 0.1, "modelled": 1.5, "loops": False,
              "same_text": True, "digest": "", "num_first_tokens": 1, **facts}  # fmt: skip
    return TimedAnswer(category, prompt, method, 0.0, False, 21, seconds=seconds, **values)


def test_speed_ups_are_ratios_prompt_by_prompt() -> None:
    runs = [
        answer(PLAIN, 0, 2.0),
        answer(MULTI_STEP, 0, 1.5),
        answer("m", 0, 1.0),
        answer(PLAIN, 1, 2.0),
        answer(MULTI_STEP, 1, 1.0),
        answer("m", 1, 4.0, passes=31),
        answer(PLAIN, 2, 3.0, "b"),
        answer(MULTI_STEP, 2, 2.0, "b"),
        answer("m", 2, 1.0, "b"),
    ]
    rows = {row["category"]: row for row in summary(runs) if row["loops"] and row["method"] == "m"}
    assert rows["a"]["speedup"] == pytest.approx(1.25)
    assert rows["b"]["speedup"] == pytest.approx(3.0)
    assert rows["overall"]["speedup"] == pytest.approx((1.25 + 3.0) / 2)
    assert rows["a"]["tokens_per_pass"] == pytest.approx(1.0)
    assert rows["overall"]["modelled"] == pytest.approx(1.5)
    assert rows["a"]["draft_share"] == pytest.approx(0.2 / 5.0)
    assert rows["overall"]["fifth_percentile"] == pytest.approx(np.percentile([2, 0.5, 3], 5))
    over = {category: row["over_multi_step"] for category, row in rows.items()}
    assert over["a"]["speedup"] == pytest.approx((1.5 + 0.25) / 2)
    assert over["a"]["interval"] == pytest.approx([0.25, 1.5])
    assert over["b"]["speedup"] == pytest.approx(2.0)
    assert over["b"]["interval"] is None  # of one prompt
    assert over["overall"]["speedup"] == pytest.approx((0.875 + 2.0) / 2)
    assert over["overall"]["smallest"] == pytest.approx(0.25)
    assert over["overall"]["fifth_percentile"] == pytest.approx(np.percentile([1.5, 0.25, 2], 5))
    assert over["overall"]["interval"] == pytest.approx([0.25, 2])  # from all three prompts


def test_answers_whose_tokens_came_at_once_have_no_speed() -> None:
    runs = [
        answer(one, prompt, 2.0 if prompt or one != "m" else 0.0)
        for prompt in (0, 1)
        for one in (PLAIN, MULTI_STEP, "m")
    ]
    rows = {row["method"]: row for row in summary(runs) if row["category"] == "overall"}
    assert rows["m"]["prompts"] == 1 and rows["m"]["speedup"] == 1.0
    assert rows[MULTI_STEP]["prompts"] == 2


def test_speed_is_that_of_tokens_after_the_first_emission() -> None:
    at_once = answer("m", 0, 1.0, num_first_tokens=11)
    assert (at_once.num_later_tokens, at_once.rate) == (10, 10.0)
    assert answer("m", 0, 1.0).rate == 20.0
    assert answer("m", 0, 1.0, num_first_tokens=21).rate == 0.0


def test_looping_answers_are_excluded_on_request() -> None:
    runs = [
        answer(PLAIN, 0, 2.0, loops=True),
        answer(MULTI_STEP, 0, 2.0, loops=True),
        answer("m", 0, 0.1, loops=True),
        answer(PLAIN, 1, 2.0),
        answer(MULTI_STEP, 1, 2.0),
        answer("m", 1, 2.0),
    ]
    rows = [row for row in summary(runs) if (row["method"], row["category"]) == ("m", "overall")]
    assert [row["loops"] for row in rows] == [False, True]
    found = {row["loops"]: row["speedup"] for row in rows}
    assert found[False] == pytest.approx(1.0)
    assert found[True] == pytest.approx(10.5)


def test_loops_are_detected() -> None:
    text = list(range(40))
    assert not loops(text)
    assert loops(text + [7] * 32)
    assert loops(text + [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 4)
    assert not loops(text + [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3)
    assert not loops([7] * 20)


def test_the_interval_contains_the_mean_and_narrows() -> None:
    random = np.random.default_rng(1)
    few, many = random.normal(2, 0.5, 10), random.normal(2, 0.5, 1000)
    low, high = interval([few])
    assert low < few.mean() < high
    assert interval([few, np.array([2.0])]) != interval([few, np.array([2.0, 2.0])])
    assert interval([np.array([1.0, 3.0]), np.array([2.0, 2.0])]) == pytest.approx((1.5, 2.5))
    narrow = interval([many])
    assert narrow[1] - narrow[0] < (high - low) / 3


def test_small_categories_are_merged(tmp_path: Path) -> None:
    names = ["writing", "math", "math", "qa", "qa", "qa", "extraction"]
    lines = [json.dumps({"category": name, "turns": [f"{name}?", "more"]}) for name in names]
    (tmp_path / "question.jsonl").write_text("\n".join(lines))
    found = questions(tmp_path, 2)
    assert [question.category for question in found] == [
        "mt-bench", "mt-bench", "qa", "qa", "extraction",
    ]  # fmt: skip
    assert found[0].text == "writing?"
    assert len(questions(tmp_path, None)) == 7


def test_questions_are_drawn_in_a_shuffled_order_without_repetition(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"question": f"g{i}", "answer": ""} for i in range(9)]
    lines += [{"prompt": f"def f{i}():\n", "entry_point": f"f{i}"} for i in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines[:9])))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines[9:])))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    parts = [questions(files, 4, skip, seed=5) for skip in (0, 4, 8)]
    assert [len(part) for part in parts] == [8, 8, 2]
    drawn = [question for part in parts for question in part]
    assert len(set(drawn)) == 18 and set(drawn) == set(questions(files, None))
    own = [[one.text for one in drawn if one.category == name] for name in ("gsm8k", "humaneval")]
    assert all(texts != sorted(texts) for texts in own)
    assert "Complete this Python function:\n```python\ndef f3():\n```" in own[1]
    assert parts[0] == questions(files, 4, seed=5) != questions(files, 4, seed=6)
    with pytest.raises(InvalidRequestError, match="no category has more than 9 questions"):
        questions(files, 4, 9)


def test_invalid_data_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text('{"category": "qa"}\n')
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"question": 5}\n')
    for folder, reason in (
        (tmp_path, "a line has no 'question'"),
        (tmp_path / "missing", "No such file or directory"),
        (empty, "has no questions"),
        (wrong, "a question must be text"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{reason}$") as error:
            questions(folder, None)
        assert "\n" not in str(error.value)


def scripted() -> LLM:
    return LLM(
        ScriptedModel(vocab_size=263, seed=3), tokenizer=ByteTokenizer(), cache_positions=4096
    )


def test_a_run_reports_all_methods(
    tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [Question("a", "one two one two"), Question("b", "three")]
    count: list[str] = []
    with scripted() as llm:
        methods = ["prompt-lookup", "auto"]
        runs = list(answers.run({"": llm}, asked, methods, [0.0, 0.8], 12, True, count.append))
        extra_memory = memory({"": llm}, asked[0], methods, 8)
        more = list(answers.run({"": llm}, asked[:1], ["auto"], [0.0], 12, True, rounds=3))
    assert len(runs) == len(count) == 2 * 2 * (2 + 2 * 2)
    assert len(more) == 4
    assert all(one.modelled > 0 for one in runs)
    assert all(one.same_text for one in runs)
    assert {(one.method, one.warm) for one in runs} == {
        (PLAIN, False), (MULTI_STEP, False), ("prompt-lookup", False), ("prompt-lookup", True),
        ("auto", False), ("auto", True),
    }  # fmt: skip
    assert all(one.draft_seconds > 0 for one in runs if one.method not in (PLAIN, MULTI_STEP))
    assert set(extra_memory) == set(methods)
    report = {
        "machine": {"cpu": "c", "cores": 2, "threads": 0},
        "model": "scripted",
        "drafting": "smartspec-server",
        "tokens": 12,
        "data": "two",
        "rows": summary(runs),
        "company": [],
        "memory": extra_memory,
        "runs": [],
    }
    print_report(report)
    printed = capsys.readouterr().out
    assert "prompt-lookup" in printed and "differ" not in printed
    assert "draft policy: smartspec-server" in " ".join(printed.split())
    assert printed.index("answers that do not loop") < printed.index("all answers")
    assert max(map(len, printed.splitlines())) <= 100
    draw(report, tmp_path / "x.svg")
    (figure,) = figures
    (panel,) = figure.axes
    assert len(panel.patches) == 3 * 3  # three methods; two categories and overall
    first = next(row for row in report["rows"] if not row["warm"] and not row["loops"])
    assert panel.patches[0].get_height() == first["speedup"]
    assert [text.get_text() for text in panel.get_xticklabels()][-1] == "overall"
    json.dumps(report)


def test_drafting_counts_after_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that takes a second for the prompt, and a hundredth of that afterwards. Wrong twin:
    all rounds count."""
    record = Sequence.record

    def slow_first(self: Sequence, *given: Any, **fields: Any) -> None:
        is_first = self.length == len(self.prompt)
        record(self, *given, **{**fields, "draft_seconds": 1.0 if is_first else 0.01})

    monkeypatch.setattr(Sequence, "record", slow_first)
    shares = {}
    for name in ("right", "twin"):
        with scripted() as llm:
            asked = [Question("a", "one two one two one two")]
            runs = list(answers.run({"": llm}, asked, ["prompt-lookup"], [0.0], 24))
            (shares[name],) = (r for r in runs if r.method == "prompt-lookup" and not r.warm)
        monkeypatch.setattr(answers, "later_rounds", lambda answer: answer.trace)
    assert 0 < shares["right"].draft_seconds < 0.25 < 1 < shares["twin"].draft_seconds
    assert shares["right"].modelled > shares["twin"].modelled


def test_cold_answers_start_without_drafter_state() -> None:
    asked = [Question("a", "q")] * 2
    with scripted() as llm:
        runs = list(answers.run({"": llm}, asked, ["auto"], [0.0], 24))
        cold = [one.passes for one in runs if one.method == "auto" and not one.warm]
        warm = [one.passes for one in runs if one.method == "auto" and one.warm]
    assert cold[0] == cold[1]
    assert warm[1] < cold[1]  # the second time, the drafter has seen the first answer


def test_an_unknown_method_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LLM", lambda *args, **options: scripted())
    with pytest.raises(InvalidRequestError, match="no-such"):
        bench.bench_speculative(None, "no-such", draft=None, limit=1, temperatures="0", rounds=1)
    with pytest.raises(InvalidRequestError, match="no-such"):
        bench.bench_speculative(
            None, "suffix:size=4,factor=1;no-such", draft=None, limit=1, temperatures="0"
        )
    with pytest.raises(InvalidRequestError, match="temperatures"):
        bench.bench_speculative(None, methods="auto", temperatures="warm", draft=None)


def test_a_model_without_a_chat_template_continues_the_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _questions(tmp_path)
    file = tmp_path / "out.json"
    bench.bench_speculative(
        [tmp_path], "auto,suffix", "tiny-autoregressive", ["self:int4"], threads=1, tokens=4,
        limit=1, temperatures="0", company="2", json_file=file,
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert all(one["same_text"] for one in report["runs"])
    text = questions([tmp_path], 1, seed=0)[0].text
    with LLM("tiny-autoregressive") as llm:
        expected = digest(llm.generate(text, max_tokens=4, decoder=PLAIN).tokens)
    assert report["runs"][0]["digest"] == expected
    names = ["tiny-autoregressive (int4)"]
    assert report["draft_models"] == {PLAIN: [], "auto": names, "suffix": []}
    assert "auto: draft model tiny-autoregressive (int4)\n" in capsys.readouterr().out


def test_a_method_that_does_not_fit_is_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _questions(tmp_path)
    for model, methods, message in (
        ("tiny-autoregressive", "auto;medusa", "decoder 'medusa' needs a draft model"),
        ("tiny-diffusion", "auto", "decoder 'autoregressive' needs a causal model"),
    ):
        with pytest.raises(UnsupportedCombinationError, match=message):
            bench.bench_speculative([tmp_path], methods, model, None, temperatures="0")
        assert "answers" not in capsys.readouterr().err


def test_results_that_could_not_be_written_are_refused_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speculative", "--json", str(tmp_path / "none" / "out.json")])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"the folder {tmp_path}/none does not exist" in error


def test_without_data_it_prints_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "LLM", lambda *args, **options: scripted())
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    bench.bench_speculative(
        None,
        "auto",
        "m",
        threads=1,
        tokens=4,
        limit=1,
        temperatures="0",
        warm=False,
        plot=picture,
        json_file=file,
    )
    assert "question.jsonl" in capsys.readouterr().err
    report = json.loads(file.read_text())
    assert (report["data"], report["drafting"]) == ("own prompts", "smartspec-server")
    assert {row["category"] for row in report["rows"]} >= {"overall", "code", "summary"}
    assert "overall" in picture.read_text()


class _RecordingLLM:
    """Makes scripted LLMs that record their timed prompts and, at `stop_at`, are interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int | None = None) -> None:
        self.asked: list[str] = []
        self.stop_at = stop_at
        monkeypatch.setattr(bench, "LLM", self.open)

    def open(self, *arguments: object, **options: object) -> LLM:
        llm = rounds.scripted(rounds.wordy())
        generate = llm.generate

        def recording(prompt: Any, **options: Any) -> Any:
            if len(self.asked) == self.stop_at:
                raise KeyboardInterrupt
            if options.get("trace"):  # timed requests; those that measure memory have no trace
                self.asked.append(llm.tokenizer.decode(prompt))
            return generate(prompt, **options)

        llm.generate = recording  # type: ignore[method-assign]
        return llm


def _run_rows(data: Path, keep: Path | None, tokens: int = 24) -> list[dict[str, Any]]:
    """Run the benchmark; its result rows without those values that depend on the clock."""
    file = data / "out.json"
    bench.bench_speculative(
        [data], "copyspec", "m", tokens=tokens, temperatures="0,0.8", keep=keep, json_file=file
    )
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return [{name: row[name] for name in row if name != "draft_share"} for row in rows]


def _questions(folder: Path) -> list[str]:
    texts = ["one two one two", "abcabcabc", "three"]
    lines = [json.dumps({"category": "qa", "turns": [text]}) for text in texts]
    (folder / "question.jsonl").write_text("\n".join(lines))
    return [question.text for question in questions(folder, None, seed=0)]


def test_an_interrupted_run_resumes_to_the_same_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = _questions(tmp_path)
    monkeypatch.setattr(answers, "decode_seconds", lambda answer: 0.01 * answer.stats.passes)
    monkeypatch.setattr(
        answers, "modelled_speedup", lambda answer, cost_model: float(answer.stats.passes)
    )
    _RecordingLLM(monkeypatch)
    whole = _run_rows(tmp_path, None)
    assert any(row["tokens_per_pass"] > 1 for row in whole)
    keep = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        _RecordingLLM(
            monkeypatch, stop_at=5
        )  # four variants per question: within the second question
        _run_rows(tmp_path, keep)
    held = keep.read_text()
    assert len(held.splitlines()) == 2  # the settings and the first question
    with keep.open("a") as out:
        out.write('[{"category": "qa", "prom')  # as after a kill during a write
    recording = _RecordingLLM(monkeypatch)
    assert _run_rows(tmp_path, keep) == whole
    prompts = [f"user: {text}\nassistant: " for text in texts]
    assert recording.asked == [prompt for prompt in (prompts * 2)[1:] for _ in range(4)]
    assert keep.read_text().startswith(held) and len(keep.read_text().splitlines()) == 1 + 2 * 3
    again = _RecordingLLM(monkeypatch)
    assert _run_rows(tmp_path, keep) == whole
    assert not again.asked  # all answers were recorded
    lines = keep.read_text().splitlines()
    changed = json.loads(lines[1])
    changed[1]["seconds"] *= 2
    keep.write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]) + "\n")
    assert _run_rows(tmp_path, keep) != whole  # recorded answers are used


class _FakeBaseline:
    """A baseline that answers at once, and is interrupted at its `fails`th answer."""

    def __init__(self, engine: str, fails: int | None = None) -> None:
        self.engine = engine
        self.fails = fails
        self.asked: list[str] = []
        self.missing: str | None = None
        self.hello = {"settings": "1 thread"}

    def ask(self, prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
        self.asked.append(prompt)
        if len(self.asked) == self.fails:
            raise KeyboardInterrupt
        return {"tokens": tokens, "total": 1.0, "first": 0.5}


def test_baseline_answers_are_recorded_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = _questions(tmp_path)
    keep, file = tmp_path / "answers.jsonl", tmp_path / "out.json"
    names = ("openvino-genai", "openvino-prompt-lookup")
    monkeypatch.setattr(bench, "find_file", lambda model: model)

    def asked(*baselines: _FakeBaseline) -> dict[str, Any]:
        monkeypatch.setattr(bench, "start_workers", lambda *arguments: list(baselines))
        bench.bench_speculative(
            [tmp_path], "copyspec", "m", tokens=8, temperatures="0", warm=False, keep=keep,
            baselines=",".join(names), json_file=file,
        )  # fmt: skip
        report: dict[str, Any] = json.loads(file.read_text())
        return report

    recording = _RecordingLLM(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        asked(_FakeBaseline(names[0]), _FakeBaseline(names[1], fails=2))
    captured = capsys.readouterr()
    assert "interrupted: the results cover the answers so far" in captured.err
    assert "1 of 15 answers: question 1 of 3, T=0: autoregressive" in captured.err
    assert "4 of 15 answers: question 1 of 3, T=0: openvino-genai" in captured.err
    assert "copyspec" in captured.out and names[0] in captured.out  # the first question's table
    assert [len(json.loads(line)) for line in keep.read_text().splitlines()[1:]] == [3, 1, 1, 3]
    made = len(recording.asked)
    baselines = [_FakeBaseline(name) for name in names]
    report = asked(*baselines)
    assert len(recording.asked) == made + 3  # the last question, with both baselines and drafting
    assert [len(baseline.asked) for baseline in baselines] == [2, 2]
    assert len(report["runs"]) == len(texts) * 5
    again = [_FakeBaseline(name) for name in names]
    assert asked(*again)["runs"] == report["runs"]
    assert not any(baseline.asked for baseline in again)


def test_an_unresponsive_baseline_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\nprint('{}', flush=True)\nprint(input(), flush=True)\ntime.sleep(600)"
    )
    (tmp_path / "baseline.py").write_text(program)
    worker = Worker("mute", "m", 1, sys.executable, str(tmp_path / "baseline.py"), timeout=20.0)
    assert worker.missing is None
    assert worker.ask(prompt="x") == {"prompt": "x"}
    worker.timeout = 0.1
    assert worker.ask(prompt="y") == {"missing": "mute gave no answer within 0.1 s"}
    worker.close()
    assert worker.process.returncode


def test_answers_of_other_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _questions(tmp_path)
    _RecordingLLM(monkeypatch)
    keep = tmp_path / "answers.jsonl"
    _run_rows(tmp_path, keep)
    held = keep.read_text()
    match = "has results of other settings: tokens is 24, not 25; give the same, or another file"
    with pytest.raises(InvalidRequestError, match=match) as refusal:
        _run_rows(tmp_path, keep, tokens=25)
    assert "\n" not in str(refusal.value) and keep.read_text() == held
    keep.write_text("something else\n")
    with pytest.raises(InvalidRequestError, match="no results of this benchmark"):
        _run_rows(tmp_path, keep)
    assert keep.read_text() == "something else\n"


def test_a_question_may_hold_any_separator_of_lines(tmp_path: Path) -> None:
    turns = ["a\u2028b", "c\u0085d"]
    lines = [json.dumps({"category": "qa", "turns": [turn]}, ensure_ascii=False) for turn in turns]
    (tmp_path / "question.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert [one.text for one in questions(tmp_path, None)] == turns
