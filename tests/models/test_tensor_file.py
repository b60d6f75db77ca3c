"""Files of small trained parts are refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.models.tensor_file import read_tensors


def test_tensors_and_metadata_are_read(tmp_path: Path) -> None:
    file = tmp_path / "parts.safetensors"
    save_file({"a": np.array([0.5, -2.0], np.float16)}, file, metadata={"made": "for a test"})
    tensors, metadata = read_tensors(file, "parts", ["a"])
    assert tensors["a"].dtype == np.float32 and tensors["a"].tolist() == [0.5, -2.0]
    assert metadata == {"made": "for a test"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"xx", "parts"),
        ({"b": np.ones(1, np.float32)}, "has no tensor a"),
        ({"a": np.array([np.inf], np.float32)}, "not finite"),
    ],
    ids=["folder", "no safetensors", "another tensor", "infinite"],
)
def test_other_files_are_refused_in_one_line(content: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "parts.safetensors"
    if isinstance(content, dict):
        save_file(content, file)
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.mkdir()
    with pytest.raises(CheckpointError, match=message) as caught:
        read_tensors(file, "parts", ["a"])
    assert "\n" not in str(caught.value)
