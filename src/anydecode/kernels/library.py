"""ctypes bindings of the compiled kernels: structs, library loading, and functions of one row of
logits."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import warnings
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64
from ctypes import c_void_p as pointer
from pathlib import Path

import numpy as np

from anydecode.errors import InvalidRequestError, one_line
from anydecode.kernels import interface, portable
from anydecode.kernels.build import local_variants
from anydecode.kernels.host import has_torch
from anydecode.kernels.interface import FORMATS, OWN_FORMATS
from anydecode.kernels.library_cache import built_library

#: Format name -> its code in C (`enum Format`).
FORMAT_CODES = {name: code for code, name in enumerate((*FORMATS, *OWN_FORMATS))}


class Matrix(ctypes.Structure):
    """A packed matrix (see `cpu/layout.h`)."""

    _fields_ = [
        ("data", pointer),
        ("grid", pointer),
        ("group_bytes", c_int64),
        ("format", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("scale", c_float),
        *((name, pointer) for name in ("columns", "order")),
    ]


class Lora(ctypes.Structure):
    """One adapter's low-rank update of one matrix."""

    _fields_ = [("down", pointer), ("up", pointer), ("rank", c_int32), ("reserved", c_int32)]


class Routing(ctypes.Structure):
    """How experts are chosen and weighted, and their biases."""

    _fields_ = [
        *((name, pointer) for name in ("gate_bias", "up_bias", "down_bias", "selection_bias")),
        *((name, pointer) for name in ("factors", "token_experts")),
        *((name, c_int32) for name in ("normalise", "is_sigmoid", "num_groups", "groups_per_row")),
        ("scale", c_float),
        ("scores_per_group", c_int32),
        ("scales_inputs", c_int32),
        ("is_given", c_int32),
        ("is_plain", c_int32),
        ("jitter", c_float),
        *((name, c_int32) for name in ("block_experts", "is_root", "num_tokens", "num_identity")),
        ("by_logits", c_int32),
        ("output_factors", pointer),
        ("output_eps", c_float),
        *((name, c_int32) for name in ("logits_per_expert", "kind", "num_parts")),
    ]


class Recurrence(ctypes.Structure):
    """A convolution and a recurrence."""

    _fields_ = [
        *((name, pointer) for name in ("conv", "conv_bias", "decay", "step_bias", "skip")),
        *((name, pointer) for name in ("key_scale", "key_rate", "bonus", "norm", "norm_bias")),
        *((name, c_int32) for name in ("rule", "width", "window", "activation")),
        *((name, c_int32) for name in ("heads", "head_dim", "groups", "state_size", "num_gates")),
        ("min_step", c_float),
        ("max_step", c_float),
        ("norm_eps", c_float),
        ("max_strength", c_float),
        ("min_exponent", c_float),
        ("has_tiled_keys", c_int32),
    ]


