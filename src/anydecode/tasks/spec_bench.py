"""Questions of Spec-Bench (Xia et al., arXiv:2401.07851), GSM8K and HumanEval, or the package's own
prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import InvalidRequestError
from anydecode.tasks.prompts import PROMPTS

#: Spec-Bench has a few questions of each of these, from MT-Bench; here they are one category.
MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "stem", "humanities", "extraction")
)
#: Small categories of MT-Bench that are still reported separately.
OWN_CATEGORIES = frozenset(("extraction",))


class Question(NamedTuple):
    """One user message."""

    category: str
    text: str


def questions(
    data: Path | Sequence[Path] | None,
    limit: int | None,
    skip: int = 0,
    seed: int | None = None,
) -> list[Question]:
    """The questions of some files; without files, the package's own prompts.

    Args:
        data: Files of questions, one JSON object per line: of Spec-Bench (first turns), GSM8K (the
            category "gsm8k") or HumanEval (functions to complete, "humaneval"). Of a folder,
            Spec-Bench's question.jsonl.
        limit: Maximum number of questions of a category; None: all.
        skip: The number of questions of each category before those.
        seed: Of the order in which questions are taken and returned; None: that of the files.

    Raises:
        InvalidRequestError: A file has no such questions, or none is left.
    """
    result = [Question(prompt.category, prompt.text) for prompt in PROMPTS]
    if data is not None:
        files = [data] if isinstance(data, Path) else data
        result = [question for file in files for question in _read(file)]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(result))
        result = [result[index] for index in order]
    counts: Counter[str] = Counter()
    selected = []
    for question in result:
        counts[question.category] += 1
        number = counts[question.category] - skip
        if number > 0 and (limit is None or number <= limit):
            selected.append(question)
    if not selected:
        raise InvalidRequestError(f"no category has more than {skip} questions")
    return selected


def _read(path: Path) -> list[Question]:
    """The questions of a file, or of a folder of Spec-Bench."""
    file = path / "question.jsonl" if path.is_dir() else path
    try:
        lines = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()]
        result = [_question(line) for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, KeyError):
            reason = f"a line has no {error}"
        raise InvalidRequestError(
            f"{file} has no questions as Spec-Bench, GSM8K or HumanEval have them: {reason}"
        ) from None
    if not result:
        raise InvalidRequestError(f"{file} has no questions")
    return result


def _question(line: dict[str, Any]) -> Question:
    if "turns" in line:
        category, text = _category(line["category"]), line["turns"][0]
    elif "entry_point" in line:
        category = "humaneval"
        text = f"Complete this Python function:\n```python\n{line['prompt']}```"
    else:
        category, text = "gsm8k", line["question"]
    if not isinstance(text, str):
        raise TypeError("a question must be text")
    return Question(category, text)


def _category(name: str) -> str:
    return "mt-bench" if name in MT_BENCH - OWN_CATEGORIES else name
