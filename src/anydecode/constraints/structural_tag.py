"""Text with JSON and other parts between tags: the structural tags of vLLM and XGrammar."""

from __future__ import annotations

import json
from typing import Any

from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
from anydecode.constraints.guidance_engine import GuidanceState
from anydecode.constraints.languages import Grammar
from anydecode.constraints.structural_formats import FormatGrammar
from anydecode.errors import ConstraintError, one_line
from anydecode.models.tokenizer import Tokenizer


class StructuralTag(Constraint):
    """Allows the texts of a structural tag. Its schemas must not need validation.

    Args:
        value: The structural tag, an object or its JSON text: a `format`, or, as in older versions,
            `structures` (each with `begin`, `schema` and `end`) and `triggers`: text in which every
            trigger starts one of the structures.
        options: Those of `JsonSchema`.

    Raises:
        ConstraintError: The value is invalid, or a trigger is missing.
    """

    def __init__(self, value: Any, **options: Any) -> None:
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not value.keys() & {"format", "structures", "triggers"}:
            raise ConstraintError("a structural tag needs a format, or structures and triggers")
        known = {"format"} if "format" in value else {"structures", "triggers"}
        if unknown := sorted(value.keys() - {"type", *known}):
            raise _unknown_field("a structural tag", unknown[0])
        self._formats = FormatGrammar(
            value["format"] if "format" in value else _triggered_tags(value), **options
        )
        self._text = ""

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        self._text = self._text or self._grammar(tokenizer, vocab_size)
        return GuidanceState.of(Grammar(self._text).guidance(), tokenizer, vocab_size)

    def report(self) -> ConstraintReport:
        return ConstraintReport("structural_tag", "llguidance", masked=("structural_tag",))

    def _grammar(self, tokenizer: Tokenizer, vocab_size: int) -> str:
        rules = [f"start: {self._formats.start}", *self._formats.rules]
        for name, (schema, path) in self._formats.schemas.items():
            value = json.dumps(schema.mask_schema(tokenizer, vocab_size))
            if schema.needs_validation:
                checked = ", ".join(schema.report().checked[:3])
                raise ConstraintError(
                    f"the schema of {path} has rules that are validated ({checked}): a structural"
                    " tag supports only those that can be masked; use tools or json"
                )
            rules.append(f"{name}: %json {value}")
        return "\n".join(rules)


def _triggered_tags(value: dict[str, Any]) -> dict[str, Any]:
    """The format of a structural tag with structures and triggers."""
    try:
        for number, one in enumerate(value["structures"]):
            if unknown := sorted(one.keys() - {"begin", "schema", "end"}):
                raise _unknown_field(f"structures.{number} of a structural tag", unknown[0])
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in value["structures"]
        ]
        return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}
    except (AttributeError, KeyError, TypeError):
        raise ConstraintError(
            "a structural tag needs structures, a list of objects with begin, schema and end, and"
            " triggers, a list of texts"
        ) from None


def _unknown_field(subject: str, name: str) -> ConstraintError:
    return ConstraintError(f"{subject} has the unknown field {one_line(name, 80)}")
