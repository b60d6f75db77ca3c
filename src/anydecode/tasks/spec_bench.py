"""Questions of Spec-Bench (Xia et al., arXiv:2401.07851), or the package's own prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

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


def questions(data: Path | None, limit: int | None) -> list[Question]:
    """First turns of Spec-Bench's questions, at most `limit` per category; without `data`, the
    package's own prompts."""
    if data is None:
        result = [Question(prompt.category, prompt.text) for prompt in PROMPTS]
    else:
        file = data / "question.jsonl" if data.is_dir() else data
        try:
            lines = [
                json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip()
            ]
            result = [Question(_category(line["category"]), line["turns"][0]) for line in lines]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(
                f"{file} is not a file of Spec-Bench questions: {error}"
            ) from None
        if not result:
            raise InvalidRequestError(f"{file} has no Spec-Bench questions")
    counts: dict[str, int] = {}
    selected = []
    for question in result:
        counts[question.category] = counts.get(question.category, 0) + 1
        if limit is None or counts[question.category] <= limit:
            selected.append(question)
    return selected


def _category(name: str) -> str:
    return "mt-bench" if name in MT_BENCH - OWN_CATEGORIES else name
