"""Monitor-guided decoding (Agrawal et al., "Guiding Language Models of Code with Global Context
using Monitors", arXiv:2306.10763): after a dot, only existing attributes are allowed.

Whenever the text ends with a dot after an expression, static analysis (jedi) lists the names that
may follow. Only those are allowed until a token ends the name; everywhere else the text is free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.constraints.background import BackgroundTask, BackgroundThread
from anydecode.constraints.byte_cache import byte_cached
from anydecode.constraints.constraint import Constraint, ConstraintReport, ConstraintState
from anydecode.constraints.vocabulary import Vocabulary, vocabulary
from anydecode.errors import ConstraintError, MissingPackageError
from anydecode.models.tokenizer import Tokenizer

#: Maximum size of the texts whose completions are cached per request, in bytes.
_MAX_CACHED_BYTES = 16 << 20
_AFTER_DOT = re.compile(rb"[\w\x80-\xff)\]}\"']\.\Z")
_PARTIAL_NAME = re.compile(rb"(?<=[\w\x80-\xff)\]}\"'])\.([A-Za-z_\x80-\xff][\w\x80-\xff]*)\Z")
_NAME_AFTER_DOT = re.compile(rb"\.[A-Za-z_\x80-\xff]")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}

#: Maps a text that ends with a dot to the names that may follow; empty if unknown.
Completions = Callable[[str], Iterable[str]]
_Suffixes: TypeAlias = "tuple[bytes, ...] | None"
_analysis_thread = BackgroundThread("anydecode-analysis")


@register(
    Card(
        "monitors",
        "constraint",
        paper="Guiding Language Models of Code with Global Context using Monitors"
        " (arXiv:2306.10763)",
        exactness="lossy",
        summary="Python code uses existing attributes only: static analysis (jedi) constrains the"
        " names after dots.",
        needs=("jedi",),
        works_with=("speculation", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "listed as lossy because it is a constraint; other decoders generate the same tokens as"
            " plain decoding under it",
            "only the paper's monitor for dereferences, and only for Python, with jedi",
            "names are enforced for every tokenization: a token that contains a dot followed by a"
            " name is forbidden; the original does not check it",
            "the analysis runs only after a name, a closing bracket or a quote, not in comments",
        ),
    )
)
class Monitor(Constraint):
    """Allows only existing names after dots in Python code.

    Args:
        code: The code before the answer; the prompt if empty.
        path: The file that the code belongs to, to resolve relative imports.
        completions: Replaces jedi.
    """

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

    def for_prompt(self, prompt: str) -> Monitor:
        return self if self.code else Monitor(prompt, self.path, self.completions)

    def start(self, tokenizer: Tokenizer, vocab_size: int) -> MonitorState:
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        complete = self.completions or jedi_completions(self.path)
        completer = _NameCompleter(complete, _token_sets(tokenizer, vocab_size))
        text = self.code.encode()
        position = _Position(text, completer.name_suffixes(text), None)
        return MonitorState(completer, position, (self.code, self.path))

    def report(self) -> ConstraintReport:
        return ConstraintReport(
            "monitor", "jedi" if self.completions is None else "python", ("names",)
        )


@dataclass(frozen=True)
class _Position:
    """The text so far, and the allowed rests of the name after its last dot (None: anything), which
    may still be computed."""

    text: bytes
    known_suffixes: _Suffixes | BackgroundTask[_Suffixes]
    previous: _Position | None
    ended: bool = False

    @property
    def suffixes(self) -> _Suffixes:
        """The allowed rests of the name. Waits for the analysis."""
        known = self.known_suffixes
        return known.result() if isinstance(known, BackgroundTask) else known


class MonitorState(ConstraintState):
    """Free text, or inside a name. Keeps the position after every token, for rollbacks."""

    def __init__(self, completer: _NameCompleter, position: _Position, origin: Hashable) -> None:
        self._completer = completer
        self._position = position
        self._mask: np.ndarray | None = None
        self.origin = origin

    def mask(self) -> np.ndarray:
        if self._mask is None:
            token_sets, position = self._completer.token_sets, self._position
            if position.ended:
                allowed = np.zeros(token_sets.size, bool)
            elif position.suffixes is None:
                allowed = token_sets.free_tokens.copy()
            else:
                allowed = token_sets.name_tokens(position.suffixes)
            allowed[token_sets.eos_ids] = self.can_stop
            self._mask = allowed
        return self._mask

    def advance(self, token: int) -> None:
        if not self.allows(token):
            raise ConstraintError(f"token {token} is not allowed here")
        position = self._position
        if token in self._completer.token_sets.eos_ids:
            self._position = _Position(position.text, position.known_suffixes, position, ended=True)
        else:
            data = self._completer.token_sets.token_bytes[token]
            text = position.text + data
            remaining = tuple(
                name[len(data) :] for name in position.suffixes or () if name.startswith(data)
            )
            self._position = _Position(
                text, remaining or self._completer.name_suffixes(text), position
            )
        self._mask = None

    def rollback(self, count: int) -> None:
        position: _Position | None = self._position
        for _ in range(count):
            position = position.previous if position is not None else None
        if position is None:
            raise ConstraintError(f"cannot roll back {count} tokens")
        self._position, self._mask = position, None

    def fork(self) -> MonitorState:
        branch = MonitorState(self._completer, self._position, self.origin)
        branch._mask = self._mask
        return branch

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def can_stop(self) -> bool:
        position = self._position
        return position.ended or position.suffixes is None or b"" in position.suffixes

    @property
    def finished(self) -> bool:
        return self._position.ended


class _NameCompleter:
    """Computes the names that may follow a text, with a cache."""

    def __init__(self, complete: Completions, token_sets: _TokenSets) -> None:
        self.token_sets = token_sets
        self._names = byte_cached(_MAX_CACHED_BYTES)(
            lambda text: tuple(sorted({name.encode() for name in complete(text)}))
        )

    def name_suffixes(self, text: bytes) -> BackgroundTask[_Suffixes] | None:
        """The allowed rests of the name that `text` ends in, computed on the thread of the
        analysis; None if the text is free."""
        partial = _PARTIAL_NAME.search(text[-256:])
        typed = partial.group(1) if partial else b""
        if not typed and not _AFTER_DOT.search(text[-2:]):
            return None
        before = text[: len(text) - len(typed)].decode(errors="replace")
        return _analysis_thread.submit(lambda: self._suffixes(before, typed))

    def _suffixes(self, before: str, typed: bytes) -> _Suffixes:
        names = self._names(before)
        return tuple(name[len(typed) :] for name in names if name.startswith(typed)) or None


class _TokenSets:
    """Sets of a tokenizer's tokens: those of free text, and those inside and after names."""

    def __init__(self, vocab: Vocabulary, eos_ids: Iterable[int]) -> None:
        self._vocabulary = vocab
        self.size, self.token_bytes = vocab.size, vocab.token_bytes
        self.eos_ids = sorted(eos_ids)
        self.free_tokens = np.array(
            [bool(data) and not _NAME_AFTER_DOT.search(data) for data in vocab.token_bytes]
        )
        self._ends = self.free_tokens & np.array([_ends_name(data) for data in vocab.token_bytes])

    def name_tokens(self, suffixes: tuple[bytes, ...]) -> np.ndarray:
        """Boolean `[size]`: the tokens that continue one of the names `suffixes`, or end it."""
        allowed = np.zeros(self.size, bool)
        for partial in {name[:length] for name in suffixes for length in range(1, len(name) + 1)}:
            allowed[list(self._vocabulary.tokens_equal_to(partial))] = True
        for name in suffixes:
            if not name:
                allowed |= self._ends
                continue
            for token in self._vocabulary.tokens_with_prefix(name):
                after_name = self.token_bytes[token][len(name) :]
                if _ends_name(after_name) and not _NAME_AFTER_DOT.search(after_name):
                    allowed[token] = True
        return allowed


