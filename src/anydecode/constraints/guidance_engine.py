"""Masks computed by llguidance (Moskal et al., github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

#: Compiled grammars kept per tokenizer.
MOST_TEMPLATES = 128
#: References in one grammar or schema. Chains of some thousand of them overflow the stack.
MAX_REFERENCES = 1000

#: Bounds on the work of one mask and one compilation; the defaults of llguidance, halved in states
#: so that a hostile pattern ends in an error within about a second.
_LIMITS = {"max_lexer_states": 125_000, "initial_lexer_fuel": 1_000_000, "step_max_items": 50_000}


def library() -> Any:
    """The llguidance module, imported with the first constraint."""
    import llguidance

    return llguidance


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [self._bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [
            token for token, content in enumerate(self.tokens) if content.startswith(b"\xff<")
        ]

    def _bytes(self, token: int) -> bytes:
        if token >= self._tokenizer.vocab_size:
            return b"\xff<%d>" % token
        content = self._tokenizer.token_bytes(token)
        return content or b"\xff<%d>" % token  # the prefix marks a special token

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._tokenizer.encode(text, special=False)


def check_references(text: str) -> None:
    """Raise `ConstraintError` for a grammar or schema with so many references that following a
    chain of them could exhaust the stack of the libraries that compile it."""
    count = text.count('"$ref"')
    if count > MAX_REFERENCES:
        raise ConstraintError(f"there are {count} references ($ref); at most {MAX_REFERENCES}")


class Bridge:
    """One tokenizer as llguidance knows it, with the grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        guidance = library()
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        self.vocab_size = vocab_size
        self.ends = frozenset(tokenizer.eos_ids)
        self.eos_ids = np.array(sorted(self.ends), np.int64)
        self.tokenizer = guidance.LLTokenizer(
            _Vocabulary(tokenizer, vocab_size),
            n_vocab=vocab_size,
            eos_token=self.eos_ids.tolist(),
            slices=guidance.LLTokenizer.json_slices(),
        )
        self.limits = guidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._templates: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> Any:
        """A fresh matcher of `grammar`; compiled once. Raises `ConstraintError`."""
        with self._lock:
            template = self._templates.get(grammar)
            if template is not None:
                self._templates.move_to_end(grammar)
                return template.deep_copy()
        check_references(grammar)
        template = library().LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        if template.is_error():
            raise ConstraintError(_refusal(template.get_error()))
        with self._lock:
            self._templates[grammar] = template
            if len(self._templates) > MOST_TEMPLATES:
                self._templates.popitem(last=False)
            return template.deep_copy()


_bridges: WeakKeyDictionary[Any, dict[int, Bridge]] = WeakKeyDictionary()
_bridges_lock = threading.Lock()


def bridge(tokenizer: Tokenizer, vocab_size: int) -> Bridge:
    """The bridge of `tokenizer`, built when first asked for and kept as long as it lives."""
    with _bridges_lock:
        known = _bridges.setdefault(tokenizer, {})
        if vocab_size not in known:
            known[vocab_size] = Bridge(tokenizer, vocab_size)
        return known[vocab_size]


def one_line(error: object) -> str:
    """An engine's message without its line breaks, at most 300 characters."""
    return " ".join(str(error).split())[:300]


def _refusal(error: object) -> str:
    """An engine's reason not to compile a grammar."""
    said = one_line(error)
    if "too many expressions" in said or "too big" in said:
        return (
            "the constraint is too large to be compiled: make the repetitions in its patterns"
            " smaller or its alternatives fewer"
        )
    return said


class _Ahead:
    """A mask that the mask thread computes. Plainer than a `Future`, whose locks cost more than
    most masks do."""

    def __init__(self, compute: Callable[[], np.ndarray]) -> None:
        self._compute = compute
        self._done = threading.Lock()
        self._done.acquire()
        self._mask: np.ndarray | None = None
        self._error: BaseException | None = None
        _waiting().put(self)

    def run(self) -> None:
        """On the mask thread."""
        try:
            self._mask = self._compute()
        except BaseException as error:
            self._error = error
        self._done.release()

    def result(self) -> np.ndarray:
        """The mask, once it is there."""
        with self._done:
            pass
        if self._error is not None:
            raise self._error
        assert self._mask is not None
        return self._mask


_queue: SimpleQueue[_Ahead] | None = None


