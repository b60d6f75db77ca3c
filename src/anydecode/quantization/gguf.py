"""Writes a GGUF file, or a folder that is read as one, with its matrices in another format.

The metadata and the names of tensors stay, so that every program that reads the source reads the
result. Vectors, routers, convolutions, tables of positions and the matrices of gates of recurrent
layers stay as they are stored. Where the format has fewer than six bits per weight, the embedding
and the head are written in Q6_K.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels import ptq161
from anydecode.kernels.formats import BLOCKS, DTYPES, dequantize, plain_weight, row_bytes
from anydecode.kernels.interface import Weight
from anydecode.models.loading.gguf_file import FORMAT_CODES, INTEGER_CODES, GGUFFile, TensorInfo
from anydecode.models.loading.gguf_names import is_own_vector
from anydecode.quantization import encoders, grid_encoders
from anydecode.quantization.mixes import MIXES, mixed_formats

#: The formats that can be written, and their codes in `general.file_type`.
FORMATS = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_K": 16, "Q5_1": 9, "Q5_0": 8,
    "Q4_K": 14, "Q3_K": 11, "Q2_K": 10, "Q4_1": 3, "Q4_0": 2, "IQ4_NL": 25, "IQ4_XS": 30,
    "MXFP4": 38, "NVFP4": 39, "TQ2_0": 37, "TQ1_0": 36, "IQ3_S": 26, "IQ3_XXS": 23, "IQ2_S": 28,
    "IQ2_XS": 20, "IQ2_XXS": 19, "IQ1_M": 31, "IQ1_S": 24,
}  # fmt: skip
_OUTER = ("token_embd.weight", "output.weight")
#: Parts of the names of matrices that stay: they are small, or not read as matrices.
_KEPT = (
    "norm", "ffn_gate_inp", "position_embd", "token_types", "conv", "ssm_a", "ssm_b", "ssm_dt",
    "ssm_x", "laurel", "per_layer_model_proj", "altup_router", "altup_predict_coef",
    "altup_correct_coef", "time_mix_lerp",
    "time_mix_w", "time_mix_a", "time_mix_g", "time_mix_v0", "time_mix_v1", "time_mix_v2",
    "hc_", "compressor_ape", "tid2eid", "cls.",
)  # fmt: skip
#: Formats with larger blocks -> what is written where a row is no multiple of that.
_SMALL_BLOCKS = {
    "Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "IQ4_NL", "Q2_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL", "NVFP4": "IQ4_NL", "TQ2_0": "Q4_0", "TQ1_0": "Q4_0",
    **dict.fromkeys(grid_encoders.FORMATS, "IQ4_NL"),
}  # fmt: skip
_FACTORS = (".scale", ".input_scale")
_GROUP_VALUES = 1 << 18  # values that are encoded at once

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Summary:
    """What was written."""

    path: str
    format: str
    num_bytes: int
    source_bytes: int
    bits_per_weight: float  # of all tensors
    formats: dict[str, int]  # format -> number of tensors
    error: float  # the root of the squared error of encoded weights over their squares


def quantize_file(
    source: Path | GGUFFile,
    target: Path,
    format: str,
    *,
    overwrite: bool = False,
    threads: int = 1,
    progress: Progress = lambda done, total, name: None,
    given: Mapping[str, Weight] | None = None,
    importance: Mapping[str, np.ndarray] = MappingProxyType({}),
    keep_packed: bool = False,
) -> Summary:
    """Write the model of a GGUF file to another one in another format.

    Args:
        source: The file, or any part of a split model; or the opened file.
        target: The new file, which is complete or not there.
        format: One of `FORMATS` or `MIXES`, in either case.
        overwrite: Whether the target may exist.
        threads: Number of threads.
        progress: Called with the bytes written, those in all, and the name of a tensor.
        given: Tensors that are quantised already, by name.
        importance: The importance of the inputs of matrices, by the name of the tensor:
            float32 `[in_features]`, `[experts, in_features]` or, as older files have it,
            `[experts * in_features]`. Matrices without one are rounded as without an importance
            matrix.
        keep_packed: Whether matrices that are packed, in a format of GGUF and in no more bits per
            weight than in theirs of the new file, stay as they are.

    Raises:
        InvalidRequestError: The format is unknown, the target cannot be written, or an importance
            has the wrong shape.
        CheckpointError: The source is damaged, or has values that the format cannot hold.
    """
    format = format.upper()
    base = _base(format)
    check_target(source.path if isinstance(source, GGUFFile) else source, target, overwrite)
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    architecture = str(file.metadata.get("general.architecture"))
    factors = [
        name
        for name in file.tensors
        if name.endswith(_FACTORS) and not is_own_vector(architecture, name)
    ]
    if factors:
        raise CheckpointError(
            f"{file.path}: {factors[0]!r} is a factor of a quantised weight; use a file whose"
            " weights have no factors of their own"
        )
    check_source(file)
    importance = {
        name: _fitting(file, file.tensors[name], vector)
        for name, vector in importance.items()
        if name in file.tensors
    }
    mixed = mixed_formats(format, file.tensors, file.metadata) if format in MIXES else {}
    plan = {
        info.name: _planned(info, mixed.get(info.name, base), keep_packed)
        for info in file.tensors.values()
    }
    errors = _Errors()
    stored = _stored(file, given or {}, plan, errors)
    header, offsets, size = _header(file, plan, format)
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise InvalidRequestError(
            f"{target}: needs {size / 1e9:.2f} GB; the disk has {free / 1e9:.2f} GB free"
        )
    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as out, ThreadPoolExecutor(threads) as pool:
            out.write(header)
            for name, planned in plan.items():
                out.write(b"\0" * (len(header) + offsets[name] - out.tell()))
                parts: Iterable[bytes] = (
                    [stored[name].tobytes()]
                    if name in stored
                    else _encoded(
                        file,
                        file.tensors[name],
                        planned,
                        pool,
                        threads,
                        errors,
                        importance.get(name),
                    )
                )
                for data in parts:
                    out.write(data)
                    progress(out.tell(), size, name)
        os.replace(part, target)
    except OSError as error:
        raise InvalidRequestError(f"{target}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    num_weights = sum(math.prod(info.shape) for info in file.tensors.values())
    return Summary(
        path=str(target),
        format=format,
        num_bytes=size,
        source_bytes=sum(info.num_bytes for info in file.tensors.values()),
        bits_per_weight=8 * (size - len(header)) / num_weights,
        formats=dict(Counter(info.format for info in plan.values())),
        error=errors.relative(),
    )


def reads_importance(format: str) -> bool:
    """Whether an importance matrix changes what is written in a format or mixture.

    Raises:
        InvalidRequestError: The format is unknown.
    """
    return _base(format.upper()) in encoders.WEIGHED


def _base(format: str) -> str:
    """The format of most matrices of a format or mixture."""
    if format in MIXES:
        return MIXES[format].base
    if format in FORMATS:
        return format
    allowed = ", ".join(name.lower() for name in (*FORMATS, *MIXES))
    raise InvalidRequestError(f"unknown format {format.lower()!r}; choose from {allowed}")


def _fitting(file: GGUFFile, info: TensorInfo, vector: np.ndarray) -> np.ndarray:
    """The importance of the inputs of a tensor, `[in_features]` or `[experts, in_features]`."""
    allowed = (*info.shape[:-2], info.shape[-1])
    if vector.shape == allowed[-1:]:
        return vector
    if vector.size != math.prod(allowed):
        raise InvalidRequestError(
            f"the importance matrix has {list(vector.shape)} numbers for {info.name!r} of"
            f" {file.path}; allowed are {list(allowed)}: is it that of another model?"
        )
    return vector.reshape(allowed)


def check_source(file: GGUFFile) -> None:
    """Raise CheckpointError for a file that was quantised by PTQ1.61."""
    if any(info.format == ptq161.FORMAT for info in file.tensors.values()):
        raise CheckpointError(
            f"{file.path}: is in {ptq161.FORMAT}; use the file from which it was made"
        )


def _stored(
    file: GGUFFile, given: Mapping[str, Weight], plan: dict[str, TensorInfo], errors: _Errors
) -> dict[str, np.ndarray]:
    """The data of quantised tensors by name, after they were added to the plan."""
    stored: dict[str, np.ndarray] = {}
    for name, weight in given.items():
        info = file.tensors[name]
        plan[name] = replace(info, format=weight.format, num_bytes=weight.data.nbytes)
        stored[name] = weight.data
        tensor = file.view(info)
        values = dequantize(tensor if isinstance(tensor, Weight) else plain_weight(tensor)).ravel()
        difference = dequantize(weight).ravel() - values
        errors.add(float(difference @ difference), float(values @ values))
        if weight.columns is not None:
            columns = f"{name.removesuffix('.weight')}.columns"
            size = weight.columns.nbytes
            plan[columns] = TensorInfo(columns, "BF16", weight.columns.shape, 0, size)
            stored[columns] = weight.columns
    return stored


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raise InvalidRequestError if `target` is no name of a new file."""
    if target.suffix != ".gguf":
        raise InvalidRequestError(f"{target}: the new file must be called NAME.gguf")
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise InvalidRequestError(f"{target}: {what}; give the path of a new file")
    if target.exists() and target.samefile(source):
        raise InvalidRequestError(f"{target}: is the model itself; give the path of a new file")
    if target.exists() and not overwrite:
        raise InvalidRequestError(f"{target}: exists; --force replaces it")


