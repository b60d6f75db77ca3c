"""JSON Schema, whole: masks for what they can express, checks for the rest."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anydecode.constraints.canonical import canonical
from anydecode.constraints.checking import IncrementalJsonValidator, Validator
from anydecode.constraints.completion_hints import Hints
from anydecode.constraints.constraint import (
    Constraint,
    ConstraintState,
    IncrementalValidator,
    Report,
)
from anydecode.constraints.forced_completion import ForcedCompletion
from anydecode.constraints.guidance_engine import GuidanceState, bridge, check_references, library
from anydecode.constraints.languages import ENGINES
from anydecode.constraints.narrowing import narrowed
from anydecode.constraints.relaxing import (
    LEVELS,
    UNMASKED,
    closed,
    guarded,
    nodes,
    relaxed,
    unknown_formats,
    without_formats,
)
from anydecode.constraints.termination import cannot_terminate
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Longest schema that is read, in characters, and how deep it may nest.
LONGEST = 2 << 20
DEEPEST = 128
#: White space between parts: none, one space, or a line break and its indentation.
WHITESPACE = r"[ ]?|\n[ ]{0,32}"
_PLANS: OrderedDict[tuple[Any, ...], _Plan] = OrderedDict()
_MOST_PLANS = 256
_lock = threading.Lock()


@dataclass(frozen=True)
class _Plan:
    """A schema made ready: the grammar for the mask engine and what is left to check."""

    grammar: str
    report: Report
    validator: Validator
    checks: bool
    hints: Hints


class JsonSchema(Constraint):
    """JSON texts that are valid under `schema`: a dict, a boolean, JSON text, or a pydantic model.

    Guards, stated in the result: `whitespace` is a regular expression for the space between parts
    ("" for none, None for exactly one space behind each comma and colon); strings without a bound
    have at most `max_string` characters (0: no limit); objects that name their properties get no
    others unless the schema speaks of others, or `extra_properties` is true; and with `finish` an
    answer takes the short way to its end once little more would fit the token limit, so that what
    has no bound (lists, free objects, recursion, digits) finishes. A value that breaks a rule no
    mask expresses is drawn again, `tries` times per answer. With `close` an answer that meets the
    token limit all the same is held back and cut so that it ends within it. With `formats` the
    values of `format` are rules; without, they are the annotations that the specification has
    them be by default. `resources` are other schemas by URI, for references to them: nothing is
    ever fetched.
    """

    def __init__(
        self,
        schema: Any,
        *,
        whitespace: str | None = WHITESPACE,
        max_string: int = 256,
        extra_properties: bool = False,
        finish: bool = True,
        tries: int = 32,
        close: bool = False,
        engine: str = "llguidance",
        formats: bool = True,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        if engine not in ENGINES:
            raise ConstraintError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
        if tries < 0 or max_string < 0:
            raise ConstraintError("tries and max_string must be 0 or more")
        self.schema, self.text = _read(schema)
        self._annotations: list[str] = []
        if not formats:
            self.schema, self._annotations = without_formats(self.schema)
            self.text = json.dumps(self.schema)
        self.whitespace = whitespace
        self.max_string = max_string
        self.extra_properties = extra_properties
        self.finish = finish
        self.tries = tries
        self.close = close
        self.engine = engine
        self.resources = dict(resources or {})
        self._plan: _Plan | None = None

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        plan = self._ready(tokenizer, vocab_size)
        if self.engine == "xgrammar":
            from anydecode.constraints.xgrammar_engine import XGrammarState

            return XGrammarState.of("json", self.schema, tokenizer, vocab_size)
        return GuidanceState.of(plan.grammar, tokenizer, vocab_size)

    def begin(self, tokenizer: Tokenizer, vocab_size: int, limit: int) -> ConstraintState:
        state = self.start(tokenizer, vocab_size)
        if not self.finish:
            return state
        return ForcedCompletion.of(state, tokenizer, vocab_size, limit, self.hints)

    @property
    def hints(self) -> Hints:
        """What the schema tells of short ends; known once `start` has been called."""
        assert self._plan is not None, "the constraint has not been started"
        return self._plan.hints

    def report(self) -> Report:
        assert self._plan is not None, "the constraint has not been started"
        return self._plan.report

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        assert self._plan is not None, "the constraint has not been started"
        if not self._plan.checks:
            return None
        return IncrementalJsonValidator(self._plan.validator, tokenizer)

    def is_valid(self, text: str) -> bool:
        """Whether `text` is JSON that is valid under the schema."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        plan = self._plan
        validator = (
            plan.validator if plan else Validator(self.schema, len(self.text), self.resources)
        )
        return validator.is_valid(value)

    def narrowed(self, number: int) -> JsonSchema | None:
        schema = narrowed(self.schema, number, len(self.text))
        if schema is None:
            return None
        return _Narrowed(
            schema,
            whitespace=self.whitespace,
            max_string=self.max_string or 64,
            finish=self.finish,
        )

    def _ready(self, tokenizer: Tokenizer, vocab_size: int) -> _Plan:
        if self._plan is None:
            others = json.dumps(self.resources, sort_keys=True)
            guards = (self.whitespace, self.max_string, self.extra_properties, self.finish)
            key = (self.text, others, tuple(self._annotations), guards, self.engine, type(self))
            with _lock:
                plan = _PLANS.get(key)
                if plan is not None:
                    _PLANS.move_to_end(key)
            if plan is None:
                try:
                    plan = self._make(tokenizer, vocab_size)
                except RecursionError:
                    raise ConstraintError(
                        "the schema's references lead too deep into each other: use fewer"
                    ) from None
                with _lock:
                    _PLANS[key] = plan
                    if len(_PLANS) > _MOST_PLANS:
                        _PLANS.popitem(last=False)
            self._plan = plan
        return self._plan

    def _make(self, tokenizer: Tokenizer, vocab_size: int) -> _Plan:
        validator = Validator(self.schema, len(self.text), self.resources)
        if cannot_terminate(self.schema):
            raise ConstraintError("no text can meet the schema: its recursion has no end")
        whitespace = ", : " if self.whitespace is None else self.whitespace
        present = _present(self.schema)
        if self.engine == "xgrammar":
            guards: dict[str, Any] = {"finish": self.finish}
            report = Report("json_schema", self.engine, (), tuple(present), (), guards)
            return _Plan("", report, validator, True, Hints(self.schema))
        grammar, dropped, kept = self._compiled(tokenizer, vocab_size)
        guards = {
            "finish": self.finish,
            "whitespace": whitespace,
            "max_string": (kept and self.max_string) or None,
            "extra_properties": self.extra_properties or not kept,
        }
        out = {entry.partition(" ")[0] for entry in dropped}
        masked = tuple(keyword for keyword in present if keyword not in out)
        ignored = (*self._annotations, *unknown_formats(self.schema))
        report = Report("json_schema", self.engine, masked, tuple(dropped), ignored, guards)
        said = json.loads(grammar)["grammars"][0]["json_schema"]
        return _Plan(grammar, report, validator, bool(dropped), Hints(said))

    def _guarded(self, schema: Any) -> Any:
        """`schema` with what the guards leave of it."""
        if not self.extra_properties:
            schema = closed(schema)
        return guarded(schema, self.max_string) if self.max_string else schema

    def _compiled(self, tokenizer: Tokenizer, vocab_size: int) -> tuple[str, list[str], bool]:
        """The grammar that says most of the schema, what it leaves out, and whether it keeps to
        the guards."""
        known = bridge(tokenizer, vocab_size)
        said = ""
        for schema, dropped, coerce in self._candidates():
            for is_guarded in (True, False):
                grammar = self._grammar(self._guarded(schema) if is_guarded else schema, coerce)
                try:
                    known.matcher(grammar)
                except ConstraintError as error:
                    said = str(error)
                    if not said.startswith("Unsatisfiable"):
                        break
                else:
                    return grammar, dropped, is_guarded
            if said.startswith("Unsatisfiable"):
                raise ConstraintError(f"no text can meet the schema: {said}")
        raise ConstraintError(f"the schema cannot be enforced: {said}")

    def _candidates(self) -> Iterator[tuple[Any, list[str], bool]]:
        """Schemas for the mask engine, the strongest first; what each leaves out; and whether
        `oneOf` is to be read as `anyOf`, and so left to the checks as well."""
        if not any(UNMASKED & node.keys() for _, node in nodes(self.schema)):
            yield self.schema, [], False
        try:
            rewritten = canonical(self.schema, len(self.text))
        except ValueError as error:
            raise ConstraintError(str(error)) from None
        one_of = [f"oneOf at {path}" for path, node in nodes(self.schema) if "oneOf" in node]
        if rewritten is not None:
            weaker, dropped = relaxed(rewritten)
            dropped = _where(self.schema, dropped)
            yield weaker, dropped, False
            if one_of:
                yield weaker, dropped + one_of, True
        for level in range(LEVELS):
            weaker, dropped = relaxed(self.schema, level)
            if level == 0 and rewritten is None:
                yield weaker, dropped, False
            yield weaker, dropped + one_of, True

    def _grammar(self, schema: Any, coerce: bool) -> str:
        options: dict[str, Any] = {"coerce_one_of": coerce}
        if self.whitespace is None:
            options |= {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        else:
            options["whitespace_pattern"] = self.whitespace
        text = json.dumps({} if schema is True else {"not": {}} if schema is False else schema)
        grammar: str = library().LLMatcher.grammar_from_json_schema(text, overrides=options)
        return grammar


class _Narrowed(JsonSchema):
    """A part of another schema: what it allows is checked against that one, not here."""

    def narrowed(self, number: int) -> None:
        return None


def _read(schema: Any) -> tuple[Any, str]:
    """The schema as plain JSON and as text."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, (str, bytes)):
        if len(schema) > LONGEST:
            raise ConstraintError(f"the schema has {len(schema)} characters; at most {LONGEST}")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ConstraintError("a schema is an object, true or false")
    try:
        _check_depth(schema)
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not plain JSON: {error}") from None
    if len(text) > LONGEST:
        raise ConstraintError(f"the schema has {len(text)} characters; at most {LONGEST}")
    check_references(text)
    if schema is False:
        raise ConstraintError("no text can meet the schema false")
    return schema, text


def _where(schema: Any, dropped: list[str]) -> list[str]:
    """`dropped` of a rewritten schema with the places where the author wrote it."""
    keywords = {entry.partition(" ")[0] for entry in dropped}
    own = [entry for entry in relaxed(schema)[1] if entry.partition(" ")[0] in keywords]
    return own or dropped


def _check_depth(schema: Any) -> None:
    """Raise `ConstraintError` naming the place where a schema nests too deep (or in itself)."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while stack:
        node, path = stack.pop()
        if len(path) > DEEPEST:
            raise ConstraintError(
                f"the schema nests more than {DEEPEST} deep at #/{'/'.join(path[:6])}/..."
            )
        if isinstance(node, dict):
            stack += [(value, (*path, str(key))) for key, value in node.items()]
        elif isinstance(node, list):
            stack += [(value, (*path, str(i))) for i, value in enumerate(node)]


_SPOKEN = UNMASKED | {
    "type", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "additionalItems", "enum", "const", "anyOf", "oneOf", "allOf", "pattern",
    "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
}  # fmt: skip


def _present(schema: Any) -> list[str]:
    """The asserting keywords of a schema, sorted."""
    return sorted({key for _, node in nodes(schema) for key in node if key in _SPOKEN})
