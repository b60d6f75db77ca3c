"""Importance matrices: the mean square of each input of a model's matrices over calibration texts.

The search for the scales of quantised blocks weighs its errors by it. Files are read and written in
the two formats of llama.cpp's `llama-imatrix`: GGUF, and the older one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.interface import Weight
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.loading.gguf import matrix_parts
from anydecode.models.loading.gguf_file import GGUFFile, TensorInfo
from anydecode.models.opening import check_torch, torch_executor
from anydecode.quantization.gguf import entry, header_of
from anydecode.quantization.ptq161 import LENGTH, calibration_tokens

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME, _MAX_ENTRIES = 4096, 1 << 20


@dataclass(frozen=True)
class ImportanceMatrix:
    """What calibration texts have shown of a model's inputs.

    Attributes:
        sums: The sums of squares, float32 `[matrices, in_features]`, by the name of the tensor of a
            GGUF file; a tensor has one matrix, or one per expert.
        counts: How many inputs were summed up, float32 `[matrices]`.
        datasets: The names of the files of texts.
        num_chunks: The number of texts.
    """

    sums: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    datasets: list[str] = field(default_factory=list)
    num_chunks: int = 0

    def importance(self) -> dict[str, np.ndarray]:
        """The mean squares, `[in_features]` or `[experts, in_features]`. All inputs of an expert
        that no text has used have the same."""
        found = {}
        for name, sums in self.sums.items():
            counts = self.counts[name][:, None]
            means = np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)
            found[name] = means[0] if len(means) == 1 else means
        return found

    def write(self, path: Path) -> None:
        """Write a file as `llama-imatrix` does: in its older format if the name ends with `.dat`,
        else in GGUF.

        Raises:
            InvalidRequestError: The file cannot be written.
        """
        parts = self._old_parts() if path.suffix == ".dat" else self._gguf_parts()
        try:
            path.write_bytes(b"".join(parts))
        except OSError as error:
            raise InvalidRequestError(f"{path}: cannot be written: {error.strerror}") from None

    def _gguf_parts(self) -> Iterator[bytes]:
        tensors: dict[str, np.ndarray] = {}
        for name, sums in self.sums.items():
            tensors[f"{name}{_SUMS}"] = sums
            tensors[f"{name}{_COUNTS}"] = self.counts[name][:, None]
        plan = {
            name: TensorInfo(name, "F32", tensor.shape, 0, tensor.nbytes)
            for name, tensor in tensors.items()
        }
        entries = {
            key: entry(key, value)
            for key, value in (
                ("general.type", "imatrix"),
                ("imatrix.datasets", self.datasets or ["texts"]),
                ("imatrix.chunk_count", self.num_chunks),
                ("imatrix.chunk_size", LENGTH),
            )
        }
        header, offsets, _ = header_of(entries, plan)
        yield header
        end = 0
        for name, tensor in tensors.items():
            yield b"\0" * (offsets[name] - end)
            yield np.ascontiguousarray(tensor, np.float32).tobytes()
            end = offsets[name] + tensor.nbytes

    def _old_parts(self) -> Iterator[bytes]:
        """Matrices by name: the number of chunks that reached one, and the means times it."""
        used = sorted(name for name, counts in self.counts.items() if counts.any())
        yield struct.pack("<i", len(used))
        means = self.importance()
        for name in used:
            calls = math.ceil(self.counts[name].max() / LENGTH)
            values = (means[name] * np.float32(calls)).astype("<f4")
            encoded = name.encode()
            yield struct.pack("<i", len(encoded)) + encoded
            yield struct.pack("<ii", calls, values.size) + values.tobytes()
        dataset = (self.datasets or ["texts"])[-1].encode()
        yield struct.pack("<ii", self.num_chunks, len(dataset)) + dataset


def read_importance(path: Path) -> ImportanceMatrix:
    """Read a file of `llama-imatrix`, in GGUF or in the older format.

    Raises:
        CheckpointError: The file cannot be read, is truncated, or is no importance matrix.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            data = b"" if start == b"GGUF" else start + file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    found = _read_gguf(path) if start == b"GGUF" else _read_old(path, data)
    for name, sums in found.sums.items():
        counts = found.counts[name]
        if not (np.isfinite(sums).all() and np.isfinite(counts).all()) or sums.min() < 0:
            raise CheckpointError(f"{path}: {name!r} has sums of squares that are negative or NaN")
    return found