class Op(ctypes.Structure):
    """One operation of a program."""

    _fields_ = [
        *((name, c_int32) for name in ("code", "barrier", "layer", "activation")),
        *((name, c_int64) for name in ("a", "b", "c", "out")),
        *((name, c_int32) for name in ("width", "width_out", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("groups", "window", "count", "value_dim", "is_latent")),
        *((name, c_int32) for name in ("chunk", "reach", "top_k", "index_dim")),
        *((name, c_int32) for name in ("block", "num_local", "has_block_keys")),
        *((name, c_int32) for name in ("entry", "selection")),
        ("x", c_float),
        ("y", c_float),
        ("matrix", pointer),
        ("weight", pointer),
        ("experts", pointer),
        ("routing", pointer),
        ("recurrence", pointer),
        ("slopes", pointer),
    ]


class Capture(ctypes.Structure):
    """Rows whose hidden states after `layer` layers are copied to `out`."""

    _fields_ = [
        ("layer", c_int32),
        ("count", c_int32),
        ("rows", pointer),
        ("out", pointer),
        ("stride", c_int64),
    ]


class Truncation(ctypes.Structure):
    """The tokens that a sampler keeps (`interface.Truncation`)."""

    _fields_ = [
        ("top_p", c_double),
        *((name, c_float) for name in ("divisor", "min_gap")),
        *((name, c_int32) for name in ("top_k", "reserved")),
    ]

    @classmethod
    def of(cls, rule: interface.Truncation) -> Truncation:
        """The rule as the kernels take it."""
        gap = float(portable.log(rule.min_p)) if rule.min_p else -np.inf
        return cls(rule.top_p, np.float32(rule.temperature), np.float32(gap), rule.top_k)


class SampleSpec(ctypes.Structure):
    """A token to sample within a pass; `token` receives it."""

    _fields_ = [
        ("inverse_temperature", c_double),
        ("seed", c_uint64),
        *((name, c_uint32) for name in ("position", "stream", "attempt")),
        *((name, c_int32) for name in ("row", "token", "reserved")),
        ("truncation", pointer),
    ]


class CopyText(ctypes.Structure):
    """A text that drafts are copied from, and the match in it."""

    _fields_ = [
        ("tokens", pointer),
        *((name, c_int64) for name in ("length", "position")),
        *((name, c_int32) for name in ("match", "num_outcomes")),
        *((name, pointer) for name in ("outcomes", "chances")),
    ]


class Drafter(ctypes.Structure):
    """A drafter that reads the target's states, in a multi-step pass."""

    _fields_ = [
        *((name, pointer) for name in ("pass_", "projection", "captures", "tokens", "states")),
        *((name, pointer) for name in ("chances", "mean_chances", "sibling_chances", "table")),
        *((name, c_double) for name in ("rate", "seconds")),
        *((name, c_int32) for name in ("num_captures", "num_depths", "max_drafts", "num_due")),
        *((name, c_int32) for name in ("num_known", "num_read")),
        *((name, pointer) for name in ("num_drafted", "num_unread", "draft_seconds")),
        *((name, pointer) for name in ("siblings", "num_siblings", "sibling_probabilities")),
    ]


class SequenceDrafts(ctypes.Structure):
    """What one sequence of a multi-step pass drafts from, and its drafts."""

    _fields_ = [
        ("texts", pointer),
        *((name, c_int32) for name in ("num_texts", "reserved")),
        *((name, pointer) for name in ("counts", "sources", "drafts", "probabilities")),
        ("weight", c_double),
    ]


class Drafting(ctypes.Structure):
    """Drafts of a multi-step pass, and the passes that it has run."""

    _fields_ = [
        *((name, pointer) for name in ("sequences", "costs", "drafter")),
        *((name, c_double) for name in ("min_gain", "min_probability")),
        *((name, c_int32) for name in ("max_drafts", "max_passes", "num_passes", "reserved")),
        ("seconds", pointer),
    ]


class Pass(ctypes.Structure):
    """The arguments of one pass."""

    _fields_ = [
        ("ops", pointer),
        *((name, c_int32) for name in ("num_prologue", "first", "last", "head", "num_ops")),
        *((name, c_int32) for name in ("num_rows", "num_logits", "num_captures", "num_layers")),
        *((name, c_int32) for name in ("head_size", "hidden_size", "embed", "cache_format")),
        *((name, c_int32) for name in ("num_slots", "num_tables", "num_adapters")),
        *(
            (name, c_int32)
            for name in ("num_targets", "num_samples", "num_steps", "num_end_tokens")
        ),
        *((name, pointer) for name in ("tokens", "positions", "slots", "table", "prefix")),
        *((name, pointer) for name in ("tails", "tail_start", "tail_length")),
        *((name, pointer) for name in ("adapters", "logit_rows")),
        *((name, pointer) for name in ("tables", "table_stride", "table_length")),
        ("num_tails", c_int64),
        *((name, pointer) for name in ("keys", "values", "inputs", "stream", "logits")),
        ("workspace", pointer),
        ("head_offset", c_int64),
        ("captures", pointer),
        ("loras", pointer),
        ("attention_scratch", pointer),
        ("attention_scratch_floats", c_int64),
        *((name, pointer) for name in ("samples", "multi_step_tokens", "step_counts")),
        *((name, pointer) for name in ("end_tokens", "interrupt", "step_probabilities")),
        *((name, pointer) for name in ("head_tokens", "spread")),
        *((name, pointer) for name in ("recurrent_inputs", "states", "scan_start", "scan_first")),
        *((name, pointer) for name in ("scan_slots", "scan_rows", "scan_saves")),
        *((name, c_int32) for name in ("num_runs", "scan_lead", "vocab_size", "carries_states")),
        ("team", c_int32),
        ("drafting", pointer),
        *((name, pointer) for name in ("step_limits", "min_probabilities")),
        *((name, pointer) for name in ("selected", "selected_rows", "expert_reads")),
    ]


_SIGNATURES = {
    "choose": (c_char_p, [c_char_p, POINTER(c_char_p)]),
    "size": (c_int64, [c_int]),
    "group_bytes": (c_int64, [c_int, c_int]),
    "attention_floats": (c_int64, [c_int, c_int]),
    "recurrence_floats": (c_int64, [c_int, c_int]),
    "repack": (None, [pointer, pointer, c_int64, c_int]),
    "linear": (None, [pointer, pointer, c_int, pointer, pointer, pointer]),
    "unpack_row": (None, [pointer, c_int, pointer]),
    "run": (c_int, [pointer, c_int]),
    "read": (c_uint64, [pointer, c_int64, c_int]),
    "processor_seconds": (c_double, []),
    "argmax": (c_int32, [pointer, c_int64]),
    "top_k": (None, [pointer, c_int64, c_int64, c_int, pointer, pointer]),
    "logsumexp": (c_double, [pointer, c_int64]),
    "exponentials": (c_double, [pointer, c_int64, pointer]),
    "gumbel": (None, [pointer, c_int64, pointer]),
    "sample_gumbel": (
        c_int32,
        [pointer, c_int64, c_double, c_uint64, c_uint32, c_uint32, c_uint32],
    ),
    "sample_truncated": (
        c_int32,
        [pointer, c_int64, pointer, c_uint64, c_uint32, c_uint32, c_uint32],
    ),
}


class Library:
    """The functions of one compiled library.

    Attributes:
        variant: The name of the variant in use.
        build: A digest of the file. Builds of other sources, or by another compiler, have another.
    """

    def __init__(self, path: Path, variant: str | None = None) -> None:
        self._handle = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._handle, f"anydecode_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        sizes = (ctypes.sizeof(Op), ctypes.sizeof(Pass))
        if (self.size(0), self.size(1)) != sizes:
            raise RuntimeError(f"{path} was built for another version of anydecode")
        self.variant = self._choose(variant)
        self.build = hashlib.sha256(path.read_bytes()).hexdigest()[:24]

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)

    def _choose(self, variant: str | None) -> str:
        failed = c_char_p()
        name = self.choose(variant.encode() if variant else None, ctypes.byref(failed))
        if failed.value:
            warnings.warn(
                f"the {failed.value.decode()} kernels give wrong results on this machine; "
                + (f"using the {name.decode()} ones" if name else "they were requested by name"),
                stacklevel=4,
            )
        if name is None:
            raise InvalidRequestError(
                f"ANYDECODE_VARIANT is {variant!r}, which this machine cannot run; allowed are"
                f" {', '.join((*local_variants(), 'scalar'))}, or nothing for the fastest"
            )
        return str(name.decode())


