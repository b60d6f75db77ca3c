"""Monitor-guided decoding (Agrawal et al., "Guiding Language Models of Code with Global Context
using Monitors", arXiv:2306.10763): behind a dot, Python code names what the object really has.

A static analysis (jedi) is asked whenever the text ends with a dot behind an expression. What it
completes is what may follow, until a token ends the name; everywhere else the text is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.constraints.constraint import Constraint, ConstraintState, Report
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.errors import ConstraintError, MissingPackageError
from anydecode.models.tokenizer import Tokenizer

#: Texts whose completions are remembered per request.
_REMEMBERED = 4096
_DEREFERENCED = re.compile(rb"[\w\x80-\xff)\]}\"']\.\Z")
_BEGUN = re.compile(rb"(?<=[\w\x80-\xff)\]}\"'])\.([A-Za-z_\x80-\xff][\w\x80-\xff]*)\Z")
_NAME_BEHIND_DOT = re.compile(rb"\.[A-Za-z_\x80-\xff]")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}

#: From a text that ends with a dot to the names that may follow; empty where nothing is known.
Completions = Callable[[str], Iterable[str]]


@register(
    Card(
        "monitors",
        "constraint",
        paper="Guiding Language Models of Code with Global Context using Monitors"
        " (arXiv:2306.10763)",
        exactness="lossy",
        summary="Python code names only what exists: static analysis (jedi) guides names behind"
        " dots.",
        needs=("jedi",),
        works_with=("speculation", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "called lossy because it is a constraint: plain decoding under it is what other"
            " decoders equal",
            "the monitor for dereferences only, of the paper's several, and Python through jedi",
            "the text keeps to the names whatever its tokens: a token that would carry a name over"
            " a dot is forbidden, where the original leaves it unwatched",
            "it asks only behind a name, a closing bracket or a quote, and not in comments",
        ),
    )
)
class Monitor(Constraint):
    """`code` is what stands before the answer: the prompt, where nothing else is said. `path` is
    the file it belongs to, for imports from its neighbours. `completions` replaces jedi."""

    reads_files = True

    def __init__(
        self,
        code: str = "",
        path: str | Path | None = None,
        completions: Completions | None = None,
    ) -> None:
        self.code = code
        self.path = path
        self.completions = completions

    def of_prompt(self, prompt: str) -> Monitor:
        return self if self.code else Monitor(prompt, self.path, self.completions)

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> MonitorState:
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        complete = self.completions or jedi_completions(self.path)
        judge = _Judge(complete, _words(tokenizer, vocab_size))
        text = self.code.encode()
        position = _Position(text, judge.open(text), None)
        return MonitorState(judge, position, (self.code, self.path))

    def report(self) -> Report:
        return Report("monitor", "jedi" if self.completions is None else "python", ("names",))


@dataclass(frozen=True)
class _Position:
    """The text so far and what may still stand behind its last dot (None: anything)."""

    text: bytes
    rest: tuple[bytes, ...] | None
    before: _Position | None
    ended: bool = False


class MonitorState(ConstraintState):
    """Idle, or within a name; every token is a place that can be gone back to."""

    def __init__(self, judge: _Judge, position: _Position, origin: Hashable) -> None:
        self._judge = judge
        self._position = position
        self._mask: np.ndarray | None = None
        self.origin = origin

    def mask(self) -> np.ndarray:
        if self._mask is None:
            words, position = self._judge.words, self._position
            if position.ended:
                allowed = np.zeros(words.size, bool)
            elif position.rest is None:
                allowed = words.idle.copy()
            else:
                allowed = words.names(position.rest)
            allowed[words.eos_ids] = self.may_stop
            self._mask = allowed
        return self._mask

    def advance(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError(f"token {token} is not allowed here")
        position = self._position
        if token in self._judge.words.eos_ids:
            self._position = _Position(position.text, position.rest, position, ended=True)
        else:
            piece = self._judge.words.pieces[token]
            text = position.text + piece
            rest = position.rest
            left = tuple(name[len(piece) :] for name in rest or () if name.startswith(piece))
            self._position = _Position(text, left or self._judge.open(text), position)
        self._mask = None

    def rollback(self, count: int) -> None:
        position: _Position | None = self._position
        for _ in range(count):
            position = position.before if position is not None else None
        if position is None:
            raise ConstraintError(f"cannot take back {count} tokens")
        self._position, self._mask = position, None

    def fork(self) -> MonitorState:
        branch = MonitorState(self._judge, self._position, self.origin)
        branch._mask = self._mask
        return branch

    def forced(self) -> list[int]:
        return []

    @property
    def may_stop(self) -> bool:
        position = self._position
        return position.ended or position.rest is None or b"" in position.rest

    @property
    def finished(self) -> bool:
        return self._position.ended


class _Judge:
    """What may follow a text."""

    def __init__(self, complete: Completions, words: _Words) -> None:
        self.words = words
        self._names = lru_cache(_REMEMBERED)(
            lambda text: tuple(sorted({name.encode() for name in complete(text)}))
        )

    def open(self, text: bytes) -> tuple[bytes, ...] | None:
        """Endings of the name that `text` is in the middle of; None where it is free."""
        begun = _BEGUN.search(text[-256:])
        said = begun.group(1) if begun else b""
        if not said and not _DEREFERENCED.search(text[-2:]):
            return None
        names = self._names(text[: len(text) - len(said)].decode(errors="replace"))
        return tuple(name[len(said) :] for name in names if name.startswith(said)) or None


class _Words:
    """Which of a tokenizer's tokens can stand where."""

    def __init__(self, words: Vocabulary, eos_ids: Iterable[int]) -> None:
        self._words = words
        self.size, self.pieces = words.size, words.pieces
        self.eos_ids = sorted(eos_ids)
        self.idle = np.array(
            [bool(piece) and not _NAME_BEHIND_DOT.search(piece) for piece in words.pieces]
        )
        self._ends = self.idle & np.array([_ends_name(piece) for piece in words.pieces])

    def names(self, rest: tuple[bytes, ...]) -> np.ndarray:
        """Tokens that go on with one of the names `rest`, or end it."""
        allowed = np.zeros(self.size, bool)
        for begun in {name[:length] for name in rest for length in range(1, len(name) + 1)}:
            allowed[list(self._words.spelling(begun))] = True
        for name in rest:
            if not name:
                allowed |= self._ends
                continue
            for token in self._words.beginning(name):
                behind = self.pieces[token][len(name) :]
                if _ends_name(behind) and not _NAME_BEHIND_DOT.search(behind):
                    allowed[token] = True
        return allowed


