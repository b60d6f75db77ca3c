"""Masks computed by xgrammar (Dong et al., arXiv:2411.15100), behind the same protocol."""

from __future__ import annotations

import json
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.guidance_engine import one_line
from anydecode.constraints.patterns import patterns
from anydecode.errors import ConstraintError, MissingPackageError
from anydecode.models.tokenizer import Tokenizer


class _Compiler:
    """One tokenizer as xgrammar knows it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise MissingPackageError("engine='xgrammar'", "xgrammar", "xgrammar") from None
        own = min(vocab_size, tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(token) for token in range(own)]
        self.library = xgrammar
        self.eos_ids = sorted(tokenizer.eos_ids)
        self.vocab_size = vocab_size
        self.forbidden = np.array(
            [token for token, piece in enumerate(pieces) if not piece]
            + list(range(own, vocab_size)),
            np.int64,
        )
        info = xgrammar.TokenizerInfo(
            pieces,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=self.eos_ids,
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)


#: Most characters of all patterns of a constraint: the time xgrammar takes grows with their square.
_MAX_PATTERNS = 40_000
_compilers: WeakKeyDictionary[Any, dict[int, _Compiler]] = WeakKeyDictionary()
_lock = threading.Lock()


class XGrammarState(ConstraintState):
    """A matcher, copied when a branch moves."""

    def __init__(self, compiler: _Compiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._shared = False
        self._ends = 0
        self._mask: np.ndarray | None = None

    @classmethod
    def of(cls, kind: str, text: Any, tokenizer: Tokenizer, vocab_size: int) -> XGrammarState:
        """The start of a grammar. `kind` is "regex", "grammar" or "json"."""
        length = sum(map(len, [text] if kind == "regex" else patterns(text)))
        if length > _MAX_PATTERNS:
            raise ConstraintError(
                f"the patterns have {length} characters; engine='xgrammar' compiles at most"
                f" {_MAX_PATTERNS}: shorten them, or use engine='llguidance'"
            )
        with _lock:
            known = _compilers.setdefault(tokenizer, {})
            if vocab_size not in known:
                known[vocab_size] = _Compiler(tokenizer, vocab_size)
            compiler = known[vocab_size]
        try:
            compiled = _compile(compiler.compiler, kind, text)
        except Exception as error:  # the library raises RuntimeError and its own kinds
            raise ConstraintError(f"xgrammar: {one_line(error)}") from None
        state = cls(compiler, compiler.library.GrammarMatcher(compiled))
        state.origin = (kind, json.dumps(text))
        if not state.mask().any():
            raise ConstraintError("the constraint cannot be met: it allows no first token")
        return state

    def mask(self) -> np.ndarray:
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def advance(self, token: int) -> None:
        if token in self._compiler.eos_ids:
            if not self.may_stop:
                raise ConstraintError("the text ends before the constraint is met")
            self._ends += 1
        elif self._ends:
            raise ConstraintError("the text goes on behind its end")
        elif not self._own().accept_token(token):
            raise ConstraintError(f"token {token} is not allowed here")
        self._mask = None

    def rollback(self, count: int) -> None:
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            self._own().rollback(count - ends)
        self._mask = None

    def fork(self) -> XGrammarState:
        branch = XGrammarState(self._compiler, self._matcher)
        branch._ends, branch._mask, branch.origin = self._ends, self._mask, self.origin
        branch._shared = self._shared = True
        return branch

    def forced(self) -> list[int]:
        found: list[int] = []
        probe = self.fork()
        while not probe._ends:
            tokens = np.flatnonzero(probe.mask())
            if len(tokens) != 1:
                break
            found.append(int(tokens[0]))
            probe.advance(found[-1])
        return found

    @property
    def may_stop(self) -> bool:
        return bool(self._ends or self._matcher.is_completed())

    @property
    def finished(self) -> bool:
        return bool(self._ends) or set(np.flatnonzero(self.mask())) <= set(self._compiler.eos_ids)

    def _own(self) -> Any:
        if self._shared:
            self._matcher, self._shared = self._matcher.fork(), False
        return self._matcher

    def _compute(self) -> np.ndarray:
        compiler = self._compiler
        allowed = np.zeros(compiler.vocab_size, bool)
        if not self._ends:
            words = torch.full((1, (compiler.vocab_size + 31) // 32), -1, dtype=torch.int32)
            self._matcher.fill_next_token_bitmask(words)
            bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
            allowed[:] = bits[: compiler.vocab_size]
            allowed[compiler.forbidden] = False
        allowed[compiler.eos_ids] = self.may_stop
        return allowed


def _compile(compiler: Any, kind: str, text: Any) -> Any:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    return compiler.compile_json_schema(json.dumps(text), strict_mode=False)