@functools.cache
def load_library() -> Library | None:
    """The kernels for this machine, or None, with a single warning, where there are none."""
    try:
        path = built_library()
    except (RuntimeError, OSError) as error:
        return _warn_missing(f"the native kernels could not be built: {one_line(error)}")
    if path is None:
        return _warn_missing("no C compiler was found (install one, or the ziglang package)")
    try:
        return Library(path, os.environ.get("ANYDECODE_VARIANT"))
    except (OSError, UnicodeDecodeError) as error:  # the system's message may be no text
        return _warn_missing(f"the native kernels could not be loaded: {one_line(error)}")


def _warn_missing(reason: str) -> Library | None:
    outcome = (
        "the slower torch kernels are used" if has_torch() else "torch is not installed either"
    )
    warnings.warn(f"{reason}; {outcome}", stacklevel=3)
    return None


def _row(logits: np.ndarray) -> tuple[int, int]:
    """Address and length of a contiguous float32 vector."""
    if logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise ValueError("logits must be contiguous float32")
    return logits.__array_interface__["data"][0], logits.size


def _library() -> Library:
    library = load_library()
    if library is None:
        raise RuntimeError("the native kernels are not available")
    return library


def argmax(logits: np.ndarray) -> int:
    """The index of the largest of float32 `[vocab_size]`, ties to the lowest."""
    return int(_library().argmax(*_row(logits)))


