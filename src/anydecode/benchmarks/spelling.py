"""Searches for another spelling of a JSON value that a constraint accepts. A mask fixes the order
of properties and the format of numbers, so it may refuse a text although it allows the same value
in another spelling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Calls for a value after which the search gives up.
_MAX_CALLS = 2000


def spelling(state: ConstraintState, tokenizer: Tokenizer, value: Any) -> str | None:
    """A text of `value` that `state` allows, with the properties in any order and whole numbers
    with or without ".0"; None if none is found. `state` is advanced and rolled back."""
    for text in _SpellingSearch(state, tokenizer).spellings(value):
        if state.can_stop:
            return text
    return None


class _SpellingSearch:
    """A depth-first search on one state: when a generator yields a text, the state has advanced
    past that text; when the generator resumes, the state is rolled back."""

    def __init__(self, state: ConstraintState, tokenizer: Tokenizer) -> None:
        self.state = state
        self.tokenizer = tokenizer
        self.remaining = _MAX_CALLS

    def spellings(self, value: Any) -> Iterator[str]:
        """Yield the spellings of `value` that the state allows."""
        self.remaining -= 1
        if self.remaining < 0:
            return
        if isinstance(value, dict):
            yield from self._after("{", lambda: self._members(value, ""))
        elif isinstance(value, list):
            yield from self._after("[", lambda: self._items(value, ""))
        else:
            for form in _forms(value):
                yield from self._after(form)

    def _items(self, remaining: list[Any], comma: str) -> Iterator[str]:
        if not remaining:
            yield from self._after("]")
            return
        for text in self._after(comma, lambda: self.spellings(remaining[0])):
            for rest in self._items(remaining[1:], ", "):
                yield text + rest

    def _members(self, remaining: dict[str, Any], comma: str) -> Iterator[str]:
        if not remaining:
            yield from self._after("}")
            return
        for separator in self._after(comma):
            allowed = [name for name in remaining if self._is_allowed(_key(name))]
            deferred = []
            for name in allowed:
                for text in self._member(name, remaining[name]):
                    # If all other properties are still allowed after this one, it can be first.
                    if all(self._is_allowed(", " + _key(one)) for one in allowed if one != name):
                        for rest in self._members(_without(remaining, name), ", "):
                            yield separator + text + rest
                        return
                    deferred.append(name)
                    break
            for name in deferred:
                for text in self._member(name, remaining[name]):
                    for rest in self._members(_without(remaining, name), ", "):
                        yield separator + text + rest

    def _member(self, name: str, value: Any) -> Iterator[str]:
        return self._after(_key(name), lambda: self.spellings(value))

    def _is_allowed(self, text: str) -> bool:
        return any(True for _ in self._after(text))

    def _after(
        self, text: str, continuation: Callable[[], Iterator[str]] | None = None
    ) -> Iterator[str]:
        """Yield `text` with each text of `continuation`, with the state advanced past them; nothing
        if the state refuses `text`."""
        count = 0
        try:
            for token in self.tokenizer.encode(text, special=False):
                if not self.state.allows(token):
                    return
                self.state.advance(token)
                count += 1
            if continuation is None:
                yield text
            else:
                for rest in continuation():
                    yield text + rest
        except ConstraintError:
            return
        finally:
            if count:
                self.state.rollback(count)


def _without(remaining: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in remaining.items() if key != name}


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def _forms(value: Any) -> list[str]:
    forms = [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, float) and value.is_integer():
        forms.append(str(int(value)))
    return forms
