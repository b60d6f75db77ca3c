"""What a sequence keeps across a restart, beside its tokens: typed entries, one namespace per
owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


@dataclass(frozen=True)
class StateKey(Generic[Value]):
    """The name of an entry of `Sequence.state`, typed by its value: `StateKey[int]("mine", "n")`.

    Args:
        owner: The namespace: the key of the method, or the part of the engine, that writes it.
        name: The name of the entry within the namespace.
    """

    owner: str
    name: str


class SequenceState:
    """The entries of one sequence. Values are plain data, since a sequence may be continued in
    another process, but for what is lost there (`decoders.framework.speculation.carried`)."""

    def __init__(self) -> None:
        self._entries: dict[StateKey[Any], Any] = {}

    def __getitem__(self, key: StateKey[Value]) -> Value:
        value: Value = self._entries[key]
        return value

    def __setitem__(self, key: StateKey[Value], value: Value) -> None:
        self._entries[key] = value

    def __contains__(self, key: StateKey[Any]) -> bool:
        return key in self._entries

    @overload
    def get(self, key: StateKey[Value]) -> Value | None: ...

    @overload
    def get(self, key: StateKey[Value], default: Value) -> Value: ...

    def get(self, key: StateKey[Value], default: Value | None = None) -> Value | None:
        """The entry, or `default` if there is none."""
        return self._entries.get(key, default)

    def setdefault(self, key: StateKey[Value], default: Value) -> Value:
        """The entry; set to `default` first if there is none."""
        value: Value = self._entries.setdefault(key, default)
        return value

    def discard(self, key: StateKey[Any]) -> None:
        """Remove the entry, if there is one."""
        self._entries.pop(key, None)

    def update(self, other: SequenceState) -> None:
        """Set the entries of `other` here too."""
        self._entries.update(other._entries)
