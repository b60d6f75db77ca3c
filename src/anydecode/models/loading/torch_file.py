"""Reads the tensors of a file that `torch.save` has written, without running what its pickle asks
for: only the few names that rebuild tensors are known, and they make records of plain values."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.models.files import untrusted
from anydecode.models.loading.lazy import Reader

#: Files of heads that are published in this form.
HEADS = ("medusa_lm_head.pt", "hydra_lm_head.pt")
_LOCAL_HEADER = 30  # bytes before the name of a member of a zip file
_MAX_PICKLE = 16 << 20  # bytes
_STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": DTYPES["F32"],
    "HalfStorage": DTYPES["F16"],
    "BFloat16Storage": DTYPES["BF16"],
    "DoubleStorage": np.dtype("<f8"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "BoolStorage": np.dtype("?"),
}


class _Storage(NamedTuple):
    kind: str
    key: str
    size: int


class _Tensor(NamedTuple):
    storage: Any
    offset: Any
    shape: Any
    strides: Any


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        if (module, name) not in _NAMES:
            raise CheckpointError(f"its pickle asks for {module}.{name}, which tensors do not need")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, size = pid
        return _Storage(kind, key, size)


def heads_file(folder: Path) -> Path | None:
    """The file of heads in `folder`, if there is one and there are no safetensors files."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((folder / name for name in HEADS if (folder / name).is_file()), None)


def open_torch_file(file: Path) -> dict[str, Reader]:
    """A reader per tensor of a file, which is mapped.

    Raises:
        CheckpointError: The file is damaged, or contains something other than tensors by name.
    """
    with untrusted(file):
        try:
            with zipfile.ZipFile(file) as archive:
                root, tensors = _unpickle(archive)
                members = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{file}: truncated or corrupt: {error}") from None
        data = np.memmap(file, np.uint8, mode="c")
    readers: dict[str, Reader] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise CheckpointError(f"{file}: contains something other than tensors by name")
        readers[name] = partial(_read, file, data, members, root, tensor)
    return readers


def _unpickle(archive: zipfile.ZipFile) -> tuple[str, dict[Any, Any]]:
    """The name of the archive's folder, and its records by name."""
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE:
        raise CheckpointError("is not a file of tensors that torch.save has written")
    root = pickles[0].filename.removesuffix("data.pkl")
    order = f"{root}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise CheckpointError("was written in another byte order")
    content = _Unpickler(io.BytesIO(archive.read(pickles[0]))).load()
    if not isinstance(content, dict):
        raise CheckpointError("contains no tensors by name")
    return root, content


def _read(
    file: Path, data: np.ndarray, members: dict[str, zipfile.ZipInfo], root: str, tensor: _Tensor
) -> np.ndarray:
    """A view of a tensor in the mapped file."""
    dtype, member = _STORAGES[tensor.storage.kind], members[f"{root}data/{tensor.storage.key}"]
    if member.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file}: its tensors are compressed")
    header = data[member.header_offset : member.header_offset + _LOCAL_HEADER].tobytes()
    start = member.header_offset + _LOCAL_HEADER
    start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    count = member.file_size // dtype.itemsize
    flat = data[start : start + count * dtype.itemsize].view(dtype)
    shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
    sizes = [offset, *shape, *strides]
    if len(shape) != len(strides) or any(type(x) is not int or x < 0 for x in sizes):
        raise CheckpointError(f"{file}: a tensor has an invalid shape")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape or len(flat) < count or last >= count or math.prod(shape) > count:
        raise CheckpointError(f"{file}: a tensor is empty or reaches beyond its data")
    steps = [step * dtype.itemsize for step in strides]
    view = np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)
    return view if view.flags.c_contiguous else view.copy()
