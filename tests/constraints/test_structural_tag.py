"""Structural tags: JSON between tags in free text."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from anydecode.constraints.structural_tag import StructuralTag  # noqa: E402
from anydecode.errors import ConstraintError  # noqa: E402
from anydecode.models.scripted import ByteTokenizer  # noqa: E402

TOKENIZER = ByteTokenizer()
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[", "schema": {"type": "null"}, "end": "]"},
    ],
    "triggers": ["<f=", "["],
}


def accepts(text: str, tag: Any = TAG) -> bool:
    state = StructuralTag.of(tag).start(TOKENIZER, TOKENIZER.vocab_size)
    for byte in text.encode():
        if not state.allows(byte):
            return False
        state.advance(byte)
    return state.can_stop


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("plain text, <f and all", True),
        ("so <f=a>3</f> and <f=b>true</f>.", True),
        ("<f=b>true</f>[null]<f=a>1</f>", True),
        ("<f=a>true</f>", False),
        ("<f=c>1</f>", False),
        ("so <f=a>3", False),
        ("a [list]", False),
    ],
)
def test_every_trigger_starts_a_structure(text: str, is_allowed: bool) -> None:
    assert accepts(text) == is_allowed
    assert accepts(text, json.dumps(TAG)) == is_allowed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"triggers": ["{"]}, "no trigger starts the structure '<f=a>'"),
        ({"triggers": []}, "no trigger starts"),
        ({"structures": []}, "needs structures and triggers"),
        ({"structures": [{"begin": "["}]}, "with begin, schema and end"),
        ({"structures": [{"begin": "[", "schema": False, "end": "]"}]}, "no text can satisfy"),
        (
            {"structures": [{"begin": "[", "schema": {"uniqueItems": True}, "end": "]"}]},
            r"rules that are validated \(uniqueItems",
        ),
    ],
)
def test_unusable_tags_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConstraintError, match=problem):
        accepts("", {**TAG, **change})
    with pytest.raises(ConstraintError, match="needs structures"):
        StructuralTag.of({"type": "structural_tag", "format": {}})
