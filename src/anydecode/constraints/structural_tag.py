"""Free text with JSON between tags: the structural tags of vLLM and XGrammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
from anydecode.constraints.guidance_engine import GuidanceState
from anydecode.constraints.json.json_schema import JsonSchema
from anydecode.constraints.languages import Grammar
from anydecode.constraints.tools.formats import literal, regex_literal
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer


class Structure(NamedTuple):
    """JSON that is valid under `schema`, between the texts `begin` and `end`."""

    begin: str
    schema: JsonSchema
    end: str


class StructuralTag(Constraint):
    """Allows text in which every trigger starts one of the structures.

    Args:
        structures: The structures. Their schemas must not need validation.
        triggers: Texts that start structures; every `begin` starts with one of them.

    Raises:
        ConstraintError: There is no structure, or one that no trigger starts.
    """

    def __init__(self, structures: Sequence[Structure], triggers: Sequence[str]) -> None:
        if not structures or not all(triggers):
            raise ConstraintError("a structural tag needs structures and triggers, none empty")
        self._structures: dict[str, list[Structure]] = {trigger: [] for trigger in triggers}
        for structure in structures:
            found = [trigger for trigger in triggers if structure.begin.startswith(trigger)]
            if not found:
                raise ConstraintError(
                    f"no trigger starts the structure {structure.begin!r}; the triggers are"
                    f" {', '.join(map(repr, triggers))}"
                )
            self._structures[max(found, key=len)].append(structure)
        self._text = ""

    @classmethod
    def of(cls, value: Any, **options: Any) -> StructuralTag:
        """Reads a structural tag: an object, or its JSON text, with `structures` (each with
        `begin`, `schema` and `end`) and `triggers`. `options`: those of `JsonSchema`."""
        try:
            value = json.loads(value) if isinstance(value, str) else value
            structures = [
                Structure(str(one["begin"]), JsonSchema(one["schema"], **options), str(one["end"]))
                for one in value["structures"]
            ]
            triggers = [str(trigger) for trigger in value["triggers"]]
        except ConstraintError:
            raise
        except (KeyError, TypeError, ValueError):
            raise ConstraintError(
                "a structural tag needs structures, a list of objects with begin, schema and end,"
                " and triggers, a list of texts"
            ) from None
        return cls(structures, triggers)

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        self._text = self._text or self._grammar(tokenizer, vocab_size)
        return GuidanceState.of(Grammar(self._text).guidance(), tokenizer, vocab_size)

    def report(self) -> ConstraintReport:
        return ConstraintReport("structural_tag", "llguidance", masked=("structural_tag",))

    def _grammar(self, tokenizer: Tokenizer, vocab_size: int) -> str:
        rules: list[str] = []
        tags: list[str] = []
        for number, (trigger, structures) in enumerate(self._structures.items()):
            options: list[str] = []
            for structure in structures:
                name = f"value_{number}_{len(options)}"
                value = json.dumps(structure.schema.mask_schema(tokenizer, vocab_size))
                if structure.schema.needs_validation:
                    checked = ", ".join(structure.schema.report().checked[:3])
                    raise ConstraintError(
                        f"the schema of {structure.begin!r} has rules that are validated"
                        f" ({checked}): a structural tag supports only those that can be masked;"
                        " use tools or json"
                    )
                begin = literal(structure.begin[len(trigger) :])
                options.append(f"{begin} {name} {literal(structure.end)}")
                rules.append(f"{name}: %json {value}")
            # Lazy: the text ends at the first trigger.
            rules.append(f"text_{number}[lazy]: TEXT? {literal(trigger)}")
            if options:
                tags.append(f"text_{number} ({' | '.join(options)})")
        excluded = " & ".join(f"~/(?s:.*){regex_literal(one)}(?s:.*)/" for one in self._structures)
        rules.append(f"TEXT: /(?s:.+)/ & {excluded}")
        return "\n".join([f"start: ({' | '.join(tags)})* TEXT?", *rules])
