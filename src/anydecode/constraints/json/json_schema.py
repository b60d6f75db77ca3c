"""JSON Schema constraints: masks for the keywords they can express, validation for the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from anydecode.arguments import checked_arguments
from anydecode.constraints.byte_cache import ByteCache, allocated_bytes, measured_bytes
from anydecode.constraints.constraint import (
    Constraint,
    ConstraintReport,
    ConstraintState,
    IncrementalValidator,
)
from anydecode.constraints.guidance_engine import (
    GuidanceState,
    check_references,
    library,
    tokenizer_binding,
)
from anydecode.constraints.json.canonical import canonical
from anydecode.constraints.json.checking import IncrementalJsonValidator, Validator, parse_json
from anydecode.constraints.json.completion_hints import SchemaHints
from anydecode.constraints.json.forced_completion import CompletedConstraint
from anydecode.constraints.json.held_values import countable_properties
from anydecode.constraints.json.narrowed_value import (
    NarrowedValue,
    json_value_rules,
    value_schema,
)
from anydecode.constraints.json.narrowing import narrowed_schema
from anydecode.constraints.json.relaxing import (
    ASSERTING,
    INEXACT_FORMATS,
    LONG_FORMATS,
    NUM_LEVELS,
    is_unmasked,
    relaxed_schema,
    subschemas,
    unknown_formats,
    with_max_string,
    without_extra_properties,
    without_formats,
)
from anydecode.constraints.json.termination import cannot_terminate
from anydecode.constraints.json.wide_objects import with_grouped_properties
from anydecode.constraints.languages import ENGINES
from anydecode.errors import ConstraintError, one_line
from anydecode.models.tokenizer import Tokenizer

#: Maximum length of a schema, in characters, and its maximum nesting depth.
MAX_CHARACTERS = 2 << 20
MAX_DEPTH = 128
#: White space allowed between JSON tokens: none, one space, or a line break and its indentation.
WHITESPACE = r"[ ]?|\n[ ]{0,32}"
#: Maximum size of all cached compiled schemas, in bytes.
MAX_COMPILED_BYTES = 64 << 20
#: The memory of a schema as Python objects, in bytes per character of its text.
_BYTES_PER_CHARACTER = 32
_COMPILED: ByteCache[Any, _CompiledSchema] = ByteCache(MAX_COMPILED_BYTES)
#: Number of narrowed forms that are compiled with a schema whose values are validated.
_NUM_NARROWED = 4


class _Candidate(NamedTuple):
    """A schema for the mask engine, with the keywords that it leaves out, as "keyword at #/path" of
    the schema as it is written, and whether `oneOf` is read as `anyOf` (and therefore validated as
    well). `canonical` is the canonical schema it was made from, with the keywords that it leaves
    out of that; None if it was made from the schema as it is written."""

    schema: Any
    dropped: list[str]
    coerce: bool
    canonical: tuple[Any, list[str]] | None = None


@dataclass(frozen=True)
class _CompiledSchema:
    """A compiled schema: the grammar for the mask engine, what identifies it (as in
    `canvas_grammar_of`), and the validator of the rest, which is made of the keywords `left_out`,
    as "keyword at #/path"."""

    grammar: str
    origin: str
    report: ConstraintReport
    validator: Validator
    left_out: list[str]
    hints: SchemaHints

    @property
    def needs_validation(self) -> bool:
        return bool(self.left_out)


class JsonSchema(CompletedConstraint):
    """Allows the JSON texts that are valid under a schema.

    `whitespace`, `max_string`, `extra_properties` and `finish` are guards: limits added to those of
    the schema and reported in the result. By default, strings and objects have no limits but those
    of the schema.

    Args:
        schema: A dict, a boolean, JSON text, or a pydantic model.
        whitespace: A regular expression for the white space between JSON tokens: "" for none, None
            for exactly one space after each comma and colon.
        max_string: Maximum length of strings without a bound, in characters; 0 for no limit.
        extra_properties: Whether objects that list their properties may have others even if the
            schema does not mention additional properties.
        finish: Whether to force the shortest completion before the token limit, so that unbounded
            values (lists, free objects, recursion, digits) are complete.
        tries: Maximum number of retries per answer: a value that is invalid under a rule that the
            mask cannot express is sampled again.
        close: Whether an answer that still reaches the token limit is held back and shortened to a
            complete one.
        engine: The library that computes the masks, one of `ENGINES`.
        formats: Whether `format` is validated. If not, formats are annotations, the default of the
            specification.
        resources: Other schemas by URI, for references. Nothing is ever fetched.

    Raises:
        ConstraintError: The schema or an argument is invalid.
    """

    @checked_arguments(ConstraintError)
    def __init__(
        self,
        schema: Any,
        *,
        whitespace: str | None = WHITESPACE,
        max_string: int = 0,
        extra_properties: bool = True,
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
        self._compiled: _CompiledSchema | None = None
        self._narrowed: dict[int, JsonSchema | None] = {}

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        compiled = self._get_compiled(tokenizer, vocab_size)
        if self.engine == "xgrammar":
            from anydecode.constraints.xgrammar_engine import XGrammarState

            return XGrammarState.of("json", self.schema, tokenizer, vocab_size)
        state = GuidanceState.of(compiled.grammar, tokenizer, vocab_size)
        state.origin = compiled.origin
        return state

    @property
    def completion_hints(self) -> SchemaHints:
        """Names and values of the schema for shortest completions. Available after `start`."""
        assert self._compiled is not None, "the constraint has not been started"
        return self._compiled.hints

    def report(self) -> ConstraintReport:
        assert self._compiled is not None, "the constraint has not been started"
        return self._compiled.report

    @property
    def needs_validation(self) -> bool:
        """Whether a text that the mask allows can be invalid. Available after `start`."""
        assert self._compiled is not None, "the constraint has not been started"
        return self._compiled.needs_validation

    @property
    def left_out(self) -> list[str]:
        """The keywords that the mask leaves out, as "keyword at #/path". Available after `start`.
        If there are any, those of strings that the mask allows to be too long are among them."""
        assert self._compiled is not None, "the constraint has not been started"
        return self._compiled.left_out

    def mask_schema(self, tokenizer: Tokenizer, vocab_size: int) -> Any:
        """The schema that the mask enforces, with the options of llguidance: for the `%json` rule
        of a grammar. Raises `ConstraintError` as `start` does."""
        grammar = self._get_compiled(tokenizer, vocab_size).grammar
        return json.loads(grammar)["grammars"][0]["json_schema"]

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        return self.full_validator(tokenizer) if self.needs_validation else None

    def full_validator(
        self, tokenizer: Tokenizer, validator: Validator | None = None
    ) -> IncrementalValidator:
        """A validator for texts that the mask has not restricted, by `validator` in place of the
        schema's own. Available after `start`."""
        return IncrementalJsonValidator(validator or self.validator, tokenizer, self.close)

    @property
    def validator(self) -> Validator:
        """The validator of the schema. Available after `start`."""
        assert self._compiled is not None, "the constraint has not been started"
        return self._compiled.validator

    def is_valid(self, text: str) -> bool:
        """Whether `text` is JSON that is valid under the schema."""
        try:
            value = parse_json(text)
        except (ValueError, RecursionError):
            return False
        compiled = self._compiled
        validator = (
            compiled.validator
            if compiled
            else Validator(self.schema, len(self.text), self.resources)
        )
        return validator.is_valid(value)

    def warm(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().warm(tokenizer, vocab_size)
        assert self._compiled is not None
        self._compiled.hints.compute()
        if self._compiled.needs_validation:
            self._compiled.validator.build()
            for index in range(_NUM_NARROWED):
                narrowed_constraint = self.narrowed(index)
                if narrowed_constraint is None:
                    return
                narrowed_constraint.warm(tokenizer, vocab_size)

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        if self._compiled is None or self.engine != "llguidance":
            return False
        binding = tokenizer_binding(tokenizer, vocab_size)
        return binding.has_template(self._compiled.grammar) and all(
            narrowed_constraint is None or narrowed_constraint.is_warm(tokenizer, vocab_size)
            for narrowed_constraint in self._narrowed.values()
        )

    @property
    def whole(self) -> JsonSchema:
        """The constraint that this is a narrowed form of, or this one."""
        return self

    def narrowed(self, index: int) -> JsonSchema | None:
        if index not in self._narrowed:
            self._narrowed[index] = self._narrow(index)
        return self._narrowed[index]

    def _narrow(self, index: int) -> JsonSchema | None:
        schema = narrowed_schema(self.schema, index, len(self.text))
        return None if schema is None else _Narrowed(schema, self, index)

    def narrowed_value(
        self, prefix: str, index: int, validator: Validator | None = None
    ) -> JsonSchema:
        """The `index`-th narrowed form of the schema of the value that follows `prefix`, the start
        of an answer that `validator` validates, or the schema's own. Available after `start`.

        Raises:
            ConstraintError: There is no such form.
        """
        schema = value_schema(validator or self.validator, prefix)
        value = JsonSchema(
            schema,
            whitespace=self.whitespace,
            max_string=self.max_string,
            extra_properties=self.extra_properties,
            finish=self.finish,
        ).narrowed(index)
        if value is None:
            raise ConstraintError("the value has no narrowed form")
        return value

    def narrowed_value_rules(
        self, prefix: str, index: int, tokenizer: Tokenizer, vocab_size: int
    ) -> list[str]:
        """The rules of `NarrowedValue` for `narrowed_value`. Raises `ConstraintError` if there is
        no such form, or if it cannot be enforced."""
        value = self.narrowed_value(prefix, index)
        return json_value_rules(
            json_rule(value, tokenizer, vocab_size), is_whole=not prefix.strip()
        )

    def _get_compiled(self, tokenizer: Tokenizer, vocab_size: int) -> _CompiledSchema:
        if self._compiled is None:
            resources_key = json.dumps(self.resources, sort_keys=True)
            guards = (self.whitespace, self.max_string, self.extra_properties, self.finish)
            key = (
                self.text,
                resources_key,
                tuple(self._annotations),
                guards,
                self.engine,
                type(self),
            )
            compiled = _COMPILED.get(key)
            if compiled is None:
                allocated = allocated_bytes()
                try:
                    compiled = self._compile(tokenizer, vocab_size)
                except RecursionError:
                    raise ConstraintError(
                        "the schema's references are nested too deep: use fewer"
                    ) from None
                size = _BYTES_PER_CHARACTER * (len(self.text) + len(compiled.grammar))
                _COMPILED.put(key, compiled, measured_bytes(allocated, size))
            self._compiled = compiled
        return self._compiled

    def _compile(self, tokenizer: Tokenizer, vocab_size: int) -> _CompiledSchema:
        validator = Validator(self.schema, len(self.text), self.resources)
        if cannot_terminate(self.schema):
            raise ConstraintError("no text can satisfy the schema: its recursion has no end")
        whitespace = ", : " if self.whitespace is None else self.whitespace
        keywords = _asserting_keywords(self.schema)
        if self.engine == "xgrammar":
            guards: dict[str, Any] = {"finish": self.finish}
            report = ConstraintReport("json_schema", self.engine, (), tuple(keywords), (), guards)
            return _CompiledSchema(
                "", "", report, validator, ["schema at #"], SchemaHints(self.schema)
            )
        grammar, candidate, is_guarded, stronger = self._compile_grammar(tokenizer, vocab_size)
        inexact = (*_formats(self.schema, INEXACT_FORMATS), *countable_properties(self.schema))
        dropped = list(dict.fromkeys([*candidate.dropped, *inexact]))
        left_out = self._release(validator, candidate) if dropped else []
        guards = {
            "finish": self.finish,
            "whitespace": whitespace,
            "max_string": (is_guarded and self.max_string) or None,
            "extra_properties": self.extra_properties or not is_guarded,
        }
        removed = {entry.partition(" ")[0] for entry in dropped}
        masked = tuple(keyword for keyword in keywords if keyword not in removed)
        ignored = (*self._annotations, *unknown_formats(self.schema))
        report = ConstraintReport(
            "json_schema", self.engine, masked, tuple(dropped), ignored, guards
        )
        described = json.loads(grammar)
        hints = SchemaHints(described["grammars"][0]["json_schema"])
        origin = json.dumps({**described, "stronger": stronger}) if stronger else grammar
        return _CompiledSchema(grammar, origin, report, validator, left_out, hints)

    def _with_guards(self, schema: Any) -> Any:
        """`schema` with the guards applied."""
        if not self.extra_properties:
            schema = without_extra_properties(schema)
        return with_max_string(schema, self.max_string) if self.max_string else schema

    def _compile_grammar(
        self, tokenizer: Tokenizer, vocab_size: int
    ) -> tuple[str, _Candidate, bool, list[Any]]:
        """Returns the strongest grammar that compiles, the schema it was made from, whether the
        guards are applied, and the stronger schemas that did not compile."""
        binding = tokenizer_binding(tokenizer, vocab_size)
        message = ""
        stronger: list[Any] = []
        for candidate in self._candidates():
            schema = candidate.schema
            for is_guarded in (True, False):
                try:
                    grammar = self._grammar(
                        self._with_guards(schema) if is_guarded else schema, candidate.coerce
                    )
                    binding.template(grammar)
                except ConstraintError as error:
                    message = str(error)
                    if not message.startswith("Unsatisfiable"):
                        break
                else:
                    return grammar, candidate, is_guarded, stronger
            if message.startswith("Unsatisfiable"):
                raise ConstraintError(f"no text can satisfy the schema: {message}")
            guarded = self._with_guards(schema)
            if guarded not in stronger and not _one_of(guarded):  # read as `anyOf` there
                stronger.append(guarded)
        raise ConstraintError(f"the schema cannot be enforced: {message}")

    def _candidates(self) -> Iterator[_Candidate]:
        """Schemas for the mask engine, the strongest first."""
        nodes = (node for _, node in subschemas(self.schema))
        if not any(is_unmasked(key, value) for node in nodes for key, value in node.items()):
            yield _Candidate(self.schema, [], False)
        try:
            canonical_schema = canonical(self.schema, len(self.text))
        except ValueError as error:
            raise ConstraintError(str(error)) from None
        one_of = _one_of(self.schema)
        if canonical_schema is not None:
            relaxed, inexact = relaxed_schema(canonical_schema)
            dropped = _original_paths(self.schema, inexact)
            yield _Candidate(relaxed, dropped, False, (canonical_schema, inexact))
            if one_of:
                inexact = inexact + _one_of(canonical_schema)
                yield _Candidate(relaxed, dropped + one_of, True, (canonical_schema, inexact))
        for level in range(NUM_LEVELS):
            relaxed, dropped = relaxed_schema(self.schema, level)
            if level == 0 and canonical_schema is None:
                yield _Candidate(relaxed, dropped, False)
            yield _Candidate(relaxed, dropped + one_of, True)

    def _release(self, validator: Validator, candidate: _Candidate) -> list[str]:
        """Lets `validator` release what the mask of `candidate` has made valid. The schema is
        followed as it is written, or in its canonical form if that releases more. Returns the
        keywords of the schema as it is written that the mask leaves out."""
        options = [(self.schema, candidate.dropped)]
        if candidate.canonical is not None:
            written = relaxed_schema(self.schema)[1] + _one_of(self.schema)
            options = [(self.schema, written)] if written else []
            options.append(candidate.canonical)
        formats = INEXACT_FORMATS | LONG_FORMATS
        inexact = [
            (schema, [*dropped, *_formats(schema, formats), *countable_properties(schema)])
            for schema, dropped in options
        ]
        for schema, keywords in (*inexact, inexact[0]):
            validator.release(schema, keywords)
            if not validator.is_held_whole:
                break
        return inexact[0][1] if options[0][0] is self.schema else ["schema at #"]

    def _grammar(self, schema: Any, coerce: bool) -> str:
        options: dict[str, Any] = {"coerce_one_of": coerce}
        if self.whitespace is None:
            options |= {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        else:
            options["whitespace_pattern"] = self.whitespace
        schema = with_grouped_properties(schema)
        text = json.dumps({} if schema is True else {"not": {}} if schema is False else schema)
        try:
            grammar: str = library().LLMatcher.grammar_from_json_schema(text, overrides=options)
        except ValueError as error:  # a number is out of range
            raise ConstraintError(one_line(error)) from None
        return grammar


class _Narrowed(JsonSchema):
    """The narrowed form `index` of another schema; its values are validated against that schema. If
    it cannot be enforced, that is found once."""

    _failure = ""

    def __init__(self, schema: Any, whole: JsonSchema, index: int) -> None:
        super().__init__(
            schema,
            whitespace=whole.whitespace,
            max_string=whole.max_string or 64,
            extra_properties=False,
            finish=whole.finish,
        )
        self._whole = whole
        self._index = index

    @property
    def whole(self) -> JsonSchema:
        return self._whole

    def with_prefix(self, prefix: str) -> Constraint:
        if not prefix.strip():
            return self
        rules = partial(self._whole.narrowed_value_rules, prefix, self._index)
        return NarrowedValue(self._whole, prefix, rules)

    def warm(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            super().warm(tokenizer, vocab_size)
        except ConstraintError as error:
            self._failure = str(error)

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        return bool(self._failure) or super().is_warm(tokenizer, vocab_size)

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        if self._failure:
            raise ConstraintError(self._failure)
        return super().start(tokenizer, vocab_size)

    def narrowed(self, index: int) -> None:
        return None


def json_rule(schema: JsonSchema, tokenizer: Tokenizer, vocab_size: int) -> str:
    """The `%json` directive of a schema, as the mask enforces it. Raises `ConstraintError` if it
    cannot be enforced."""
    return "%json " + json.dumps(schema.mask_schema(tokenizer, vocab_size))


def clear_compiled() -> None:
    """Drops all cached compiled schemas."""
    _COMPILED.clear()


def _read(schema: Any) -> tuple[Any, str]:
    """Returns the schema as plain JSON and as text."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, (str, bytes)):
        if len(schema) > MAX_CHARACTERS:
            raise ConstraintError(
                f"the schema has {len(schema)} characters; at most {MAX_CHARACTERS}"
            )
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ConstraintError("a schema must be an object, true or false")
    try:
        _check_depth(schema)
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not plain JSON: {error}") from None
    if len(text) > MAX_CHARACTERS:
        raise ConstraintError(f"the schema has {len(text)} characters; at most {MAX_CHARACTERS}")
    check_references(text)
    if schema is False:
        raise ConstraintError("no text can satisfy the schema false")
    return schema, text


def _formats(schema: Any, names: Set[str]) -> list[str]:
    """Where a schema has formats with one of the `names`, as "format at #/path"."""
    return [
        f"format at {path}"
        for path, node in subschemas(schema)
        if isinstance(node.get("format"), str) and node["format"] in names
    ]


def _one_of(schema: Any) -> list[str]:
    """Every `oneOf` of a schema, as "oneOf at #/path"."""
    return [f"oneOf at {path}" for path, node in subschemas(schema) if "oneOf" in node]


def _original_paths(schema: Any, dropped: list[str]) -> list[str]:
    """`dropped` of a canonical schema, with the paths of the keywords in the original schema."""
    keywords = {entry.partition(" ")[0] for entry in dropped}
    original = [entry for entry in relaxed_schema(schema)[1] if entry.partition(" ")[0] in keywords]
    return original or dropped


def _check_depth(schema: Any) -> None:
    """Raises `ConstraintError` with the path at which a schema nests too deep (or in itself)."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while stack:
        node, path = stack.pop()
        if len(path) > MAX_DEPTH:
            raise ConstraintError(
                f"the schema nests more than {MAX_DEPTH} deep at #/{'/'.join(path[:6])}/..."
            )
        if isinstance(node, dict):
            stack += [(value, (*path, str(key))) for key, value in node.items()]
        elif isinstance(node, list):
            stack += [(value, (*path, str(i))) for i, value in enumerate(node)]


def _asserting_keywords(schema: Any) -> list[str]:
    """The asserting keywords in a schema, sorted."""
    return sorted({key for _, node in subschemas(schema) for key in node if key in ASSERTING})