def _waiting() -> SimpleQueue[_Ahead]:
    """What the mask thread has to do; the thread starts when first asked for."""
    global _queue
    if _queue is None:
        _queue = SimpleQueue()
        threading.Thread(target=_work, args=(_queue,), name="anydecode-mask", daemon=True).start()
    return _queue


def _work(queue: SimpleQueue[_Ahead]) -> None:
    while True:
        queue.get().run()


class GuidanceState(ConstraintState):
    """A matcher, shared by forks until one of them moves."""

    def __init__(self, bridge: Bridge, matcher: Any) -> None:
        self._bridge = bridge
        self._matcher = matcher
        self._shared = False
        self._ends = 0  # end-of-text tokens told; the matcher never sees them
        self._mask: np.ndarray | None = None
        self._ahead: _Ahead | None = None

    @classmethod
    def of(cls, grammar: str, tokenizer: Tokenizer, vocab_size: int) -> GuidanceState:
        """The start of `grammar` (llguidance's own notation). Raises `ConstraintError`."""
        known = bridge(tokenizer, vocab_size)
        state = cls(known, known.matcher(grammar))
        state.origin = grammar
        if not state.mask().any():
            raise ConstraintError("the constraint cannot be met: it allows no first token")
        return state

    def mask(self) -> np.ndarray:
        if self._ahead is not None:
            self._mask, self._ahead = self._ahead.result(), None
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def advance(self, token: int) -> None:
        if token in self._bridge.ends:
            if not self.may_stop:
                raise ConstraintError("the text ends before the constraint is met")
            self._ends += 1
            self._moved()
            return
        if self._ends:
            raise ConstraintError("the text goes on behind its end")
        matcher = self._own()
        self._moved()
        if not matcher.try_consume_tokens([token]):
            raise ConstraintError(self._error() or f"token {token} is not allowed here")

    def rollback(self, count: int) -> None:
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            matcher = self._own()
            if not matcher.rollback(count - ends):
                raise ConstraintError(f"cannot take back {count} tokens: {self._error()}")
        self._moved()

    def fork(self) -> GuidanceState:
        self._settle()
        branch = GuidanceState(self._bridge, self._matcher)
        branch._ends, branch._mask, branch.origin = self._ends, self._mask, self.origin
        branch._shared = self._shared = True
        return branch

    def forced(self) -> list[int]:
        if self._ends:
            return []
        self._settle()
        if self.finished:
            return [int(self._bridge.eos_ids[0])] if len(self._bridge.eos_ids) == 1 else []
        if self._mask is None and not self._matcher.compute_ff_bytes():
            return []  # a single token would force its first byte
        found: list[int] = []
        probe = self.fork()
        while True:
            tokens = np.flatnonzero(probe.mask())
            if len(tokens) != 1 or int(tokens[0]) in self._bridge.ends:
                return found
            token = int(tokens[0])
            found.append(token)
            probe.advance(token)

    @property
    def may_stop(self) -> bool:
        self._settle()
        return bool(self._ends or self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        self._settle()
        return bool(self._ends or (self._matcher.is_stopped() and not self._matcher.is_error()))

    def allows(self, token: int) -> bool:
        if self._mask is None and self._ahead is None and token not in self._bridge.ends:
            return not self._ends and self._matcher.validate_tokens([token]) == 1
        return bool(self.mask()[token])

    def follows(self, tokens: Sequence[int]) -> bool:
        self._settle()
        return not self._ends and self._matcher.validate_tokens(list(tokens)) == len(tokens)

    def prepare(self) -> None:
        if self._mask is None and self._ahead is None and not self._ends:
            self._own()
            self._ahead = _Ahead(self._compute)

    def _settle(self) -> None:
        """Wait for a mask under way: a matcher serves one thread at a time."""
        if self._ahead is not None:
            self.mask()

    def _own(self) -> Any:
        self._settle()
        if self._shared:
            self._matcher, self._shared = self._matcher.deep_copy(), False
        return self._matcher

    def _moved(self) -> None:
        self._mask = None

    def _compute(self) -> np.ndarray:
        size = self._bridge.vocab_size
        if self._ends:
            allowed = np.zeros(size, bool)
            allowed[self._bridge.eos_ids] = True
            return allowed
        words = np.empty((size + 31) // 32, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise ConstraintError(self._error())
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits[:size].view(np.bool_)

    def _error(self) -> str:
        told = _refusal(self._matcher.get_error())
        if "NoExtensionBias" in told:  # the engine's word for a grammar without a text
            return "the constraint cannot be met: it allows no text"
        return told
