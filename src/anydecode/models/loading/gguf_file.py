"""Reads a GGUF file: metadata, and tensors mapped from disk without a copy.

Every size and offset of the header is checked against the size of the file before it is used, so a
truncated or corrupt file raises a `CheckpointError` and never crashes the process. Parsing takes a
few hundredths of a second; the `gguf` package's own reader, which makes an array of every string,
takes seconds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels import ptq161
from anydecode.kernels.formats import BLOCKS, DTYPES, is_packed, row_bytes
from anydecode.kernels.interface import FORMATS, Weight
from anydecode.models.loading import ternary
from anydecode.models.loading.gguf_split import part_names

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
#: GGUF's codes of the supported formats.
FORMAT_CODES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    161: "PTQ161",  # not of GGUF: other programs refuse the file
}
#: Codes of tensors of integers, which are no weights.
INTEGER_CODES = {26: "I32", 27: "I64"}
_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
#: Names of unsupported formats, for error messages.
_OTHER_FORMATS = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    28: "F64",
}
#: Formats without kernels, whose blocks become four or two of Q4_0 each, without loss: a scale in
#: float16 and 128 bits. A number is -1 or 1 in Q1_0, and one of -1 to 2 in Q2_0.
_FEW_BITS_CODES = {41: "Q1_0", 42: "Q2_0"}
_FEW_BITS = {"Q1_0": 1, "Q2_0": 2}  # per number
_FEW_BITS_BYTES, _FEW_BITS_STEP = 18, 1 << 16  # of a block; blocks that are converted at once
#: The format of BitNet's own program, without kernels here: codes of two bits and one factor for
#: the whole matrix. They become TQ2_0 without loss.
_TERNARY, _TERNARY_CODE = "I2_S", 36
_TERNARY_END = 32  # bytes behind the codes, of which four are the factor
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor. `shape` is outermost first, as in numpy; `offset` is in bytes from
    the start of the file, or of its part number `part` (from 0) if the model is split."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    part: int = 0


class GGUFFile:
    """An open GGUF file, or a split model: `metadata` by key and `tensors` by name.

    Args:
        path: The file, or any part of a split model; the metadata are those of the first part.

    Raises:
        CheckpointError: A file cannot be read, or is truncated, corrupt or unsupported, or a part
            is missing or belongs to another model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: list[np.memmap[Any, Any]] = []
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, slice] = {}
        self.tensors: dict[str, TensorInfo] = {}
        names = part_names(str(path))
        for number, name in enumerate(names):
            self._add_part(Path(name), number, len(names))
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(names) > 1 and total != len(self.tensors):
            raise CheckpointError(
                f"{path}: the parts hold {len(self.tensors)} tensors; split.tensors.count is"
                f" {total}"
            )

    def _add_part(self, path: Path, number: int, count: int) -> None:
        try:
            data = np.memmap(path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            part = f" (part {number + 1} of {count})" if count > 1 else ""
            raise CheckpointError(f"{path}: cannot be read: {reason}{part}") from None
        header = _Header(path, memoryview(data.data))
        # Some writers declare a whole file as the only part.
        total = header.metadata.get("split.count") or 1
        if (header.metadata.get("split.no", 0), total) != (number, count):
            raise header.fault(
                f"is part {header.metadata.get('split.no', 0)} (from 0) of {total} by its metadata,"
                f" but part {number} of {count} by its name; parts are called"
                " NAME-00001-of-0000N.gguf"
            )
        if number == 0:
            self.metadata, self._entries = header.metadata, header.entries
        for name, info in header.tensors.items():
            if name in self.tensors:
                raise header.fault(f"is corrupt: tensor {name!r} is in an earlier part too")
            self.tensors[name] = replace(info, part=number)
        self._maps.append(data)

    def entry(self, key: str) -> bytes:
        """The key and the value of one of the metadata as stored."""
        return self._maps[0][self._entries[key]].tobytes()

    def read(self, name: str, weight_name: str = "") -> np.ndarray | Weight:
        """A view of a tensor in the mapped file: a `Weight` if it is packed, else a numpy array.
        `weight_name` becomes the name of the `Weight`."""
        return self.view(self.tensors[name], weight_name)

    def view(self, info: TensorInfo, weight_name: str = "") -> np.ndarray | Weight:
        raw = np.asarray(self._maps[info.part][info.offset : info.offset + info.num_bytes])
        if info.format in _INTEGERS:
            return raw.view(_INTEGERS[info.format]).reshape(info.shape)
        if not is_packed(info.format):
            return raw.view(DTYPES[info.format]).reshape(info.shape)
        rows = math.prod(info.shape[:-1])
        if info.format in _FEW_BITS:
            data = _as_q4_0(raw, _FEW_BITS[info.format]).reshape(rows, -1)
            return Weight("Q4_0", rows, info.shape[-1], data, weight_name)
        if info.format == _TERNARY:
            return _ternary(raw, rows, weight_name)
        weight = Weight(info.format, rows, info.shape[-1], raw.reshape(rows, -1), weight_name)
        if info.format == ptq161.FORMAT:
            weight.columns = self._columns(info)
            ptq161.check(weight)
        return weight

    def _columns(self, info: TensorInfo) -> np.ndarray:
        """The scales of the inputs of a matrix in PTQ161."""
        name = f"{info.name.removesuffix('.weight')}.columns"
        columns = self.read(name) if name in self.tensors else None
        if not isinstance(columns, np.ndarray):
            raise CheckpointError(f"{self.path}: {info.name!r} in PTQ161 has no {name!r}")
        return columns

    def part(self, name: str, index: int, weight_name: str = "") -> np.ndarray | Weight:
        """Entry `index` along the outermost axis of a tensor (one expert of many)."""
        info = self.tensors[name]
        size = info.num_bytes // info.shape[0]
        inner = replace(
            info, shape=info.shape[1:], offset=info.offset + index * size, num_bytes=size
        )
        return self.view(inner, weight_name)


def _as_q4_0(raw: np.ndarray, bits: int) -> np.ndarray:
    """Blocks of Q4_0 from those of Q1_0 (1 bit per number) or Q2_0 (2 bits)."""
    blocks = raw.reshape(-1, _FEW_BITS_BYTES)
    count = 4 // bits
    out = np.empty((len(blocks), count, 18), np.uint8)
    for start in range(0, len(blocks), _FEW_BITS_STEP):
        part = blocks[start : start + _FEW_BITS_STEP]
        fields = np.unpackbits(part[:, 2:], axis=1, bitorder="little").reshape(-1, bits)
        # The zero of Q4_0 is 8.
        codes = 7 + (2 * fields[:, 0] if bits == 1 else fields[:, 0] + 2 * fields[:, 1])
        codes = codes.reshape(-1, count, 2, 16)
        out[start : start + len(part), :, :2] = part[:, None, :2]
        out[start : start + len(part), :, 2:] = codes[:, :, 0] | codes[:, :, 1] << 4
    return out


def _ternary(raw: np.ndarray, rows: int, name: str) -> Weight:
    """The matrix of I2_S. The highest of the four codes in a byte is that of the first input, and
    the lowest in TQ2_0."""
    codes, end = raw[:-_TERNARY_END], raw[-_TERNARY_END:]
    turned = (codes & 3) << 6 | (codes & 12) << 2 | codes >> 2 & 12 | codes >> 6
    factor = float(end[:4].view(np.float32)[0])
    return ternary.packed_ternary(turned.reshape(rows, -1), factor, name)


class _Header:
    """Parses the header of a file, with bounds checks."""

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, slice] = {}  # bytes of each of the metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._check_start()
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if max(num_tensors, num_keys) > len(buffer):
            raise self.fault("is corrupt: its header declares more entries than the file has bytes")
        for _ in range(num_keys):
            start, key = self.position, self._string()
            if key in self.metadata:
                raise self.fault(f"is corrupt: metadata {key!r} appear twice")
            self.metadata[key] = self._value(self._number("<I"))
            self.entries[key] = slice(start, self.position)
        self._read_tensors(num_tensors)

    def fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: the file {what}")

    def _check_start(self) -> None:
        start = bytes(self._read_bytes(min(4, len(self.buffer))))
        if start != _MAGIC:
            raise self.fault(f"is not a GGUF file (it starts with {start!r})")
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = struct.unpack(">I", struct.pack("<I", version))[0]
            if swapped in _VERSIONS:
                raise self.fault("is a big-endian GGUF file, which is not supported")
            raise self.fault(f"has GGUF version {version}; versions 2 and 3 are supported")

    def _read_bytes(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.buffer):
            raise self.fault(f"is truncated: its header continues after {len(self.buffer)} bytes")
        data = self.buffer[self.position : end]
        self.position = end
        return data

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._read_bytes(struct.calcsize(code)))[0]

    def _string(self) -> str:
        # Some vocabularies contain invalid UTF-8, which must not make the file unreadable.
        return str(self._read_bytes(self._number("<Q")), "utf-8", "replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self.fault(f"is corrupt: unknown metadata type {kind}")
        inner, count = self._number("<I"), self._number("<Q")
        if count > len(self.buffer) - self.position:
            raise self.fault(f"is truncated or corrupt: a list of {count} entries does not fit")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self._read_bytes(count * dtype.itemsize), dtype).tolist()
        if inner == _STRING:
            return self._strings(count)
        return [self._value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """A list of strings. Vocabularies have hundreds of thousands, so the loop is inlined."""
        buffer, position, size = self.buffer, self.position, len(self.buffer)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            end = start + length_at(buffer, position)[0] if start <= size else size + 1
            if end > size:
                raise self.fault("is truncated or corrupt: a list of strings does not fit")
            strings.append(str(buffer[start:end], "utf-8", "replace"))
            position = end
        self.position = position
        return strings

    def _read_tensors(self, count: int) -> None:
        found = []
        for _ in range(count):
            name, rank = self._string(), self._number("<I")
            if not 1 <= rank <= _MAX_DIMENSIONS:
                raise self.fault(f"is corrupt: tensor {name!r} has {rank} dimensions")
            shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
            found.append((name, shape, self._number("<I"), self._number("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.fault(f"is corrupt: alignment {alignment!r}")
        base = -(-self.position // alignment) * alignment
        for name, shape, code, offset in found:
            if name in self.tensors:
                raise self.fault(f"is corrupt: tensor {name!r} appears twice")
            self.tensors[name] = self._tensor_info(name, shape, code, base, offset, alignment)

    def _tensor_info(
        self, name: str, shape: tuple[int, ...], code: int, base: int, offset: int, alignment: int
    ) -> TensorInfo:
        own = {_TERNARY_CODE: _TERNARY, **_FEW_BITS_CODES}
        format = FORMAT_CODES.get(code) or INTEGER_CODES.get(code) or own.get(code)
        if format is None:
            format_name = _OTHER_FORMATS.get(code, f"number {code}")
            raise self.fault(
                f"stores {name!r} in format {format_name}; supported are"
                f" {', '.join(sorted((*FORMATS, *own.values())))}"
            )
        values, block_bytes = BLOCKS.get(format, (1, 0))
        if format in _FEW_BITS:
            values, block_bytes = 128 // _FEW_BITS[format], _FEW_BITS_BYTES
        if format in _INTEGERS:
            block_bytes = _INTEGERS[format].itemsize
        if format == _TERNARY:
            values, block_bytes = ternary.BLOCK, ternary.BLOCK // 4
        if 0 in shape or shape[-1] % values:
            raise self.fault(f"is corrupt: tensor {name!r} of shape {list(shape)} in {format}")
        size = math.prod(shape) // values * block_bytes
        size += _TERNARY_END if format == _TERNARY else 0
        if format == ptq161.FORMAT:
            size = math.prod(shape[:-1]) * row_bytes(format, shape[-1])
        if offset % alignment:
            raise self.fault(f"is corrupt: tensor {name!r} is not aligned")
        if base + offset + size > len(self.buffer):
            raise self.fault(
                f"is truncated: tensor {name!r} needs {base + offset + size} bytes, "
                f"the file has {len(self.buffer)}"
            )
        return TensorInfo(name, format, shape, base + offset, size)
