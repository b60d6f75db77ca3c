"""Masks computed by llguidance (Moskal et al., github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any, TypeVar

import numpy as np

from anydecode.constraints.background import (
    BackgroundTask,
    BackgroundThread,
    has_other_work,
    work_until,
)
from anydecode.constraints.byte_cache import (
    ByteCache,
    allocated_bytes,
    measured_bytes,
    resident_bytes,
)
from anydecode.constraints.compile_errors import compile_error
from anydecode.constraints.constraint import ConstraintState
from anydecode.constraints.optional_parts import check_grammar, check_pattern
from anydecode.constraints.patterns import patterns
from anydecode.errors import ConstraintError
from anydecode.models.tokenizer import Tokenizer

_Result = TypeVar("_Result")
#: Maximum size of the compiled grammars cached per tokenizer, in bytes.
MAX_TEMPLATE_BYTES = 128 << 20
#: A compiled grammar that has grown by more bytes than this in use is compiled again later.
MAX_TEMPLATE_GROWTH = 16 << 20
#: Where the system does not report what is allocated: the bytes of a compiled grammar per
#: character, and those by which a call of a matcher makes it grow.
_BYTES_PER_CHARACTER, _BYTES_PER_CALL = 256, 1024
#: The growth of a compiled grammar is measured over calls that take so many times as long as the
#: measurement, which is mostly two reports of what is allocated; over twice as many, up to so many
#: times, after each measurement in which it grew by at most so many bytes. At most so many are
#: measured at a time.
_CALLS_PER_MEASUREMENT, _MAX_PATIENCE, _SMALL_GROWTH, _MAX_MEASURED = 20, 32, 1 << 16, 16
#: A compiled grammar that seems to have grown by more than `_SUSPECT_GROWTH` bytes, in which what
#: others have allocated counts, is measured alone, in each of so many calls; texts that use it end
#: if it then grows by more than `MAX_GROWTH_IN_USE`.
MAX_GROWTH_IN_USE, _SUSPECT_GROWTH, _CALLS_ALONE = 128 << 20, 64 << 20, 1000
#: The limit if all together have grown by more than `MAX_TOTAL_GROWTH` bytes in such calls.
MAX_GROWTH_IN_COMPANY, MAX_TOTAL_GROWTH = 32 << 20, 512 << 20
#: The growth of one call counts up to so many bytes: more is what another thread has allocated.
_MAX_CALL_GROWTH = 4 << 20
#: One of so many calls is timed, for all of them.
_CALLS_PER_TIMED = 5
#: It is measured sooner if the process takes so many bytes more, which is checked after calls of so
#: many seconds.
_MAX_RESIDENT_GROWTH, _CHECK_SECONDS = 4 << 20, 0.05
#: Maximum number of references in one grammar or schema. Chains of some thousand of them overflow
#: the stack.
MAX_REFERENCES = 1000
#: Schemas whose largest integer is not above this cannot be compiled: as floats, numbers near it
#: are the smallest integer of 64 bits.
_SMALLEST_INTEGER = -(1 << 63) + 1024
#: The begin of a schema in a grammar in lark's notation.
_EMBEDDED_JSON = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()
#: Limits on the work of one mask and one compilation: the defaults of llguidance, with half the
#: lexer states, so that a hostile pattern fails within about a second.
_LIMITS = {"max_lexer_states": 125_000, "initial_lexer_fuel": 1_000_000, "step_max_items": 50_000}


#: Masks of a grammar of which one took so many seconds of processor time are computed on a thread
#: of their own, while the engine does other work. How long it took counts by this factor less after
#: each further one.
LONG_MASK_SECONDS, _MASK_SECONDS_KEPT = 0.005, 0.9999
#: Maximum number of tokens that are found to be forced at once: in a long constant, each takes up
#: to a millisecond.
_MAX_FORCED = 128


def library() -> Any:
    """The llguidance module, imported on first use."""
    import llguidance

    return llguidance


class _TokenizerAdapter:
    """Adapts a tokenizer to the interface that llguidance expects. It does not keep the tokenizer
    alive, of whose binding it is a part."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = weakref.ref(tokenizer)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [_bytes(tokenizer, token) for token in range(vocab_size)]
        self.special_token_ids = [
            token for token, data in enumerate(self.tokens) if data.startswith(b"\xff<")
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # states keep it
        return tokenizer.encode(text, special=False)


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return data or b"\xff<%d>" % token  # the prefix marks a special token


def check_references(text: str) -> None:
    """Raises `ConstraintError` if a grammar or schema has so many references that a chain of them
    could overflow the stack of the libraries that compile it."""
    num_references = text.count('"$ref"')
    if num_references > MAX_REFERENCES:
        raise ConstraintError(
            f"there are {num_references} references ($ref); at most {MAX_REFERENCES}"
        )


def _parts(grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar in llguidance's serialised form. Other text is a grammar in Lark's
    notation."""
    try:
        parts = json.loads(grammar)["grammars"]
    except (ValueError, TypeError, KeyError, RecursionError):
        parts = None
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        return parts
    return [{"lark_grammar": grammar}]


def _schemas(grammar: str) -> Iterator[Any]:
    """The JSON schemas in a grammar (in llguidance's serialised form)."""
    for part in _parts(grammar):
        yield part.get("json_schema")
        lark = part.get("lark_grammar") or ""
        for found in _EMBEDDED_JSON.finditer(lark):
            try:
                yield _DECODER.raw_decode(lark, found.end())[0]
            except (ValueError, RecursionError):  # llguidance reports it
                continue


def check_numbers(grammar: str) -> None:
    """Raises `ConstraintError` if a schema in a grammar (in llguidance's serialised form) allows
    only integers near or below the smallest of 64 bits, which llguidance cannot express: it would
    overflow the stack."""
    # With the keyword that allows the numbers in a node.
    stack = [(schema, "") for schema in _schemas(grammar)]
    while stack:
        node, keyword = stack.pop()
        if isinstance(node, list):
            stack += ((one, keyword) for one in node)
        elif isinstance(node, dict):
            for key, value in node.items():
                is_bound = key in ("maximum", "exclusiveMaximum")
                is_bound = is_bound and not isinstance(value, list | dict)
                stack.append((value, key if is_bound or key in ("const", "enum") else keyword))
        elif keyword and isinstance(node, int | float) and node <= _SMALLEST_INTEGER:
            raise ConstraintError(
                f"{keyword} {node}: integers must be above {_SMALLEST_INTEGER} to be enforced"
            )


def check_optional_parts(grammar: str) -> None:
    """Raises `ConstraintError` if too many parts of a pattern or terminal in a grammar (in
    llguidance's serialised form) may be left out: see `constraints.optional_parts`."""
    for schema in _schemas(grammar):
        for pattern in patterns(schema):
            check_pattern(pattern)
    for part in _parts(grammar):
        check_grammar(part.get("lark_grammar") or "")


class _Template:
    """A compiled grammar. Copies of its matcher share one lexer, whose tables grow as they read new
    texts, to at most `max_bytes` as long as the template is cached."""

    def __init__(self, grammar: str, matcher: Any, max_bytes: int) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.max_bytes = max_bytes
        #: Copies of a matcher wait for the lexer that they share, and keep the interpreter's lock.
        self.lock = threading.Lock()
        #: About how long a mask takes at most.
        self.mask_seconds = 0.0
        #: Whether its growth is measured now: since when so many bytes were allocated and resident,
        #: about how long the calls since then took, and after how long the growth is checked.
        self.is_measured, self.seconds, self.check_at = False, 0.0, 0.0
        #: By how much it seems to have grown; the number of calls in which it is still measured
        #: alone, by how much it has grown in such calls, the bytes that were allocated when these
        #: began, less that growth, and whether it has grown too much.
        self.growth = self.num_alone = self.growth_alone = self.allocated_before = 0
        self.is_too_large = False
        #: The number of calls until the next one that is timed.
        self.num_untimed = 0
        #: How many times longer the calls are that are measured together than after it grew.
        self.patience = 1
        self.allocated: int | None = None
        self.resident = 0

    @property
    def has_long_masks(self) -> bool:
        """Whether a mask may take so long that other work should not wait for it."""
        return self.mask_seconds > LONG_MASK_SECONDS

    def is_free(self, seconds: float) -> bool:
        """Waits at most so long until no matcher runs, and returns whether none does."""
        is_free = self.lock.acquire(timeout=seconds)
        if is_free:
            self.lock.release()
        return is_free


class TokenizerBinding:
    """One tokenizer in llguidance's representation, with a cache of grammars compiled for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        guidance = library()
        if not tokenizer.eos_ids:
            raise ConstraintError("constraints need a tokenizer with an end-of-text token")
        self.vocab_size = vocab_size
        self.eos_set = frozenset(tokenizer.eos_ids)
        self.eos_ids = np.array(sorted(self.eos_set), np.int64)
        self.tokenizer = guidance.LLTokenizer(
            _TokenizerAdapter(tokenizer, vocab_size),
            n_vocab=vocab_size,
            eos_token=self.eos_ids.tolist(),
            slices=guidance.LLTokenizer.json_slices(),
        )
        self.limits = guidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        self._templates: ByteCache[str, _Template] = ByteCache(MAX_TEMPLATE_BYTES)
        #: The templates that are measured now; how long the calls take after which one that has
        #: just grown is counted, and how long it took to begin to measure one, in seconds.
        self._measured: weakref.WeakSet[_Template] = weakref.WeakSet()
        self._interval = self._begin_seconds = 0.0
        self._lock = threading.Lock()
        #: All templates that states use, also those that are not cached any more.
        self._used: weakref.WeakValueDictionary[str, _Template] = weakref.WeakValueDictionary()

    def has_template(self, grammar: str) -> bool:
        """Whether `grammar` is compiled already."""
        return grammar in self._templates

    def clear(self) -> None:
        """Drops the compiled grammars."""
        self._templates.clear()
        self._used.clear()

    def drop(self, template: _Template) -> None:
        """Drops a compiled grammar, so that it is compiled anew for the next state."""
        if self._used.get(template.grammar) is template:
            self._templates.drop(template.grammar)
            self._used.pop(template.grammar, None)

    def call(
        self, template: _Template, method: Callable[..., _Result], *arguments: object
    ) -> _Result:
        """Calls a method of a matcher of `template`, and counts by how much the template grows.
        While another call runs, this thread does its other work.

        The system's report takes longer the more gaps its memory has. So calls that together take
        less than many times as long are measured together, with all that happens between them:
        memory that others have allocated is counted too. A lexer never shrinks, so if there is less
        memory, others have freed it. How much memory is resident is found quickly, but a lexer may
        grow into memory that others have freed. Most calls are so short that timing each of them
        would cost too much, so one in `_CALLS_PER_TIMED` is timed.
        """
        while not template.lock.acquire(False):
            work_until(template.is_free)
        try:
            if template.num_untimed:
                template.num_untimed -= 1
                return method(*arguments)
            return self._call_timed(template, method, *arguments)
        finally:
            template.lock.release()

    def _call_timed(
        self, template: _Template, method: Callable[..., _Result], *arguments: object
    ) -> _Result:
        """`call` of one in `_CALLS_PER_TIMED`."""
        if template.num_alone:
            return self._call_alone(template, method, *arguments)
        if not template.is_measured:
            self._begin(template)
        start = perf_counter()
        result = method(*arguments)
        template.seconds += _CALLS_PER_TIMED * (perf_counter() - start)
        template.num_untimed = _CALLS_PER_TIMED - 1
        if template.seconds >= template.check_at:
            self._check(template)
        return result

    def _call_alone(
        self, template: _Template, method: Callable[..., _Result], *arguments: object
    ) -> _Result:
        """`call` that measures by how much the process grows in this call alone.

        Other threads allocate and free memory in the same time. So a call counts up to
        `_MAX_CALL_GROWTH` bytes; what is freed counts twice, since a lexer frees nothing; and the
        growth that would be too much is at most what the process has allocated since then.
        """
        before = resident_bytes()
        result = method(*arguments)
        grown = resident_bytes() - before
        template.num_alone = _CALLS_ALONE if grown > _SMALL_GROWTH else template.num_alone - 1
        growth = template.growth_alone + (min(grown, _MAX_CALL_GROWTH) if grown > 0 else 2 * grown)
        total = sum(one.growth_alone for one in list(self._used.values()))
        limit = MAX_GROWTH_IN_COMPANY if total > MAX_TOTAL_GROWTH else MAX_GROWTH_IN_USE
        if growth > limit:
            growth = min(growth, (allocated_bytes() or 0) - template.allocated_before)
        template.growth_alone = max(0, growth)
        template.is_too_large |= growth > limit
        return result

    def _begin(self, template: _Template) -> None:
        """Begins to measure by how much `template` grows."""
        if len(self._measured) >= _MAX_MEASURED:
            self._count()
        start = thread_time()
        with self._lock:
            allocated = allocated_bytes()
            if not template.is_measured:
                template.is_measured, template.allocated, template.seconds = True, allocated, 0.0
                interval = self._interval * template.patience
                template.resident = resident_bytes() if interval > _CHECK_SECONDS else 0
                template.check_at = min(interval, _CHECK_SECONDS)
                self._measured.add(template)
            self._begin_seconds = thread_time() - start

    def _check(self, template: _Template) -> None:
        """Counts by how much `template` has grown, if it is time to."""
        interval = self._interval * template.patience
        if (
            template.seconds >= interval
            or resident_bytes() > template.resident + _MAX_RESIDENT_GROWTH
        ):
            self._count([template])
        else:
            template.check_at = min(interval, template.seconds + _CHECK_SECONDS)

    def _count(self, templates: Sequence[_Template] | None = None) -> None:
        """Counts by how much `templates` have grown, or all that are measured."""
        start = thread_time()
        with self._lock:
            now = allocated_bytes()
            for template in list(self._measured if templates is None else templates):
                if not template.is_measured:
                    continue
                before, template.is_measured, template.num_untimed = template.allocated, False, 0
                self._measured.discard(template)
                grown = _BYTES_PER_CALL if before is None or now is None else now - before
                is_small = grown <= _SMALL_GROWTH
                template.patience = min(2 * template.patience, _MAX_PATIENCE) if is_small else 1
                template.growth += max(0, grown)
                if template.growth > _SUSPECT_GROWTH and now is not None:
                    template.growth, template.num_alone = 0, _CALLS_ALONE
                    template.allocated_before = now - template.growth_alone
                if grown > 0:
                    self._templates.grow(template.grammar, template, grown, template.max_bytes)
            seconds = self._begin_seconds + thread_time() - start
            self._interval = _CALLS_PER_MEASUREMENT * seconds

    def template(self, grammar: str) -> _Template:
        """Returns `grammar`, which is compiled once. Raises `ConstraintError`."""
        template = self._templates.get(grammar) or self._used.get(grammar)
        if template is not None:
            return template
        check_references(grammar)
        check_numbers(grammar)
        check_optional_parts(grammar)
        self._count()
        allocated = allocated_bytes()
        matcher = library().LLMatcher(self.tokenizer, grammar, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise ConstraintError(compile_error(matcher.get_error()))
        # The states of a long constant at the start of the text are made for the first mask. It may
        # take the lexer, which all copies share, beyond its limits, which only the next copy says.
        bitmask = np.empty((self.vocab_size + 31) // 32, np.int32)
        for _ in range(2):
            copy = matcher.deep_copy()
            copy.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
            if copy.is_error():
                raise ConstraintError(compile_error(copy.get_error()))
        size = len(grammar) * (4 if allocated is not None else _BYTES_PER_CHARACTER)
        size = measured_bytes(allocated, size)
        template = _Template(grammar, matcher, size + MAX_TEMPLATE_GROWTH)
        self._used[grammar] = template
        self._templates.put(grammar, template, size)
        return template


_bindings: weakref.WeakKeyDictionary[Any, dict[int, TokenizerBinding]] = weakref.WeakKeyDictionary()
_bindings_lock = threading.Lock()
#: Held while a binding is made, so that nobody waits for that of another tokenizer.
_making_lock = threading.Lock()


def _renew_locks() -> None:
    """Called in a fork, which does not have the thread that would release a lock."""
    global _bindings_lock, _making_lock
    _bindings_lock, _making_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def tokenizer_binding(tokenizer: Tokenizer, vocab_size: int) -> TokenizerBinding:
    """Returns the binding of `tokenizer`, cached for the lifetime of the tokenizer.

    It is made on first use, for much of which llguidance holds the interpreter lock: about a
    quarter of a second for 50,000 tokens. Call this before requests are served.
    """
    binding = _known_binding(tokenizer, vocab_size)
    if binding is None:
        with _making_lock:
            binding = _known_binding(tokenizer, vocab_size)
            if binding is None:
                binding = TokenizerBinding(tokenizer, vocab_size)
                with _bindings_lock:
                    _bindings.setdefault(tokenizer, {})[vocab_size] = binding
    return binding


def _known_binding(tokenizer: Tokenizer, vocab_size: int) -> TokenizerBinding | None:
    with _bindings_lock:
        return _bindings.get(tokenizer, {}).get(vocab_size)


def clear_templates() -> None:
    """Drops the compiled grammars of all tokenizers."""
    with _bindings_lock:
        for bindings in _bindings.values():
            for binding in bindings.values():
                binding.clear()


_mask_thread = BackgroundThread("anydecode-mask")
_long_mask_thread = BackgroundThread("anydecode-long-mask")


def _is_over(seconds: float) -> bool:
    return True


class GuidanceState(ConstraintState):
    """The state of an llguidance matcher, shared by forks until one of them changes."""

    def __init__(
        self, binding: TokenizerBinding, template: _Template, matcher: Any, tokenizer: Tokenizer
    ) -> None:
        self._binding = binding
        self._tokenizer = tokenizer  # its binding ends with it
        self._template = template
        self._call = partial(binding.call, template)
        self._matcher = matcher
        self._shared = False
        self._num_eos = 0  # end-of-text tokens, which the matcher does not receive
        self._mask: np.ndarray | None = None
        self._pending_mask: BackgroundTask[np.ndarray] | None = None

    @classmethod
    def of(cls, grammar: str, tokenizer: Tokenizer, vocab_size: int) -> GuidanceState:
        """Returns the state before the first token of `grammar` (in llguidance's serialised form).

        Raises:
            ConstraintError: The grammar does not compile, or allows no first token.
        """
        binding = tokenizer_binding(tokenizer, vocab_size)
        template = binding.template(grammar)
        state = cls(binding, template, template.matcher.deep_copy(), tokenizer)
        state.origin = grammar
        if not state.mask().any():
            raise ConstraintError("the constraint cannot be met: it allows no first token")
        return state

    def mask(self) -> np.ndarray:
        pending, is_long = self._pending_mask, self._template.has_long_masks and has_other_work()
        if pending is None and self._mask is None:
            if is_long:
                self._own_matcher()
                pending = _long_mask_thread.submit(self._compute_mask)
            else:
                self._mask = self._compute_mask()
                work_until(_is_over)  # if many masks together have taken long
        elif pending is not None and not is_long:
            pending.run()  # if it has not begun: the masks before it may take long
        if pending is not None:
            work_until(pending.wait)
            self._mask, self._pending_mask = pending.result(), None
        assert self._mask is not None
        return self._mask

    def advance(self, token: int) -> None:
        if token in self._binding.eos_set:
            if not self.can_stop:
                raise ConstraintError("the text ends before the constraint is satisfied")
            self._num_eos += 1
            self._invalidate_mask()
            return
        if self._num_eos:
            raise ConstraintError("the text continues after its end-of-text token")
        matcher = self._own_matcher()
        self._invalidate_mask()
        if not self._call(matcher.try_consume_tokens, [token]):
            if matcher.is_error():
                self._binding.drop(self._template)
            raise ConstraintError(self._error() or f"token {token} is not allowed here")

    def rollback(self, count: int) -> None:
        num_eos = min(count, self._num_eos)
        self._num_eos -= num_eos
        if count > num_eos:
            matcher = self._own_matcher()
            if not self._call(matcher.rollback, count - num_eos):
                raise ConstraintError(f"cannot roll back {count} tokens: {self._error()}")
        self._invalidate_mask()

    def fork(self) -> GuidanceState:
        self._wait_for_mask()
        branch = GuidanceState(self._binding, self._template, self._matcher, self._tokenizer)
        branch._num_eos, branch._mask, branch.origin = self._num_eos, self._mask, self.origin
        branch._shared = self._shared = True
        return branch

    def forced_tokens(self) -> list[int]:
        if self._num_eos:
            return []
        self._wait_for_mask()
        if self.finished:
            return [int(self._binding.eos_ids[0])] if len(self._binding.eos_ids) == 1 else []
        if self._mask is None and not self._call(self._matcher.compute_ff_bytes):
            return []  # a forced token would imply a forced first byte
        forced: list[int] = []
        probe = self.fork()
        while len(forced) < _MAX_FORCED:
            tokens = np.flatnonzero(probe.mask())
            if len(tokens) != 1 or int(tokens[0]) in self._binding.eos_set:
                break
            token = int(tokens[0])
            forced.append(token)
            probe.advance(token)
        return forced

    @property
    def can_stop(self) -> bool:
        self._wait_for_mask()
        return bool(self._num_eos or self._call(self._matcher.is_accepting))

    @property
    def finished(self) -> bool:
        self._wait_for_mask()
        return bool(self._num_eos or (self._matcher.is_stopped() and not self._matcher.is_error()))

    def allows(self, token: int) -> bool:
        if self._mask is None and self._pending_mask is None and token not in self._binding.eos_set:
            if self._num_eos or self._call(self._matcher.validate_tokens, [token]) != 1:
                return False
            # Of text that must follow, the mask allows only the tokens in which the tokenizer
            # writes it, while the matcher accepts all.
            if not self._call(self._matcher.compute_ff_bytes):
                return True
        return bool(self.mask()[token])

    def allows_sequence(self, tokens: Sequence[int]) -> bool:
        self._wait_for_mask()
        if self._num_eos:
            return False
        return self._call(self._matcher.validate_tokens, list(tokens)) == len(tokens)

    def prepare(self) -> None:
        if self._mask is None and self._pending_mask is None and not self._num_eos:
            if self._template.has_long_masks:
                return  # those of other texts would wait for it
            self._own_matcher()
            self._pending_mask = _mask_thread.submit(self._compute_mask)

    def _wait_for_mask(self) -> None:
        """Waits for a pending mask: a matcher is used by one thread at a time."""
        if self._pending_mask is not None:
            self.mask()

    def _own_matcher(self) -> Any:
        self._wait_for_mask()
        if self._shared:
            self._matcher, self._shared = self._matcher.deep_copy(), False
        return self._matcher

    def _invalidate_mask(self) -> None:
        self._mask = None

    def _compute_mask(self) -> np.ndarray:
        size = self._binding.vocab_size
        if self._num_eos:
            allowed = np.zeros(size, bool)
            allowed[self._binding.eos_ids] = True
            return allowed
        bitmask = np.empty((size + 31) // 32, np.int32)
        self._call(self._fill, bitmask)
        if self._matcher.is_error():
            # The lexer, which the template shares, may have reached the limit on its states.
            self._binding.drop(self._template)
            raise ConstraintError(self._error())
        if self._template.is_too_large:
            self._binding.drop(self._template)
            raise ConstraintError(
                "the constraint takes too much memory for this text: more than"
                f" {MAX_GROWTH_IN_USE >> 20} MiB, or {MAX_GROWTH_IN_COMPANY >> 20} MiB beside"
                " others that take much: use fewer or shorter repetitions"
            )
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        return bits[:size].view(np.bool_)

    def _fill(self, bitmask: np.ndarray) -> None:
        start = thread_time()
        self._matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
        seconds, template = thread_time() - start, self._template
        template.mask_seconds = max(seconds, _MASK_SECONDS_KEPT * template.mask_seconds)

    def _error(self) -> str:
        return compile_error(self._matcher.get_error())
