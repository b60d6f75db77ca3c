"""Masks computed by xgrammar (Dong et al., arXiv:2411.15100), with the same interface."""

from __future__ import annotations

import json
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.guidance_engine import MAX_TEMPLATE_BYTES
from anydecode.constraints.patterns import patterns
from anydecode.errors import ConstraintError, MissingPackageError, one_line
from anydecode.models.tokenizer import Tokenizer


class _Compiler:
    """One tokenizer in xgrammar's representation, with its grammar compiler."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise MissingPackageError(
                "engine='xgrammar'", "xgrammar", "'anydecode[xgrammar]'"
            ) from None
        num_tokens = min(vocab_size, tokenizer.vocab_size)
        token_bytes = [tokenizer.token_bytes(token) for token in range(num_tokens)]
        self.library = xgrammar
        self.eos_ids = sorted(tokenizer.eos_ids)
        self.vocab_size = vocab_size
        self.forbidden = np.array(
            [token for token, data in enumerate(token_bytes) if not data]
            + list(range(num_tokens, vocab_size)),
            np.int64,
        )
        info = xgrammar.TokenizerInfo(
            token_bytes,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=self.eos_ids,
        )
        self.compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=MAX_TEMPLATE_BYTES
        )


#: Maximum length of all patterns of a constraint, in characters: xgrammar's compile time grows with
#: its square.
_MAX_PATTERN_CHARACTERS = 40_000
_compilers: WeakKeyDictionary[Any, dict[int, _Compiler]] = WeakKeyDictionary()
_lock = threading.Lock()


class XGrammarState(ConstraintState):
    """The state of an xgrammar matcher, copied when a fork changes."""

    def __init__(self, compiler: _Compiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._shared = False
        self._num_eos = 0
        self._mask: np.ndarray | None = None

    @classmethod
    def of(cls, kind: str, text: Any, tokenizer: Tokenizer, vocab_size: int) -> XGrammarState:
        """Returns the state before the first token. `kind` is "regex", "grammar" or "json".

        Raises:
            ConstraintError: The constraint does not compile, or allows no first token.
        """
        length = sum(map(len, [text] if kind == "regex" else patterns(text)))
        if length > _MAX_PATTERN_CHARACTERS:
            raise ConstraintError(
                f"the patterns have {length} characters; engine='xgrammar' compiles at most"
                f" {_MAX_PATTERN_CHARACTERS}: shorten them, or use engine='llguidance'"
            )
        with _lock:
            by_size = _compilers.setdefault(tokenizer, {})
            if vocab_size not in by_size:
                by_size[vocab_size] = _Compiler(tokenizer, vocab_size)
            compiler = by_size[vocab_size]
        try:
            compiled = _compile(compiler.compiler, kind, text)
        except Exception as error:  # the library raises RuntimeError and its own types
            raise ConstraintError(f"xgrammar: {one_line(error)}") from None
        state = cls(compiler, compiler.library.GrammarMatcher(compiled))
        state.origin = (kind, json.dumps(text))
        if not state.mask().any():
            raise ConstraintError("the constraint cannot be met: it allows no first token")
        return state

    def mask(self) -> np.ndarray:
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def advance(self, token: int) -> None:
        if token in self._compiler.eos_ids:
            if not self.can_stop:
                raise ConstraintError("the text ends before the constraint is satisfied")
            self._num_eos += 1
        elif self._num_eos:
            raise ConstraintError("the text continues after its end-of-text token")
        elif not self._own_matcher().accept_token(token):
            raise ConstraintError(f"token {token} is not allowed here")
        self._mask = None

    def rollback(self, count: int) -> None:
        num_eos = min(count, self._num_eos)
        self._num_eos -= num_eos
        if count > num_eos:
            self._own_matcher().rollback(count - num_eos)
        self._mask = None

    def fork(self) -> XGrammarState:
        branch = XGrammarState(self._compiler, self._matcher)
        branch._num_eos, branch._mask, branch.origin = self._num_eos, self._mask, self.origin
        branch._shared = self._shared = True
        return branch

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        probe = self.fork()
        while not probe._num_eos:
            tokens = np.flatnonzero(probe.mask())
            if len(tokens) != 1:
                break
            forced.append(int(tokens[0]))
            probe.advance(forced[-1])
        return forced

    @property
    def can_stop(self) -> bool:
        return bool(self._num_eos or self._matcher.is_completed())

    @property
    def finished(self) -> bool:
        return bool(self._num_eos) or set(np.flatnonzero(self.mask())) <= set(
            self._compiler.eos_ids
        )

    def _own_matcher(self) -> Any:
        if self._shared:
            self._matcher, self._shared = self._matcher.fork(), False
        return self._matcher

    def _compute_mask(self) -> np.ndarray:
        compiler = self._compiler
        allowed = np.zeros(compiler.vocab_size, bool)
        if not self._num_eos:
            bitmask = np.full((1, (compiler.vocab_size + 31) // 32), -1, np.int32)
            self._matcher.fill_next_token_bitmask(bitmask)
            bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
            allowed[:] = bits[: compiler.vocab_size]
            allowed[compiler.forbidden] = False
        allowed[compiler.eos_ids] = self.can_stop
        return allowed


def _compile(compiler: Any, kind: str, text: Any) -> Any:
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    return compiler.compile_json_schema(json.dumps(text), strict_mode=False)
