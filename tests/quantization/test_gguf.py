"""`anydecode quantize`: GGUF files that are written in another format."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.benchmarks import shapes
from anydecode.cli import main
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.kernels.formats import BLOCKS, dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.quantization.gguf import FORMATS, quantize_file
from anydecode.quantization.mixes import MIXES, mixed_formats
from gguf_models import FAMILIES, make_tensors, write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "m.gguf"
    shapes.write(path, shapes.SHAPES["tiny"], "Q8_0")
    return path


@pytest.fixture(scope="module")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model whose matrices can have every format; some formats take long to search."""
    path = tmp_path_factory.mktemp("source") / "m.gguf"
    shapes.write(path, shapes.Shape(256, 1, 4, 1, 64, 256, 512, True), "Q8_0")
    return path


def values(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.read(name)
    if isinstance(tensor, Weight):
        return dequantize(tensor)
    return tensor.astype(np.float32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", FORMATS)
def test_a_written_file_holds_the_same_model(
    format: str, small_source: Path, tmp_path: Path
) -> None:
    target, seen = tmp_path / "new.gguf", []
    summary = quantize_file(
        small_source, target, format.lower(), threads=2, progress=lambda *state: seen.append(state)
    )
    before, after = GGUFFile(small_source), GGUFFile(target)
    assert summary.num_bytes == target.stat().st_size == seen[-1][0] == seen[-1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["new.gguf"]
    kinds = {"general.file_type": FORMATS[format], "general.quantization_version": 2}
    assert after.metadata == {**before.metadata, **kinds}
    assert list(after.tensors) == list(before.tensors)
    size, num_bytes = BLOCKS[format]
    squares = errors = 0.0
    for name, info in after.tensors.items():
        exact = values(before, name)
        assert exact.shape == values(after, name).shape
        if info.format == before.tensors[name].format:
            assert np.array_equal(values(after, name), exact)
            continue
        is_fine = name != "token_embd.weight" or 8 * num_bytes >= 6 * size
        assert info.format == (format if is_fine else "Q6_K")
        errors += float(((values(after, name) - exact) ** 2).sum(dtype=np.float64))
        squares += float((exact**2).sum(dtype=np.float64))
    assert summary.error == pytest.approx((errors / squares) ** 0.5 if squares else 0, rel=1e-3)
    reader = gguf.GGUFReader(target)
    assert [tensor.name for tensor in reader.tensors] == list(after.tensors)
    if not format.startswith("TQ"):
        limits = {"Q2_K": 0.3, "IQ1": 0.45, "IQ2": 0.33, "IQ3": 0.18}
        assert summary.error < limits.get(format, limits.get(format[:3], 0.13))
    with LLM(str(target)) as llm:
        assert llm.generate("abc", max_tokens=4).tokens


def test_mixtures_give_more_bits_to_some_matrices() -> None:
    """The formats of a model of 16 layers as `llama-quantize` chooses them."""
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{part}.weight" for layer in range(16) for part in parts]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 16,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
    }

    def found(mix: str, part: str, **changes: int) -> str:
        """The format of each layer, by the digit of its bits; "." is the base."""
        keys = {f"llama.{key}": value for key, value in changes.items()}
        formats = mixed_formats(mix, names, metadata | keys)
        every = [formats.get(f"blk.{layer}.{part}.weight", "..") for layer in range(16)]
        return "".join(format[1] for format in every)

    none = "." * 16
    more = "66" + "".join("6" if (i - 2) % 3 == 2 or i >= 14 else "." for i in range(2, 16))
    for mix in ("Q4_K_M", "Q5_K_M"):
        assert found(mix, "attn_v") == found(mix, "ffn_down") == more
    assert found("Q4_K_S", "attn_v") == "5555" + "." * 12
    assert found("Q4_K_S", "ffn_down") == "55" + "." * 14
    assert found("Q3_K_M", "attn_v") == "55" + "4" * 14
    assert found("Q3_K_M", "ffn_down") == "5" + "4" * 15
    assert found("Q3_K_M", "attn_output") == "4" * 16
    assert found("Q3_K_L", "attn_v") == found("Q3_K_L", "attn_output") == "5" * 16
    for mix in MIXES:
        assert found(mix, "attn_q") == found(mix, "ffn_up") == found(mix, "attn_k") == none
        assert found(mix, "attn_v", expert_count=8) == "8" * 16
        assert found(mix, "attn_k", expert_count=8) == "8" * 16
    assert found("Q5_K_S", "attn_v") == found("Q3_K_S", "ffn_down") == none
    assert found("Q4_K_S", "attn_output", expert_count=8) == "5" * 16
    assert found("Q3_K_S", "attn_v", block_count=80) == "5" * 16  # grouped heads of 70B


@pytest.mark.parametrize("mix", MIXES)
def test_a_mixture_is_written(mix: str, source: Path, tmp_path: Path) -> None:
    summary = quantize_file(source, tmp_path / "new.gguf", mix.lower())
    file = GGUFFile(tmp_path / "new.gguf")
    mixed = mixed_formats(mix, file.tensors, file.metadata)
    assert file.metadata["general.file_type"] == MIXES[mix].code
    for name, info in file.tensors.items():
        if len(info.shape) > 1 and name != "token_embd.weight":
            assert info.format == mixed.get(name, MIXES[mix].base)
    assert summary.error < 0.18
    with LLM(str(tmp_path / "new.gguf")) as llm:
        assert llm.generate("abc", max_tokens=4).tokens


def test_equal_weights_give_an_equal_text(source: Path, tmp_path: Path) -> None:
    quantize_file(source, tmp_path / "new.gguf", "f32")
    texts = []
    for path in (source, tmp_path / "new.gguf"):
        with LLM(str(path), dtype="float32") as llm:
            texts.append(llm.generate("The cat", max_tokens=12).tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("format", "small"), [("Q4_K", "Q5_0"), ("Q6_K", "Q8_0"), ("IQ4_XS", "IQ4_NL")]
)
def test_narrow_matrices_have_a_format_of_small_blocks(
    family: str, format: str, small: str, tmp_path: Path
) -> None:
    """Rows of 64 and 96 values are not whole blocks of 256."""
    write_gguf(tmp_path / "m.gguf", family, make_tensors(family))
    quantize_file(tmp_path / "m.gguf", tmp_path / "new.gguf", format)
    for info in GGUFFile(tmp_path / "new.gguf").tensors.values():
        is_outer = info.name in ("token_embd.weight", "output.weight")
        assert info.format == ("F32" if len(info.shape) == 1 else "Q8_0" if is_outer else small)


def test_what_cannot_be_written_is_refused_in_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    existing = tmp_path / "old.gguf"
    shutil.copy(source, existing)
    for target, format, message in (
        (tmp_path / "new.gguf", "q7_k", "unknown format 'q7_k'; choose from f32, .* q4_k_m"),
        (tmp_path / "new.bin", "q4_k", "must be called NAME.gguf"),
        (tmp_path / "no" / "new.gguf", "q4_k", "there is no folder"),
        (existing, "q4_k", "exists; --force replaces it"),
        (source, "q4_k", "is the model itself"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            quantize_file(source, target, format)
        assert "\n" not in str(caught.value)
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(
            InvalidRequestError, match=r"needs 0\.00 GB; the disk has 0\.00 GB free"
        ):
            quantize_file(source, tmp_path / "new.gguf", "q4_k")
    assert [path.name for path in tmp_path.iterdir()] == ["old.gguf"]
    assert quantize_file(source, existing, "q4_k", overwrite=True).format == "Q4_K"


def test_a_full_disk_leaves_no_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int, name: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InvalidRequestError, match=r"new\.gguf: cannot be written: No space left"):
        quantize_file(source, tmp_path / "new.gguf", "q4_0", progress=stop)
    assert not list(tmp_path.iterdir())


def test_values_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    for value in (np.nan, np.inf, 1e30):
        tensors = make_tensors("llama")
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        write_gguf(tmp_path / "m.gguf", "llama", tensors)
        with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' has values that"):
            quantize_file(tmp_path / "m.gguf", tmp_path / "new.gguf", "f16")


def test_factors_of_weights_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", make_tensors("llama"), factors={"ffn_up": 2.0})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.scale' is a factor"):
        quantize_file(tmp_path / "m.gguf", tmp_path / "new.gguf", "q8_0")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.run(["quantize", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new.gguf"
    arguments = (str(source), str(target), "--format", "iq4_nl")
    assert run(*arguments, "--prompt", "The cat", "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.count("\n") == 1 and found["path"] == str(target)
    assert found["formats"] == {"IQ4_NL": 14, "Q6_K": 1, "F32": 5}
    with LLM(str(target)) as llm:
        assert found["text"] == llm.generate("The cat", max_tokens=16).text
    assert run(*arguments) == main.USAGE_ERROR
    assert "exists; --force replaces it" in capsys.readouterr().err
    assert run(*arguments, "--force", "--prompt", "") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n" and "relative error" in captured.err


def test_the_command_refuses_a_folder_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf_models import SIZES, write_folder

    sizes = {**SIZES, "max_position_embeddings": 256}
    folder = write_folder(tmp_path / "m", make_tensors("llama"), **sizes)
    assert run(str(folder), str(tmp_path / "new.gguf")) != 0
    error = capsys.readouterr().err
    assert "there is no tokenizer that a GGUF file can hold" in error and error.count("\n") == 1
