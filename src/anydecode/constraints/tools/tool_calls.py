"""Constraint of answers with tool calls: one grammar masks the calls, and the arguments of every
call are validated under the full schema of its tool."""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from anydecode.constraints.byte_cache import byte_cached
from anydecode.constraints.constraint import (
    CompletionHints,
    ConstraintReport,
    ConstraintState,
    IncrementalValidator,
)
from anydecode.constraints.guidance_engine import GuidanceState, tokenizer_binding
from anydecode.constraints.json.checking import Validator
from anydecode.constraints.json.forced_completion import CompletedConstraint
from anydecode.constraints.json.json_schema import JsonSchema, json_rule
from anydecode.constraints.json.narrowed_value import NarrowedValue
from anydecode.constraints.languages import Grammar
from anydecode.constraints.tools.formats import (
    CallRules,
    Inexact,
    ToolFormat,
    literal,
    regex_literal,
)
from anydecode.constraints.tools.stream import Event, Steps, TextStream
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: The name of the answer's schema in reports; not the name of a tool.
_ANSWER = "the answer"
#: Maximum size of the grammars whose shortest texts are kept, in bytes.
_MAX_TEXTS_BYTES = 8 << 20


class ToolCalls(CompletedConstraint):
    """Allows tool calls whose arguments are valid under the schemas of their tools.

    Args:
        schemas: The schemas of the tools' arguments, by name.
        call_format: How calls are written.
        is_required: Whether the answer consists of calls. If not, it may be text, or text with
            calls behind it.
        is_parallel: Whether there may be several calls.
        answer: The schema of an answer without calls, in place of text.
        finish: Whether to force the shortest completion of a call before the token limit.
        tries: Maximum number of retries per answer.

    Raises:
        ConstraintError: There are no tools.
    """

    def __init__(
        self,
        schemas: Mapping[str, JsonSchema],
        call_format: ToolFormat,
        *,
        is_required: bool = False,
        is_parallel: bool = True,
        answer: JsonSchema | None = None,
        finish: bool = True,
        tries: int = 32,
    ) -> None:
        if not schemas:
            raise ConstraintError("tool calls need at least one tool")
        self.schemas = dict(schemas)
        self.call_format = call_format
        self.is_required = is_required
        self.is_parallel = is_parallel
        self.answer = None if is_required else answer
        self.finish = finish
        self.tries = tries
        self._prefix = ""
        self._text = ""  # of the grammar, once it has been made
        self._base_text = ""  # of the grammar that this is a narrowed form of
        self._validated: Inexact = {}  # the tools with validated calls
        self._validators: dict[str, Validator] = {}  # of their arguments
        self._whole: ToolCalls | None = None  # the constraint that this is a narrowed form of
        self._index = 0  # of the narrowed form

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        self._text = self._text or self._grammar(tokenizer, vocab_size)
        return GuidanceState.of(Grammar(self._text).guidance(), tokenizer, vocab_size)

    def warm(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().warm(tokenizer, vocab_size)
        for schema in self._named_schemas().values():
            schema.warm(tokenizer, vocab_size)
        for validator in filter(None, map(self.validator, self._validated)):
            validator.build()

    def is_warm(self, tokenizer: Tokenizer, vocab_size: int) -> bool:
        binding = tokenizer_binding(tokenizer, vocab_size)
        return bool(self._text) and binding.has_template(Grammar(self._text).guidance())

    @property
    def completion_hints(self) -> CompletionHints:
        """The names and values of all schemas. Available after `start`."""
        hints = [schema.completion_hints for schema in self._named_schemas().values()]
        shortest = _shortest_texts(self._base_text or self._text)
        return _Hints(hints, self.call_format.string_end, shortest, self._may_force)

    def report(self) -> ConstraintReport:
        reports = {name: schema.report() for name, schema in self._named_schemas().items()}

        def named(field: str) -> tuple[str, ...]:
            return tuple(
                f"{entry} of {name}"
                for name, report in reports.items()
                for entry in getattr(report, field)
            )

        masked = sorted({entry for report in reports.values() for entry in report.masked})
        guards = next(iter(reports.values())).guards
        return ConstraintReport(
            "tools", "llguidance", tuple(masked), named("checked"), named("ignored"), guards
        )

    def incremental_validator(self, tokenizer: Tokenizer) -> IncrementalValidator | None:
        assert self._text, "the constraint has not been started"
        if not self._validated and (self.answer is None or not self.answer.needs_validation):
            return None
        return _CallsValidator(self, tokenizer)

    def validator(self, name: str) -> Validator | None:
        """The validator of the arguments of a tool; None if the grammar allows valid ones only, or
        if there is no such tool. Available after `start`."""
        if name not in self._validated:
            return None
        if name not in self._validators:
            schema, left_out = self.schemas[name], self._validated[name]
            own = schema.validator
            self._validators[name] = (
                own if left_out is None else own.released(schema.schema, left_out)
            )
        return self._validators[name]

    def narrowed(self, index: int) -> ToolCalls | None:
        schemas = {
            name: schema.narrowed(index) if name in self._validated else None
            for name, schema in self.schemas.items()
        }
        answer = None if self.answer is None else self.answer.narrowed(index)
        if answer is None and not any(schemas.values()):
            return None
        other = self._with(
            {name: schema or self.schemas[name] for name, schema in schemas.items()},
            answer or self.answer,
        )
        other._base_text = self._text
        other._whole, other._index = self, index
        return other

    def with_prefix(self, prefix: str) -> CompletedConstraint:
        whole = self._whole
        opened = None if whole is None else whole._open_value(prefix)
        if whole is not None and opened is not None:
            name, text = opened
            if name not in whole._named_schemas() or not whole._is_validated(name):
                return whole
            rules = partial(whole._narrowed_value_rules, name, text, self._index)
            return NarrowedValue(whole, prefix, rules)
        other = self._with(self.schemas, self.answer)
        other._prefix, other._base_text = prefix, self._base_text
        return other

    def _may_force(self, text: str) -> bool:
        """Whether a completion of `text` chooses no tool: where several may be called, only the
        model does."""
        if len(self.schemas) == 1 and self.answer is None:
            return True
        stream = TextStream()
        kinds = [kind for kind, _ in stream.run(self.parse(stream), text)]
        is_answer = self.answer is not None and "content" in kinds
        return is_answer or kinds.count("call") > kinds.count("end")

    def parse(self, stream: TextStream) -> Steps[None]:
        """Parses an answer."""
        schemas = {name: schema.schema for name, schema in self.schemas.items()}
        return parse_answer(
            stream,
            self.call_format,
            schemas,
            has_answer=self.answer is not None,
            is_required=self.is_required,
        )

    def _open_value(self, prefix: str) -> tuple[str, str] | None:
        """The name of the tool, or `_ANSWER`, and the text so far of the arguments, or of the
        answer under a schema, within which `prefix` ends; None if it ends outside."""
        stream = TextStream()
        steps = self.parse(stream)
        name, opened = "", ""
        has_answer = self.answer is not None and bool(prefix.strip())
        for part in (prefix, self.call_format.name_end):
            if name:
                break
            for kind, text in stream.run(steps, part):
                if kind == "call":
                    name, opened, has_answer = text, "", False
                elif kind == "end":
                    name = ""
                elif kind == "content" and has_answer:
                    name = _ANSWER
                if part is prefix and kind in ("arguments", "content"):
                    opened += text
        return (name, opened) if name else None

    def _is_validated(self, name: str) -> bool:
        """Whether the arguments of a tool, or the answer for `_ANSWER`, are validated."""
        if name == _ANSWER:
            return self.answer is not None and self.answer.needs_validation
        return name in self._validated

    def _narrowed_value_rules(
        self, name: str, text: str, index: int, tokenizer: Tokenizer, vocab_size: int
    ) -> list[str]:
        """The rules of `NarrowedValue` for the value that follows `text`, the start of the
        arguments of a tool, or of the answer for `_ANSWER`."""
        if name == _ANSWER:
            assert self.answer is not None
            return self.answer.narrowed_value_rules(text, index, tokenizer, vocab_size)
        schema = self.schemas[name]
        value = schema.narrowed_value(text, index, self.validator(name))
        value.start(tokenizer, vocab_size)
        rule = partial(json_rule, tokenizer=tokenizer, vocab_size=vocab_size)
        return self.call_format.value_rules(value, text.strip(), schema.schema, rule)

    def _with(self, schemas: Mapping[str, JsonSchema], answer: JsonSchema | None) -> ToolCalls:
        return ToolCalls(
            schemas,
            self.call_format,
            is_required=self.is_required,
            is_parallel=self.is_parallel,
            answer=answer,
            finish=self.finish,
            tries=self.tries,
        )

    def _named_schemas(self) -> dict[str, JsonSchema]:
        return {**self.schemas, **({} if self.answer is None else {_ANSWER: self.answer})}

    def _grammar(self, tokenizer: Tokenizer, vocab_size: int) -> str:
        """The grammar, in llguidance's dialect of Lark."""

        rule = partial(json_rule, tokenizer=tokenizer, vocab_size=vocab_size)
        for name, schema in self._named_schemas().items():
            subject = name if name == _ANSWER else f"the parameters of tool {name!r}"
            try:
                schema.mask_schema(tokenizer, vocab_size)
            except ConstraintError as error:
                raise ConstraintError(f"{subject} cannot be enforced: {error}") from None
        parts = self.call_format.rules(self.schemas, rule)
        self._validated = parts.inexact
        has_more = self.is_parallel and parts.call
        more = f"({parts.separator} {parts.call})" if has_more else ""
        rest = f"{more and more + '*'} {parts.closing}"
        start, rules = self._start(parts, rest)
        if self.answer is not None:
            rules.append(f"answer: {rule(self.answer)}")
        calls = f"calls: {parts.first} {rest}"
        if self.call_format.text_start and self._is_free and not self._prefix:
            calls += f" | {literal(self.call_format.text_start)} text?"
        return "\n".join([f"start: {start}", *rules, *parts.rules, calls])

    def _start(self, parts: CallRules, rest: str) -> tuple[str, list[str]]:
        """The start of the grammar, and its rules besides `calls` and `answer`. `rest`: what may
        follow a call."""
        trigger, has_channels = literal(self.call_format.trigger), self._has_channels
        options: list[str] = []
        rules: list[str] = []
        if self._prefix:
            # Behind other calls, the answer may also end: there may be no room for a valid call.
            tail = rest if self._num_calls(self._prefix) else f"{trigger} calls"
            if has_channels and tail != rest:  # the prefix ends within the reasoning
                options, rules = self._behind_text(parts, "(?s:.*)", "TEXT?")
                tail = f"({' | '.join(options)})"
            return f"{literal(self._prefix)} {tail}", rules
        if not self._is_free:
            options.append(f"{trigger} calls")
        if self.answer is not None:
            options.append("answer")
        if self.answer is not None and has_channels:
            options.append(f"{literal(''.join(self.call_format.answer_opening))} answer")
        if self._starts(parts) and (self.answer is None or has_channels):
            options.append(f"{parts.bare} {rest}")
        if self._is_free:
            more, rules = self._behind_text(parts, "(?s:.+)", "TEXT?")
            options.append("text")
            rules.append(f"text: {' | '.join([*more, 'TEXT'])}")
        elif has_channels:
            pattern = f"{regex_literal(self.call_format.reasoning_opening)}(?s:.*)"
            more, rules = self._behind_text(parts, pattern, "TEXT")
            options += more
        return " | ".join(options), rules

    @property
    def _is_free(self) -> bool:
        """Whether the answer may be text."""
        return not self.is_required and self.answer is None

    @property
    def _has_channels(self) -> bool:
        """Whether all parts of an answer are on channels."""
        return bool(self.call_format.reasoning_opening)

    def _behind_text(
        self, parts: CallRules, pattern: str, text: str
    ) -> tuple[list[str], list[str]]:
        """Expressions of calls, or the answer, behind a text that matches `pattern`, and their
        rules, which are lazy: the text ends where the first of them begins. `text`: an expression
        of the text."""
        call_format, has_answer = self.call_format, self.answer is not None
        follows = {call_format.trigger: "calls", **parts.others}
        starts = [*follows]
        if has_answer:
            follows["".join(call_format.answer_opening)] = "answer"
        if has_answer or self.is_required:  # the text is reasoning only
            starts += call_format.text_openings
        options = [f"text_{number} {rule}" for number, rule in enumerate(follows.values())]
        rules = [
            f"text_{number}[lazy]: {text} {literal(tag)}" for number, tag in enumerate(follows)
        ]
        return options, [*rules, self._text_rule(parts, pattern, starts)]

    def _starts(self, parts: CallRules) -> Sequence[str]:
        """The texts that start calls if the answer begins with them."""
        start = self.call_format.start_trigger
        return parts.starts or ([start] if start else [])

    def _text_rule(self, parts: CallRules, pattern: str, triggers: Sequence[str]) -> str:
        """The rule of text that matches `pattern` and in which no call starts."""
        starts = [f"(?s:.*){regex_literal(trigger)}" for trigger in triggers]
        starts += [f"\\s*{regex_literal(start.lstrip())}" for start in self._starts(parts)]
        return f"TEXT: /{pattern}/ & ~/({'|'.join(starts)})(?s:.*)/"

    def _num_calls(self, text: str) -> int:
        """The number of complete calls in `text`."""
        stream = TextStream()
        events = stream.run(self.parse(stream), text, final=True)
        return sum(kind == "end" for kind, _ in events)


def parse_answer(
    stream: TextStream,
    call_format: ToolFormat,
    schemas: Mapping[str, Any],
    *,
    has_answer: bool,
    is_required: bool,
) -> Steps[None]:
    """Parses an answer under `ToolCalls`.

    Args:
        stream: The text of the answer.
        call_format: How calls are written.
        schemas: The schemas of the tools' arguments, by name.
        has_answer: Whether an answer that does not start with a call contains none. Does not apply
            where its parts are on channels.
        is_required: Whether the answer consists of calls: other text is a part of one that was cut.
    """
    has_channels = bool(call_format.reasoning_opening)
    if (
        has_answer
        and not has_channels
        and not (yield from stream.next_of(call_format.trigger, removes=False))
    ):
        yield from stream.rest()
        return
    for event in call_format.parse(stream, schemas):
        if event is None or event[0] != "content" or not is_required:
            yield event


@byte_cached(_MAX_TEXTS_BYTES)
def _shortest_texts(grammar: str) -> MutableMapping[Tokenizer, array[int]]:
    """The tokens of the shortest text of a grammar, by tokenizer: filled by those who need them."""
    return WeakKeyDictionary()


class _Hints:
    """The completion hints of several schemas."""

    def __init__(
        self,
        hints: list[Any],
        string_end: str,
        shortest: MutableMapping[Tokenizer, array[int]],
        may_force: Callable[[str], bool],
    ) -> None:
        self._hints = hints
        self.string_ends = (string_end.encode(),) if string_end else ()
        self.shortest = shortest
        self.may_force = may_force
        self.values = sorted({value for one in hints for value in one.values}, key=len)
        self.longest_text = max((one.longest_text for one in hints), default=0)
        self.names = {name: text for one in hints for name, text in one.names.items()}

    def ordered(self, allowed: Set[str]) -> list[str]:
        """The names `allowed`, in the order of the schema that has the largest number of them."""
        best = max(self._hints, key=lambda one: len(one.names.keys() & allowed))
        names: list[str] = best.ordered(best.names.keys() & allowed)
        return names + sorted(allowed - set(names))


class _Parts:
    """The parts of a text, in place of tokens: the `tokenizer` of a validator of that text."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def token_bytes(self, index: int) -> bytes:
        return self.parts[index]


@dataclass
class _Value:
    """A JSON text that is validated: its validator, its parts, the tokens they belong to, and the
    ends of its parts, in characters of the JSON text and of the answer. The first end is the start
    of the value."""

    validator: Any
    parts: _Parts
    tokens: list[int]
    ends: deque[tuple[int, int]]

    def settled_end(self, text: str) -> int:
        """The end of the settled part of the value in `text`, the answer, in characters."""
        settled = self.validator.settled_text
        while len(self.ends) > 1 and self.ends[1][0] <= len(settled):
            self.ends.popleft()
        start, end = self.ends[0]
        rest = settled[start:]  # within a part that is written as JSON
        return end + (len(rest) if text.startswith(rest, end) else 0)


class _CallsValidator:
    """Validates the arguments of calls, as soon as a value in them is complete.

    Attributes:
        num_settled: The number of tokens that no retry removes: those before a value that may
            still become invalid.
        settled_text: The text up to there.
    """

    def __init__(self, constraint: ToolCalls, tokenizer: Tokenizer) -> None:
        self._constraint = constraint
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stream = TextStream()
        self._steps = constraint.parse(self._stream)
        self._text = ""
        self._ends: list[int] = []  # of each token, in characters
        self._value: _Value | None = None
        self._num_settled_characters = 0
        answer = constraint.answer
        has_rules = answer is not None and answer.needs_validation
        self._answer = (
            self._new_value(answer, answer.validator) if answer is not None and has_rules else None
        )

    @property
    def num_settled(self) -> int:
        return bisect_right(self._ends, self._num_settled_characters)

    @property
    def settled_text(self) -> str:
        return self._text[: self._num_settled_characters]

    def push(self, token: int) -> int | None:
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        self._text += text
        self._ends.append(len(self._text))
        return self._read(text, False)

    def end(self) -> int | None:
        invalid = self._read("", True)
        if invalid is not None or self._answer is None or self._answer is not self._value:
            return invalid
        return self._end(self._value)

    def _read(self, text: str, final: bool) -> int | None:
        for event in self._stream.run(self._steps, text, final):
            invalid = self._handle(event)
            if invalid is not None:
                return invalid
        return None

    def _handle(self, event: Event) -> int | None:
        kind, text = event
        if kind == "call":
            self._answer = None
            validator = self._constraint.validator(text)
            self._value = (
                None
                if validator is None
                else self._new_value(self._constraint.schemas[text], validator)
            )
        elif kind == "arguments":
            if self._value is not None:
                return self._push(text)
        elif kind == "end":
            value, self._value = self._value, None
            if value is not None and (invalid := self._end(value)) is not None:
                return invalid
        elif kind == "content" and self._answer is not None:
            if self._value is not self._answer:
                self._value = self._answer
                self._value.ends = deque([(0, self._stream.num_taken - len(text))])
            return self._push(text)
        self._settle()
        return None

    def _settle(self) -> None:
        value = self._value
        self._num_settled_characters = (
            self._stream.num_taken if value is None else value.settled_end(self._text)
        )

    def _new_value(self, schema: JsonSchema, validator: Validator) -> _Value:
        parts = _Parts()
        incremental: Any = schema.full_validator(parts, validator)  # type: ignore[arg-type]
        return _Value(incremental, parts, [], deque([(0, self._stream.num_taken)]))

    @staticmethod
    def _end(value: _Value) -> int | None:
        """Validates a complete value. Returns the same as `push`."""
        num_valid = value.validator.end() if value.tokens else None
        return None if num_valid is None else value.tokens[min(num_valid, len(value.tokens) - 1)]

    def _push(self, text: str) -> int | None:
        value = self._value
        if value is None or not text:
            return None
        length, end = value.ends[-1]
        value.parts.parts.append(text.encode())
        value.tokens.append(min(bisect_right(self._ends, end), len(self._ends) - 1))
        value.ends.append((length + len(text), self._stream.num_taken))
        num_valid = value.validator.push(len(value.tokens) - 1)
        if num_valid is not None:
            return value.tokens[num_valid]
        self._settle()
        return None