def is_written(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix that is written in another format."""
    is_matrix = len(shape) >= 2 and name.endswith(".weight")
    return is_matrix and not any(part in name for part in _KEPT)


def _planned(info: TensorInfo, format: str, keep_packed: bool) -> TensorInfo:
    """The tensor in the format in which it is written."""
    if not is_written(info.name, info.shape):
        return info
    values, size = BLOCKS[format]
    if info.name in _OUTER and 8 * size < 6 * values:
        format = "Q6_K"
    if info.shape[-1] % BLOCKS[format][0]:
        format = _SMALL_BLOCKS.get(format, format)
    if info.shape[-1] % BLOCKS[format][0]:
        format = "F16"
    num_bytes = math.prod(info.shape[:-1]) * row_bytes(format, info.shape[-1])
    is_packed = info.format in FORMATS and info.format not in DTYPES
    if keep_packed and is_packed and info.num_bytes <= num_bytes:
        return info
    return replace(info, format=format, num_bytes=num_bytes)


def _header(
    file: GGUFFile, plan: dict[str, TensorInfo], format: str
) -> tuple[bytes, dict[str, int], int]:
    """The header, the offsets of tensors after it, and the size of the file."""
    entries = {key: file.entry(key) for key in file.metadata if not key.startswith("split.")}
    for key, number in (
        ("general.file_type", MIXES[format].code if format in MIXES else FORMATS[format]),
        ("general.quantization_version", 2),
    ):
        entries[key] = entry(key, number)
    return header_of(entries, plan, file.metadata.get("general.alignment", 32))


Value = str | bytes | bool | int | float | list[bool] | list[int] | list[float] | list[str]


def entry(key: str, value: Value) -> bytes:
    """The key and the value of one of the metadata as a file stores them."""
    match value:
        case bool():
            stored = struct.pack("<I?", 7, value)
        case int():
            stored = struct.pack("<II", 4, value)
        case float():
            stored = struct.pack("<If", 6, value)
        case str():
            stored = struct.pack("<I", 8) + _string(value)
        case bytes():
            stored = struct.pack("<IIQ", 9, 0, len(value)) + value
        case [str(), *_] | []:  # empty ones are merges
            texts = b"".join(_string(str(text)) for text in value)
            stored = struct.pack("<IIQ", 9, 8, len(value)) + texts
        case [bool(), *_]:
            stored = struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case [float(), *_]:
            stored = struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case _:
            stored = struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return _string(key) + stored


def header_of(
    entries: Mapping[str, bytes], plan: Mapping[str, TensorInfo], alignment: int = 32
) -> tuple[bytes, dict[str, int], int]:
    """The header of a file, the offsets of tensors after it, and the size of the file.

    Args:
        entries: The metadata as stored, by key.
        plan: The tensors by name; their offsets are not read.
        alignment: `general.alignment`, in bytes.
    """
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(plan), len(entries)), *entries.values()]
    offsets, position = {}, 0
    codes = {name: code for code, name in (FORMAT_CODES | INTEGER_CODES).items()}
    for name, info in plan.items():
        position = -(-position // alignment) * alignment
        offsets[name] = position
        shape = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
        parts += [_string(name), shape, struct.pack("<IQ", codes[info.format], position)]
        position += info.num_bytes
    header = b"".join(parts)
    header += b"\0" * (-len(header) % alignment)
    return header, offsets, len(header) + position


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class _Errors:
    """The sums of squared errors and of squares of encoded weights."""

    def __init__(self) -> None:
        self._errors = self._squares = 0.0

    def add(self, errors: float, squares: float) -> None:
        self._errors += errors
        self._squares += squares

    def relative(self) -> float:
        return math.sqrt(self._errors / self._squares) if self._squares else 0.0


def _encoded(
    file: GGUFFile,
    info: TensorInfo,
    planned: TensorInfo,
    pool: ThreadPoolExecutor,
    threads: int,
    errors: _Errors,
    importance: np.ndarray | None,
) -> Iterator[bytes]:
    """The bytes of a tensor in its new format, part by part."""
    tensor = file.view(info)
    if planned.format == info.format:
        yield (tensor.data if isinstance(tensor, Weight) else tensor).tobytes()
        return
    columns = info.shape[-1]
    weight = tensor if isinstance(tensor, Weight) else plain_weight(tensor.reshape(-1, columns))
    step = max(1, _GROUP_VALUES // columns)
    if importance is not None and importance.ndim == 2:  # of the experts of a stack
        importance = importance.repeat(info.shape[-2], axis=0)

    def encode(first: int) -> tuple[bytes, float, float]:
        rows = weight.data[first : first + step]
        values = dequantize(replace(weight, out_features=len(rows), data=rows))
        if planned.format in DTYPES:
            with np.errstate(over="ignore"):
                written = plain_weight(values.astype(DTYPES[planned.format]))
        else:
            weights = importance
            if importance is not None and importance.ndim == 2:
                weights = importance[first : first + step]
            data = encoders.encode(values, planned.format, weights)
            written = Weight(planned.format, len(rows), columns, data)
        with np.errstate(all="ignore"):  # the caller refuses an error that is not finite
            difference = (dequantize(written) - values).ravel()
            error, squares = (float(np.dot(x, x)) for x in (difference, values.ravel()))
        return written.data.tobytes(), error, squares

    starts = range(0, weight.out_features, step)
    for batch in range(0, len(starts), threads):
        for data, error, squares in pool.map(encode, starts[batch : batch + threads]):
            if not math.isfinite(error):
                raise CheckpointError(
                    f"{file.path}: {info.name!r} has values that are not finite, or too large for"
                    f" {planned.format}"
                )
            errors.add(error, squares)
            yield data