def top_k(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest logits of each row, in descending order.

    Args:
        logits: float32 `[rows, vocab_size]`.
        count: How many to return per row; limited to `vocab_size`.

    Returns:
        Token ids int32 and logits float32, both `[rows, min(count, vocab_size)]`. Among equal
        logits the lowest id comes first.
    """
    rows, size = logits.shape
    count = min(count, size)
    library = load_library()
    if library is None or logits.dtype != np.float32:
        order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
        return order.astype(np.int32), np.take_along_axis(logits, order, axis=1)
    ids, values = np.empty((rows, count), np.int32), np.empty((rows, count), np.float32)
    if ids.size:
        flat = np.ascontiguousarray(logits)
        library.top_k(flat.ctypes.data, rows, size, count, ids.ctypes.data, values.ctypes.data)
    return ids, values


def logsumexp(logits: np.ndarray) -> float:
    """log(sum(exp(logits))) of float32 `[vocab_size]`."""
    library = load_library()
    if library is not None:
        return float(library.logsumexp(*_row(logits)))
    highest = float(logits.max())
    if highest == -np.inf:
        return highest
    return highest + float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))


def exponentials(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """exp(score - max) of scores `[n]`, in their dtype, and the sum of these in float64.

    Called for one row at a time, so that the order of summation depends only on its length and not
    on the batch.
    """
    library = load_library()
    if library is None or scores.dtype != np.float32:
        weights = np.exp(scores - scores.max())
        return weights, float(weights.sum(dtype=np.float64))
    weights = np.empty(len(scores), np.float32)
    address, count = _row(np.ascontiguousarray(scores))
    return weights, float(library.exponentials(address, count, weights.ctypes.data))


def gumbel(uniform: np.ndarray) -> np.ndarray:
    """-log(-log(u)) of float64 numbers `[n]` strictly between 0 and 1: Gumbel noise."""
    library = load_library()
    if library is None:
        return -portable.log(-portable.log(uniform))
    numbers = np.ascontiguousarray(uniform)
    noise = np.empty_like(numbers)
    library.gumbel(numbers.ctypes.data, numbers.size, noise.ctypes.data)
    return noise


def sample_gumbel(
    logits: np.ndarray,
    inverse_temperature: float,
    seed: int,
    stream: int,
    position: int,
    attempt: int,
) -> int:
    """Sample a token: the argmax of logit * inverse_temperature + Gumbel noise.

    Ties go to the lowest id. The noise of token t is -log(-log((w + 0.5) / 2^32)) with w word `t &
    3` of Philox4x32-10 at key `seed` and counter (t >> 2, position, stream, attempt) (Salmon et
    al., 2011).

    Args:
        logits: float32 `[vocab_size]`.

    Raises:
        RuntimeError: The native kernels are not available.
    """
    address, count = _row(logits)
    return int(
        _library().sample_gumbel(
            address, count, inverse_temperature, seed & (2**64 - 1), stream, position, attempt
        )
    )


def sample_truncated(
    logits: np.ndarray,
    truncation: interface.Truncation,
    seed: int,
    stream: int,
    position: int,
    attempt: int,
) -> int | None:
    """Sample a token of those that `truncation` keeps: the argmax of score + Gumbel noise.

    The noise is that of `sample_gumbel`.

    Args:
        logits: float32 `[vocab_size]`.
        truncation: The temperature, and what is kept.

    Returns:
        The token; None where many tokens are kept, or where rounding might decide which ones.

    Raises:
        RuntimeError: The native kernels are not available.
    """
    address, count = _row(logits)
    rule = ctypes.byref(Truncation.of(truncation))
    noise = (seed & (2**64 - 1), stream, position, attempt)
    token = int(_library().sample_truncated(address, count, rule, *noise))
    return token if token >= 0 else None
