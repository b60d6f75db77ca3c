"""Narrowed forms of one value, for an answer whose text before this value has been sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anydecode.constraints.constraint import CompletionHints, ConstraintReport, ConstraintState
from anydecode.constraints.guidance_engine import GuidanceState
from anydecode.constraints.json.checking import IncrementalJsonValidator, Validator
from anydecode.constraints.json.forced_completion import CompletedConstraint
from anydecode.constraints.json.held_values import local_pointer
from anydecode.constraints.languages import Grammar
from anydecode.models.tokenizer import Tokenizer

_DEFINITIONS = ("$schema", "$defs", "definitions")


class NarrowedValue(CompletedConstraint):
    """Allows what `whole` allows, and behind `prefix` only values under a schema of their own.

    Args:
        whole: The constraint of the answer, which has been started.
        prefix: The text of the answer before the value.
        rules: Returns the rules `value`, of the value, and `REST`, of what may follow, for a
            tokenizer and the width of the logits. Raises `ConstraintError` if there are none.
    """

    def __init__(
        self,
        whole: CompletedConstraint,
        prefix: str,
        rules: Callable[[Tokenizer, int], Sequence[str]],
    ) -> None:
        self.whole = whole
        self.prefix = prefix
        self.rules = rules
        self.finish = whole.finish

    @property
    def completion_hints(self) -> CompletionHints:
        return self.whole.completion_hints

    def report(self) -> ConstraintReport:
        return self.whole.report()

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> ConstraintState:
        start = f"start: {json.dumps(self.prefix, ensure_ascii=False)} value REST?"
        rules = (start, *self.rules(tokenizer, vocab_size))
        grammar = Grammar("\n".join(rules)).guidance()
        return _BothStates(
            self.whole.start(tokenizer, vocab_size),
            GuidanceState.of(grammar, tokenizer, vocab_size),
        )


def json_value_rules(value: str, *, is_whole: bool = False) -> list[str]:
    """The rules of `NarrowedValue` for a value that is written as JSON.

    Args:
        value: An expression of the value.
        is_whole: Whether it is a whole JSON text, and not in another value.
    """
    rest = "REST: /(?s:.+)/" if is_whole else r"REST: /[\]},\s](?s:.*)/"
    return [f"value: {value}", rest]


class _Bytes:
    """A tokenizer whose tokens are bytes, for validators of texts."""

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return bytes([token])


def value_schema(validator: Validator, prefix: str) -> Any:
    """The schema of the value that follows `prefix`, the start of an answer that `validator`
    validates."""
    scanner = IncrementalJsonValidator(validator, _Bytes())  # type: ignore[arg-type]
    for byte in prefix.encode():
        scanner.push(byte)
    pointers = scanner.next_pointers()
    schemas = [validator.node(pointer) for pointer in sorted(_independent(validator, pointers))]
    schemas = [schema for schema in schemas if isinstance(schema, dict)]
    definitions = {
        key: validator.value_schema[key] for key in _DEFINITIONS if key in validator.value_schema
    }
    return {**schemas[0], **definitions} if len(schemas) == 1 else {"allOf": schemas, **definitions}


def _independent(validator: Validator, pointers: frozenset[str]) -> frozenset[str]:
    """Those of `pointers` that no other of them contains or refers to; all if there are none."""
    dependent: set[str] = set()
    for pointer in pointers:
        node = validator.node(pointer)
        if isinstance(node, dict):
            dependent |= {f"{pointer}/allOf/{i}" for i in range(len(node.get("allOf", ())))}
            dependent |= {local_pointer(node.get("$ref")) or pointer} - {pointer}
    return pointers - dependent or pointers


class _BothStates(ConstraintState):
    """The state of a text that two constraints must allow."""

    def __init__(self, first: ConstraintState, second: ConstraintState) -> None:
        self._first = first
        self._second = second
        self.origin = (first.origin, second.origin)

    def mask(self) -> np.ndarray | None:
        first, second = self._first.mask(), self._second.mask()
        if first is None or second is None:
            return second if first is None else first
        both: np.ndarray = first & second
        return both

    def allows(self, token: int) -> bool:
        return self._first.allows(token) and self._second.allows(token)

    def advance(self, token: int) -> None:
        self._first.advance(token)
        self._second.advance(token)

    def rollback(self, count: int) -> None:
        self._first.rollback(count)
        self._second.rollback(count)

    def fork(self) -> _BothStates:
        return _BothStates(self._first.fork(), self._second.fork())

    def forced_tokens(self) -> list[int]:
        forced = self._first.forced_tokens()
        return forced if self.finished or self._second.allows_sequence(forced) else []

    @property
    def can_stop(self) -> bool:
        return self._first.can_stop and self._second.can_stop

    @property
    def finished(self) -> bool:
        return self._first.finished and self._second.can_stop

    def prepare(self) -> None:
        self._first.prepare()
        self._second.prepare()
