"""`anydecode bench reasoning`: questions, their checks, intervals, and methods at equal rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import LLM
from anydecode.benchmarks.reasoning import (
    GREEDY,
    draw,
    interval,
    measure,
    num_texts,
    with_rows,
)
from anydecode.benchmarks.reasoning_tasks import load_questions
from anydecode.cli.bench import run_bench
from anydecode.errors import InvalidRequestError

MODEL = "tiny-autoregressive"
FUNCTION: dict[str, Any] = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


class Tokenizer:
    """Renders a chat of one message."""

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return f"<{messages[0]['content']}>"


class Bytes:
    """A model of which only the tokenizer is used."""

    tokenizer = Tokenizer()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())


def saved(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def load(task: str, data: Path | None, count: int = 9, seed: int = 0) -> Any:
    return load_questions(task, data, count, seed, Bytes())  # type: ignore[arg-type]


def test_the_last_number_is_compared(tmp_path: Path) -> None:
    path = saved(tmp_path, {"question": "How many?", "answer": "2 and 3\n#### 1,005"})
    [question] = load("gsm8k", path)
    assert bytes(question.prompt).startswith(b"<How many?\n")
    assert question.is_right("It is 1005.0") and question.is_right("#### 1,005")
    assert not question.is_right("1005 or 1006") and not question.is_right("none")


@pytest.mark.skipif(sys.platform != "linux", reason="programs run under limits on Linux only")
def test_programs_are_run(tmp_path: Path) -> None:
    [question] = load("human-eval", saved(tmp_path, FUNCTION))
    assert bytes(question.prompt) == b"def double(x):\n" and "\ndef " in question.stop
    assert question.is_right("    return 2 * x")
    assert not question.is_right("    return x")
    assert not question.is_right("    return (")
    assert not question.is_right("    import os; os._exit(0)")


def test_questions_are_drawn_by_their_seed() -> None:
    first, again, other = (load("parallelbench", None, 5, seed) for seed in (1, 1, 2))
    prompts = [[one.prompt for one in made] for made in (first, again, other)]
    assert prompts[0] == prompts[1] != prompts[2] and len(prompts[0]) == 5


@pytest.mark.parametrize(
    "task, lines, message",
    [
        ("chess", None, "task is 'chess'; it may be gsm8k, human-eval, parallelbench"),
        ("gsm8k", None, "gsm8k needs --data"),
        ("gsm8k", [], "has no questions of gsm8k"),
        ("gsm8k", [{"question": "a", "answer": "none"}], "has no questions of gsm8k"),
        ("gsm8k", [FUNCTION], "has no questions of gsm8k"),
    ],
)
def test_other_data_are_refused(
    tmp_path: Path, task: str, lines: list[dict[str, Any]] | None, message: str
) -> None:
    data = None if lines is None else saved(tmp_path, *lines)
    with pytest.raises(InvalidRequestError, match=message):
        load(task, data)


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{", "utf-8")
    for name in ("a", "missing"):
        with pytest.raises(InvalidRequestError, match="cannot be read as JSON lines"):
            load("gsm8k", tmp_path / name)


def test_intervals() -> None:
    """Wilson's interval; the values for 8 of 10 are those of tables."""
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(0, 20)[0] == 0 and interval(20, 20)[1] == 1
    assert interval(0, 20)[1] == pytest.approx(0.1611, abs=1e-4)


def test_texts_that_rows_pay_for() -> None:
    """The prompt is computed once: 100 rows of it, 40 of each text."""
    assert num_texts(100 + 5 * 40, 140, 100) == 5
    assert num_texts(140, 140, 100) == 1 == num_texts(90, 140, 100)
    assert num_texts(1e9, 140, 100) == 64


def test_texts_that_share_rows_are_more_for_the_same_rows() -> None:
    """Of 40 rows of a text, the first 30 are shared by all."""
    measured: list[str] = []

    def run(name: str) -> Any:
        measured.append(name)
        return SimpleNamespace(method=name, rows=100 + 30 + 10 * int(name.removeprefix("n=")))

    texts, found = with_rows(100 + 5 * 40, 5, 100, "n={n}", run)
    assert measured[0] == "n=5" and found.method == measured[-1] == f"n={texts}"
    assert found.rows == pytest.approx(300, rel=0.1)
    assert with_rows(100 + 70, 4, 100, "n={n}", run)[0] == 4


def test_costs_are_counted() -> None:
    with LLM(MODEL, prefix_cache=False) as llm:
        questions = load_questions("parallelbench", None, 4, 0, llm)
        greedy = measure(llm, GREEDY, questions, 20, 0.7)
        four = measure(llm, "best-of-n:n=4", questions, 20, 0.7)
        prompt = sum(len(one.prompt) for one in questions) / 4
        bytes_per_row = llm.engine.runners["target"].pool.bytes_per_slot
        answers = [llm.generate(one.prompt, max_tokens=20) for one in questions]
    expected = [one.is_right(answer.text) for one, answer in zip(questions, answers, strict=True)]
    assert greedy.right == sum(expected) and greedy.questions == 4
    assert greedy.tokens == sum(len(answer.tokens) for answer in answers) / 4
    assert greedy.rows == pytest.approx(prompt + greedy.tokens - 1)
    assert prompt + 2 * (greedy.rows - prompt) < four.rows < prompt + 6 * (greedy.rows - prompt)
    assert greedy.cache_rows <= greedy.rows < prompt + 32  # a prompt is held once
    assert greedy.cache_rows < four.cache_rows < four.rows
    assert greedy.cache_bytes / greedy.cache_rows == pytest.approx(bytes_per_row)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    arguments = ["--model", MODEL, "--count", "4", "--tokens", "16", "--json", str(file)]
    run_bench("reasoning", [*arguments, "--methods", "adadec:threshold=0,k=4,length=2"])
    report = json.loads(file.read_text())
    names = [row["method"] for row in report["methods"]]
    assert names[:2] == [GREEDY, "adadec:threshold=0,k=4,length=2"]
    kinds = [name.partition(":")[0] for name in names[2:]]
    assert kinds == ["best-of-n", "majority-vote"] and names[3].endswith(",answer=last-line")
    rows = {row["method"]: row["rows"] for row in report["methods"]}
    assert rows[names[2]] == pytest.approx(rows[names[1]], rel=0.4)
    printed = capsys.readouterr().out
    assert "intervals of 95%" in printed and all(name in printed for name in names)
    run_bench("reasoning", [*arguments, "--methods", "beam:width=2", "--no-equal"])
    assert len(json.loads(file.read_text())["methods"]) == 2
    drafting = ["--draft", MODEL, "--methods", "speculative-sampling", "--no-equal"]
    run_bench("reasoning", [*arguments, *drafting])
    report = json.loads(file.read_text())
    assert report["draft"] == MODEL and report["methods"][1]["passes"] < 16


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"method": "beam", "rows": 40.0, "accuracy": 0.5, "low": 0.3, "high": 0.7}
    draw({"task": "gsm8k", "methods": [row, {**row, "method": "phi", "rows": 400.0}]},
         tmp_path / "a.svg")  # fmt: skip
    assert "rows per question" in (tmp_path / "a.svg").read_text()
