"""Split GGUF models: opened by any part, equal to the whole file; missing or foreign parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from anydecode.benchmarks import shapes
from anydecode.cli import main
from anydecode.errors import CheckpointError
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_split import first_parts, part_names, part_number
from anydecode.models.loading.hub import _files_to_fetch, _model_path
from gguf_models import make_tensors, plain, write_gguf


def test_names_of_parts() -> None:
    assert part_names("/m/a-00002-of-00003.gguf") == [
        f"/m/a-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    for whole in ("a.gguf", "a-00004-of-00003.gguf", "a-00000-of-00003.gguf", "a-1-of-3.gguf"):
        assert part_names(whole) == [whole] and part_number(whole) is None
    names = ["b.gguf", *part_names("a-00001-of-00003.gguf")]
    assert first_parts(names) == ["b.gguf", "a-00001-of-00003.gguf"]


def split(folder: Path, number_of_parts: int, name: str = "tiny") -> dict[str, np.ndarray]:
    """Write a model in parts; returns its tensors."""
    tensors = make_tensors("llama")
    write_gguf(folder / "whole.gguf", "llama", tensors, "Q8_0")
    divide(folder / "whole.gguf", number_of_parts, name)
    return tensors


def divide(path: Path, number_of_parts: int, name: str) -> None:
    """Write the tensors of a file in parts, of which the first has the metadata."""
    whole = gguf.GGUFReader(path)
    for part in range(number_of_parts):
        file = path.with_name(f"{name}-{part + 1:05d}-of-{number_of_parts:05d}.gguf")
        writer = gguf.GGUFWriter(file, "llama")
        for field in whole.fields.values() if part == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", number_of_parts)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[part::number_of_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_a_split_model_is_opened_by_any_part(opened: int, tmp_path: Path) -> None:
    tensors = split(tmp_path, 3)
    expected = load_checkpoint(tmp_path / "whole.gguf")
    found = load_checkpoint(tmp_path / f"tiny-0000{opened + 1}-of-00003.gguf")
    assert set(found.tensors) == set(expected.tensors) and found.config == expected.config
    for name in tensors:
        assert np.array_equal(plain(found.tensors[name]), plain(expected.tensors[name]))


def test_a_folder_with_the_parts_of_one_model_is_opened(tmp_path: Path) -> None:
    split(tmp_path, 2)
    (tmp_path / "whole.gguf").unlink()
    assert len(load_checkpoint(tmp_path).tensors) > 10


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    split(tmp_path, 3)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003.gguf: .*\(part 2 of 3\)"):
        load_checkpoint(tmp_path / "tiny-00001-of-00003.gguf")


def test_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    split(tmp_path, 3)
    first, second = (tmp_path / f"tiny-0000{number}-of-00003.gguf" for number in (1, 2))
    second.write_bytes((tmp_path / "tiny-00003-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="is part 2 .* of 3 by its metadata, but part 1 of 3"):
        load_checkpoint(first)
    renamed = tmp_path / "alone.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="part 0 of 1 by its name; parts are called"):
        load_checkpoint(renamed)


def test_all_parts_are_pulled(tmp_path: Path) -> None:
    files = ["a-Q8_0.gguf", *part_names("a-Q4_K_M-00001-of-00002.gguf")]
    assert _files_to_fetch("o/r", files, "") == files[1:]
    assert _files_to_fetch("o/r", files, "Q8_0") == files[:1]
    for file in files[1:]:
        (tmp_path / file).touch()
    assert _model_path(tmp_path, "Q4_K_M") == tmp_path / files[1]


def test_the_command_line_opens_and_quantises_a_split_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its text is that of the whole file; that of other weights is another one."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run([*arguments, "--threads", "1"])
        return int(ended.value.code or 0), *capsys.readouterr()

    def text(model: Path) -> str:
        options = ("--max-tokens", "12", "--temperature", "1", "--seed", "3")
        code, found, _ = run("generate", "The cat", "--model", str(model), *options)
        assert not code
        return found

    whole, first = tmp_path / "whole.gguf", tmp_path / "tiny-00001-of-00003.gguf"
    shapes.write(whole, shapes.SHAPES["tiny"], "Q8_0")
    divide(whole, 3, "tiny")
    assert text(first) == text(whole)
    for model, name in ((whole, "a.gguf"), (first, "b.gguf")):
        assert not run("quantize", str(model), str(tmp_path / name), "--format", "iq4_nl")[0]
    assert (tmp_path / "a.gguf").stat().st_size == (tmp_path / "b.gguf").stat().st_size
    assert text(tmp_path / "a.gguf") == text(tmp_path / "b.gguf") != text(whole)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    for arguments in (
        ("generate", "The cat", "--model", str(first)),
        ("quantize", str(first), str(tmp_path / "c.gguf"), "--format", "q4_0"),
    ):
        code, found, error = run(*arguments)
        assert code and not found and error.count("\n") == 1
        assert "tiny-00002-of-00003.gguf: cannot be read" in error and "(part 2 of 3)" in error