def _ends_name(piece: bytes) -> bool:
    """Whether `piece` cannot lengthen a name that stands before it."""
    return bool(piece) and piece[0] < 0x80 and not (piece[:1].isalnum() or piece[:1] == b"_")


_known: WeakKeyDictionary[Vocabulary, _Words] = WeakKeyDictionary()


def _words(tokenizer: Tokenizer, size: int) -> _Words:
    own = vocabulary(tokenizer, size)
    if own not in _known:
        _known[own] = _Words(own, tokenizer.eos_ids)
    return _known[own]


def jedi_completions(path: str | Path | None = None) -> Completions:
    """Names by static analysis, with and without the brackets closed that are open. Code is read,
    never run. Raises `MissingPackageError`."""
    try:
        import jedi
        import parso
        from jedi.api.environment import InterpreterEnvironment
    except ImportError:
        raise MissingPackageError("monitors", "jedi", "'anydecode[monitors]'") from None
    environment = InterpreterEnvironment()

    def complete(text: str) -> set[str]:
        lines = text.split("\n")
        position = len(lines), len(lines[-1])
        tree = parso.parse(text)  # type: ignore[no-untyped-call]
        if _in_comment(tree, position):
            return set()
        names: set[str] = set()
        for code in dict.fromkeys((text, text + _closing(tree))):
            try:
                found = jedi.Script(code, path=path, environment=environment).complete(*position)
            except Exception:  # code half written is more than it can always take
                continue
            names |= {one.name for one in found if one.type not in ("keyword", "path")}
        return names

    return complete


def _in_comment(tree: Any, position: tuple[int, int]) -> bool:
    leaf = tree.get_leaf_for_position(position, include_prefixes=True)
    if leaf is None or leaf.start_pos < position:
        return False
    return "#" in leaf.prefix.rpartition("\n")[2]


def _closing(tree: Any) -> str:
    """The brackets that are open at the end of the code, closed."""
    opened: list[str] = []
    leaf = tree.get_first_leaf()
    while leaf is not None:
        if leaf.value in _BRACKETS:
            opened.append(_BRACKETS[leaf.value])
        elif opened and leaf.value == opened[-1]:
            opened.pop()
        leaf = leaf.get_next_leaf()
    return "".join(reversed(opened))
