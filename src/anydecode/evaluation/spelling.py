"""Other spellings of a JSON value: a mask fixes the order of properties and how numbers are
written, so a text that it refuses may say a value that it allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Values looked at before the search gives up.
_MOST = 2000


def spelling(state: ConstraintState, tokenizer: Tokenizer, value: Any) -> str | None:
    """A text of `value` that `state` allows: the properties in some order, whole numbers with or
    without ".0". None where none is found. `state` is moved about and comes back."""
    for text in _Speller(state, tokenizer).say(value):
        if state.may_stop:
            return text
    return None


class _Speller:
    """One state, led forth and back: between a generator's yields it stands behind what it said."""

    def __init__(self, state: ConstraintState, tokenizer: Tokenizer) -> None:
        self.state = state
        self.tokenizer = tokenizer
        self.left = _MOST

    def say(self, value: Any) -> Iterator[str]:
        """The spellings of a value."""
        self.left -= 1
        if self.left < 0:
            return
        if isinstance(value, dict):
            yield from self._behind("{", lambda: self._members(value, ""))
        elif isinstance(value, list):
            yield from self._behind("[", lambda: self._items(value, ""))
        else:
            for form in _forms(value):
                yield from self._behind(form)

    def _items(self, left: list[Any], comma: str) -> Iterator[str]:
        if not left:
            yield from self._behind("]")
            return
        for text in self._behind(comma, lambda: self.say(left[0])):
            for rest in self._items(left[1:], ", "):
                yield text + rest

    def _members(self, left: dict[str, Any], comma: str) -> Iterator[str]:
        if not left:
            yield from self._behind("}")
            return
        for said in self._behind(comma):
            possible = [name for name in left if self._can(_key(name))]
            doubtful = []
            for name in possible:
                for text in self._member(name, left[name]):
                    # What shuts out nothing that could come first may come first itself.
                    if all(self._can(", " + _key(one)) for one in possible if one != name):
                        for rest in self._members(_without(left, name), ", "):
                            yield said + text + rest
                        return
                    doubtful.append(name)
                    break
            for name in doubtful:
                for text in self._member(name, left[name]):
                    for rest in self._members(_without(left, name), ", "):
                        yield said + text + rest

    def _member(self, name: str, value: Any) -> Iterator[str]:
        return self._behind(_key(name), lambda: self.say(value))

    def _can(self, text: str) -> bool:
        return any(True for _ in self._behind(text))

    def _behind(self, text: str, more: Callable[[], Iterator[str]] | None = None) -> Iterator[str]:
        """`text` and what `more` says behind it, while the state stands there."""
        count = 0
        try:
            for token in self.tokenizer.encode(text, special=False):
                if not self.state.allows(token):
                    return
                self.state.advance(token)
                count += 1
            if more is None:
                yield text
            else:
                for rest in more():
                    yield text + rest
        except ConstraintError:
            return
        finally:
            if count:
                self.state.rollback(count)


def _without(left: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in left.items() if other != name}


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False) + ": "


def _forms(value: Any) -> list[str]:
    forms = [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, float) and value.is_integer():
        forms.append(str(int(value)))
    return forms