def _read_gguf(path: Path) -> ImportanceMatrix:
    file = GGUFFile(path)
    if file.metadata.get("general.type") != "imatrix":
        raise CheckpointError(
            f"{path}: is no importance matrix; allowed are files of llama-imatrix and of"
            " `anydecode quantize --save-imatrix`"
        )
    sums, counts = {}, {}
    for name in file.tensors:
        if not name.endswith(_SUMS):
            continue
        base = name.removesuffix(_SUMS)
        squares, number = _floats(file, name), _floats(file, f"{base}{_COUNTS}").ravel()
        if squares.ndim == 1:
            squares = squares[None]
        squares = squares.reshape(-1, squares.shape[-1])
        if number.size != len(squares):
            raise CheckpointError(
                f"{path}: {base!r} has {number.size} counts for {len(squares)} matrices"
            )
        sums[base], counts[base] = squares, number
    if not sums:
        raise CheckpointError(f"{path}: has no sums of squares")
    datasets = file.metadata.get("imatrix.datasets")
    chunks = file.metadata.get("imatrix.chunk_count", 0)
    names = [str(one) for one in datasets] if isinstance(datasets, list) else []
    return ImportanceMatrix(sums, counts, names, chunks if isinstance(chunks, int) else 0)


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.read(name) if name in file.tensors else None
    if tensor is None or isinstance(tensor, Weight) or tensor.dtype != np.float32:
        raise CheckpointError(f"{file.path}: {name!r} is missing or not float32")
    return np.array(tensor)


def _read_old(path: Path, data: bytes) -> ImportanceMatrix:
    """Entries of a name, the number of calls, and sums; then the number of chunks and the name of
    the texts, which older files lack. The sums of experts follow each other: their number is not
    stored."""
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        if size < 0 or position + size > len(data):
            raise CheckpointError(f"{path}: is no importance matrix, or truncated")
        position += size
        return data[position - size : position]

    def number(high: int) -> int:
        (value,) = struct.unpack("<i", take(4))
        if not 0 <= value <= high:
            raise CheckpointError(f"{path}: is no importance matrix, or damaged")
        return int(value)

    sums, counts = {}, {}
    for _ in range(number(_MAX_ENTRIES)):
        name = take(number(_MAX_NAME)).decode(errors="replace").rstrip("\0")
        calls = number((1 << 31) - 1)
        values = np.frombuffer(take(4 * number(1 << 28)), "<f4").astype(np.float32)
        if not values.size:
            raise CheckpointError(f"{path}: {name!r} has no sums of squares")
        sums[name], counts[name] = values[None], np.array([calls], np.float32)
    if not sums:
        raise CheckpointError(f"{path}: is no importance matrix, or empty")
    chunks, datasets = 0, []
    if position < len(data):
        chunks = number((1 << 31) - 1)
        datasets = [take(number(_MAX_NAME)).decode(errors="replace")]
    return ImportanceMatrix(sums, counts, datasets, chunks)


def measure_importance(
    checkpoint: Checkpoint, file: GGUFFile, texts: Sequence[str], dataset: str = "texts"
) -> ImportanceMatrix:
    """The importance matrix of a model in a GGUF file, from texts that it reads in float32.

    Args:
        checkpoint: The model, opened from the file.
        file: The file, or a folder that is read as one.
        texts: The texts, cut into windows of 128 tokens.
        dataset: The name of the texts.

    Raises:
        MissingPackageError: torch is not installed.
        InvalidRequestError: There is no text, or the model has no tokenizer.
    """
    from anydecode.api.llm import LLM

    check_torch("an importance matrix")
    from anydecode.kernels.calibration import SquaresBackend

    if checkpoint.tokenizer is None:
        raise InvalidRequestError(f"{checkpoint.name} has no tokenizer for the calibration texts")
    windows = calibration_tokens(checkpoint.tokenizer, texts)
    backend = SquaresBackend()
    model = build_model(checkpoint, "float32", executor=torch_executor(backend=backend))
    with LLM(model, tokenizer=checkpoint.tokenizer) as llm:
        for window in windows:
            if model.spec.is_encoder:
                llm.embed(window.tolist())
            else:
                llm.generate(window.tolist(), max_tokens=1)
    parts = matrix_parts(file)
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for name, (squares, count) in backend.squares.items():
        if f"{name}.weight" not in parts:
            continue
        tensor, index, total = parts[f"{name}.weight"]
        if tensor not in sums:
            sums[tensor] = np.zeros((total, len(squares)), np.float32)
            counts[tensor] = np.zeros(total, np.float32)
        sums[tensor][index], counts[tensor][index] = squares, count
    return ImportanceMatrix(sums, counts, [dataset], len(windows))