def _ends_name(data: bytes) -> bool:
    """Whether `data` ends a name before it."""
    return bool(data) and data[0] < 0x80 and not (data[:1].isalnum() or data[:1] == b"_")


_token_sets_by_vocabulary: WeakKeyDictionary[Vocabulary, _TokenSets] = WeakKeyDictionary()


def _token_sets(tokenizer: Tokenizer, size: int) -> _TokenSets:
    vocab = vocabulary(tokenizer, size)
    if vocab not in _token_sets_by_vocabulary:
        _token_sets_by_vocabulary[vocab] = _TokenSets(vocab, tokenizer.eos_ids)
    return _token_sets_by_vocabulary[vocab]


def jedi_completions(path: str | Path | None = None) -> Completions:
    """Names by static analysis with jedi, with open brackets left open and with them closed.

    The code is analysed, never executed.

    Raises:
        MissingPackageError: jedi is not installed.
    """
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
        for code in dict.fromkeys((text, text + _closing_brackets(tree))):
            try:
                completions = jedi.Script(code, path=path, environment=environment).complete(
                    *position
                )
            except Exception:  # jedi fails on some incomplete code
                continue
            names |= {
                completion.name
                for completion in completions
                if completion.type not in ("keyword", "path")
            }
        return names

    return complete


def _in_comment(tree: Any, position: tuple[int, int]) -> bool:
    leaf = tree.get_leaf_for_position(position, include_prefixes=True)
    if leaf is None or leaf.start_pos < position:
        return False
    return "#" in leaf.prefix.rpartition("\n")[2]


def _closing_brackets(tree: Any) -> str:
    """The closing brackets of those that are open at the end of the code."""
    closing: list[str] = []
    leaf = tree.get_first_leaf()
    while leaf is not None:
        if leaf.value in _BRACKETS:
            closing.append(_BRACKETS[leaf.value])
        elif closing and leaf.value == closing[-1]:
            closing.pop()
        leaf = leaf.get_next_leaf()
    return "".join(reversed(closing))
