"""The tasks of the diffusion benchmark, their checks, and their theoretical success rates."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anydecode.benchmarks.parallelbench.bench import (
    Row,
    measure,
    overall,
    questions,
)
from anydecode.benchmarks.parallelbench.report import draw, front
from anydecode.errors import InvalidRequestError
from anydecode.report import split_methods
from anydecode.tasks import theory
from anydecode.tasks.tasks import (
    LENGTHS,
    NAMES,
    TASKS,
    Example,
    examples,
    lengths,
    make_example,
)


@pytest.mark.parametrize("task", TASKS)
def test_reference_answers_are_right_and_other_answers_are_not(task: str) -> None:
    asked = list(examples(task, 40, seed=3))
    for example, other in zip(asked, asked[1:] + asked[:1], strict=True):
        assert example.task == task
        assert example.is_strictly_right(example.answer)
        assert example.is_right(f"\n{example.answer}\n")
        assert not example.is_right("")
        if other.answer != example.answer and task != "arithmetic":
            assert not example.is_right(other.answer)


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_reproducible_and_the_split_is_clean(task: str) -> None:
    first = list(examples(task, 20, seed=1))
    assert first == list(examples(task, 20, seed=1))
    assert first != list(examples(task, 20, seed=2))
    trained = list(examples(task, 200, held_out=False))
    assert not {e.prompt for e in trained} & {e.prompt for e in first}
    assert {e.length for e in trained} <= set(lengths(task))
    held_out = TASKS[task].held_out
    if held_out is not None:
        assert {e.length for e in trained} == {*LENGTHS} - {held_out}
        assert all(e.length == held_out for e in examples(task, 5, length=held_out))


def test_bad_requests_are_refused_in_one_line() -> None:
    with pytest.raises(InvalidRequestError, match="unknown task 'shufle'"):
        next(examples("shufle", 1))
    with pytest.raises(InvalidRequestError, match="held out"):
        next(examples("copy", 1, length=TASKS["copy"].held_out, held_out=False))
    with pytest.raises(InvalidRequestError, match="from 1 to 20"):
        next(examples("copy", 1, length=99))
    with pytest.raises(InvalidRequestError, match="unknown task 'x'"):
        questions(["x"], None, 1, 0)


def _example(task: str, answer: str, items: str, word: str = "") -> Example:
    return Example(task, len(items.split()), "", answer, tuple(items.split()), word)


@pytest.mark.parametrize(
    ("task", "items", "word", "right", "wrong"),
    [
        ("shuffle", "a b c", "", ["b a c", " c  b a"], ["a b c", "a a b", "a b", "a b c c"]),
        ("insert-random", "a b", "x", ["x a b", "a x b", "a b x"], ["a b", "b x a", "x a b x"]),
        ("remove-random", "a b c", "", ["a b", "b c", "a c"], ["a", "a b c", "c a", "a b d"]),
        ("replace-random", "a b", "x", ["x b", "a x"], ["a b", "x x", "b x", "x a"]),
    ],
)
def test_property_checks_of_tasks_with_many_answers(
    task: str, items: str, word: str, right: list[str], wrong: list[str]
) -> None:
    example = _example(task, right[0], items, word)
    assert all(example.is_right(text) for text in right)
    assert not any(example.is_right(text) for text in wrong)


def test_equality_checks_of_structured_answers() -> None:
    square = Example("latin", 4, "", "", tuple("1234"))
    assert square.is_right("2143 3412 4321") and square.is_right("2341 3412 4123")
    assert not square.is_right("2143 3412 4312") and not square.is_right("2143 3412")
    assert not square.is_right("1234 2143 3412 4321") and not square.is_right("2143 3412 43211")
    record = Example("json", 2, "", '{"name": "Ada", "age": 3}')
    assert record.is_right('{"age": 3, "name": "Ada"}')
    assert not record.is_right('{"age": 3}') and not record.is_right('{"age": 3, "name": "Ada"')
    line = Example("python", 1, "", "if a > 3: return b")
    assert line.is_right("if a>3: return b") and not line.is_strictly_right("if a>3: return b")
    assert not line.is_right("if a > 3 return b") and not line.is_right("return b")


def test_strict_answers_have_one_space_between_words() -> None:
    example = _example("shuffle", "b a", "a b")
    assert example.is_strictly_right(" b a") and example.is_strictly_right("b a")
    assert example.is_right("b  a") and not example.is_strictly_right("b  a")
    assert not example.is_strictly_right("b a\n")


def test_the_checks_match_the_theory_of_one_pass() -> None:
    """With independent slots: the share of right shuffles and replacements over all samples."""
    items = NAMES[:4]
    shuffle = _example("shuffle", "", " ".join(items))
    draws = [" ".join(draw) for draw in itertools.product(items, repeat=4)]
    right = sum(map(shuffle.is_right, draws))
    identity = 1  # a permutation, but not a different order
    assert (right + identity) / len(draws) == pytest.approx(theory.shuffle_success(4))
    assert theory.shuffle_success(6) == pytest.approx(0.0154, abs=1e-4)
    assert theory.shuffle_correlation(1) == pytest.approx(0.0)

    replace = _example("replace-random", "", " ".join(items), "x")
    slots = [[(item, 3 / 4), ("x", 1 / 4)] for item in items]
    probability = sum(
        _product(share for _, share in draw)
        for draw in itertools.product(*slots)
        if replace.is_right(" ".join(word for word, _ in draw))
    )
    assert probability == pytest.approx(theory.replacement_success(4))
    assert not replace.is_right(" ".join(items)) and theory.replacement_success(4, greedy=True) == 0


def _product(values: itertools.chain[float] | object) -> float:
    total = 1.0
    for value in values:  # type: ignore[attr-defined]
        total *= value
    return total


def test_shuffles_are_uniform_over_other_orders() -> None:
    source, counts = random.Random(0), Counter[str]()
    for _ in range(3000):
        example = make_example("shuffle", 3, source)
        order = [example.items.index(word) for word in example.answer.split()]
        counts["".join(map(str, order))] += 1
    assert set(counts) == {"021", "102", "120", "201", "210"}
    assert all(abs(count / 3000 - 0.2) < 0.04 for count in counts.values())


def test_questions_have_trained_and_held_out_lengths() -> None:
    groups = questions(["copy", "chain"], None, 2, 0)
    found = [(group[0].task, group[0].length) for group in groups]
    assert found == [("copy", 3), ("copy", 7), ("copy", 9), ("chain", 3), ("chain", 5)]
    assert [group[0].length for group in questions(["copy"], [5], 1, 0)] == [5]


def test_methods_may_carry_parameters() -> None:
    assert split_methods("a, b:x=1,y=2;c:z=0.5") == ["a", "b:x=1,y=2", "c:z=0.5"]


def test_the_pareto_front() -> None:
    points = [(1.0, 0.5), (0.5, 0.5), (0.2, 0.1), (2.0, 0.9), (3.0, 0.8)]
    assert front(points) == [(0.2, 0.1), (0.5, 0.5), (2.0, 0.9)]


def test_overall_means_and_plot(tmp_path: Path, figures: list[Any]) -> None:
    rows = [
        Row("m<1>", task, length, 2, share, share, 4.0, 8.0, 64.0, 0.1)
        for task, length, share in (("copy", 3, 1.0), ("copy", 7, 0.5), ("shuffle", 3, 0.0))
    ]
    lines = {line["kind"]: line for line in overall(rows)}
    assert lines["all"]["accuracy"] == 0.5 and lines["all"]["passes_per_token"] == 0.5
    assert lines["determined"]["accuracy"] == 0.75 and lines["dependent"]["accuracy"] == 0.0
    assert lines["held-out lengths"]["accuracy"] == 0.5
    report = {"overall": overall(rows), "model": "x", "max_tokens": 32, "temperature": 0.0}
    draw(report, tmp_path / "x.svg")
    (figure,) = figures
    points = [[tuple(line.get_xydata()[0]) for line in panel.lines] for panel in figure.axes]
    assert points == [[(0.5, 0.75)] * 2, [(0.5, 0.0)] * 2]  # the front and the point
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 m<1>"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["1"]
    json.dumps(report)


class _Scripted:
    """A model that answers each prompt with a given text, in two passes."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def generate(self, prompts: list[str], **options: object) -> list[object]:
        from anydecode.api.generation import Generation, Stats

        stats = Stats(2, 3, 5, 0.5, 0.1, 40)
        return [Generation(self.texts[p], [], "stop", 0, stats, "scripted") for p in prompts]


def test_a_method_is_scored_by_its_answers() -> None:
    [group] = questions(["reverse"], [3], 4, 0)
    texts = {example.prompt: example.answer for example in group}
    texts[group[0].prompt] = group[1].answer
    [row] = measure(_Scripted(texts), "m", [group], batch=2)  # type: ignore[arg-type]
    assert (row.accuracy, row.strict) == (0.75, 0.75)
    assert (row.passes, row.tokens, row.rows, row.seconds) == (2.0, 3.0, 40.0, 0.25)
