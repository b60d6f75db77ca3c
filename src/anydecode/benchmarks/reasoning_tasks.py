"""The questions of `anydecode bench reasoning`, and the checks of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.rewards import sandbox
from anydecode.rewards.answers import last_number
from anydecode.tasks.tasks import TASKS, examples

#: What each task compares methods with; of programs there is no answer that could be counted.
BASELINES = {
    "gsm8k": ("best-of-n:n={n}", "majority-vote:n={n}"),
    "human-eval": ("best-of-n:n={n}",),
    "parallelbench": ("best-of-n:n={n}", "majority-vote:n={n},answer=last-line"),
}
#: Where the body of a function ends.
_END_OF_FUNCTION = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@", "\n```")
#: Limits of a program: seconds, and bytes.
_SECONDS, _MEMORY = 5.0, 512 << 20


@dataclass(frozen=True)
class Question:
    """A question with a checkable answer.

    Attributes:
        prompt: Its tokens.
        is_right: Whether a text is a right answer.
        stop: Texts at which an answer ends; the same for all questions of a task.
    """

    prompt: list[int]
    is_right: Callable[[str], bool]
    stop: tuple[str, ...] = ()


def load_questions(task: str, data: Path | None, count: int, seed: int, llm: LLM) -> list[Question]:
    """`count` questions of a task, or all if there are fewer, drawn by `seed`.

    Args:
        task: A key of `BASELINES`.
        data: The file with the questions; None for parallelbench, whose questions are made.
        count: How many.
        seed: Of the draw.
        llm: The model, whose tokenizer and chat template are used.

    Raises:
        InvalidRequestError: There is no such task, or the file has none of its questions.
    """
    if task not in BASELINES:
        raise InvalidRequestError(f"task is {task!r}; it may be {', '.join(BASELINES)}")
    if task == "parallelbench":
        per_task = -(-count // len(TASKS))
        made = [one for name in TASKS for one in examples(name, per_task, seed=seed)]
        Random(seed).shuffle(made)
        return [Question(llm.encode(one.prompt), one.is_right) for one in made[:count]]
    if task == "human-eval":
        sandbox.check_supported()
    lines = _lines(task, data)
    Random(seed).shuffle(lines)
    question = _gsm8k if task == "gsm8k" else _human_eval
    try:
        return [question(one, llm) for one in lines[:count]]
    except (LookupError, TypeError, AttributeError):
        raise InvalidRequestError(f"{data} has no questions of {task}") from None


def _gsm8k(line: dict[str, Any], llm: LLM) -> Question:
    """The last number of the answer must be that behind the marker of the reference."""
    text = f"{line['question']}\nThink step by step, and end with the answer as a number."
    prompt = llm.tokenizer.render_chat([{"role": "user", "content": text}])
    expected = last_number(line["answer"].rpartition("####")[2])
    if expected is None:
        raise LookupError("an answer without a number")
    return Question(
        llm.encode(prompt, special=False), lambda answer: last_number(answer) == expected
    )


def _human_eval(line: dict[str, Any], llm: LLM) -> Question:
    """The text continues the beginning of a function, which must pass its tests."""
    tests = f"{line['test']}\ncheck({line['entry_point']})\n"
    check = partial(_passes, line["prompt"], tests)
    return Question(llm.encode(line["prompt"]), check, _END_OF_FUNCTION)


def _passes(prompt: str, tests: str, text: str) -> bool:
    return sandbox.run_python(f"{prompt}{text}\n{tests}", _SECONDS, _MEMORY).passed


def _lines(task: str, data: Path | None) -> list[Any]:
    if data is None:
        raise InvalidRequestError(f"{task} needs --data: the file with its questions")
    try:  # line separators of Unicode may occur within a line
        text = data.expanduser().read_text("utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{data} cannot be read as JSON lines: {error}") from None
    if not lines:
        raise InvalidRequestError(f"{data} has no questions of {task}")
    return lines
