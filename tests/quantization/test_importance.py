"""Importance matrices: measured, written, read, and used by `anydecode quantize`."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from anydecode.cli.main import app
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.quantization.gguf import FORMATS, quantize_file
from anydecode.quantization.importance import (
    ImportanceMatrix,
    measure_importance,
    read_importance,
)
from anydecode.quantization.mixes import MIXES
from gguf_models import write_gguf
from llama_cpp_logits import llama_cpp_logits
from tiny_models import built, chain, hf_model, logits

SIZES = {
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
}
TOKENS = [(7 * i + 3) % 40 for i in range(24)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    settings = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = hf_model("Llama", **settings, rope_parameters={"rope_theta": 5000.0})
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write_gguf(tmp_path / "tiny.gguf", "llama", tensors, sizes=SIZES)
    return tmp_path / "tiny.gguf"


def old_file(matrix: ImportanceMatrix, has_end: bool = True) -> bytes:
    """A file of the older format."""
    data = struct.pack("<i", len(matrix.sums))
    for name, sums in matrix.sums.items():
        count = int(matrix.counts[name][0])
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", count, sums.size)
        data += sums.astype("<f4").tobytes()
    end = struct.pack("<ii", matrix.num_chunks, 5) + b"a.txt"
    return data + (end if has_end else b"")


def some_matrix() -> ImportanceMatrix:
    random = np.random.default_rng(0)
    sums = {
        "blk.0.ffn_up.weight": random.random((1, 256), np.float32),
        "blk.1.ffn_down.weight": random.random((1, 256), np.float32),
    }
    counts = {name: np.array([12.0], np.float32) for name in sums}
    return ImportanceMatrix(sums, counts, ["a.txt"], 3)


@pytest.mark.parametrize("is_old", [False, True])
def test_files_of_both_formats_are_read(is_old: bool, tmp_path: Path) -> None:
    matrix, path = some_matrix(), tmp_path / "matrix"
    if is_old:
        path.write_bytes(old_file(matrix))
    else:
        matrix.write(path)
    found = read_importance(path)
    assert (found.datasets, found.num_chunks) == (["a.txt"], 3)
    assert found.sums.keys() == matrix.sums.keys()
    for name, means in found.importance().items():
        assert np.array_equal(means, matrix.sums[name][0] / np.float32(12))


def test_an_old_file_without_an_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "matrix").write_bytes(old_file(some_matrix(), has_end=False))
    assert read_importance(tmp_path / "matrix").num_chunks == 0


def test_the_package_gguf_reads_what_is_written(tmp_path: Path) -> None:
    """As `llama-imatrix` writes it: sums `[matrices, inputs]` and counts `[matrices, 1]`."""
    matrix, path = some_matrix(), tmp_path / "matrix.gguf"
    matrix.write(path)
    reader = gguf.GGUFReader(path)
    kind = reader.get_field("general.type")
    assert kind is not None and kind.contents() == "imatrix"
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert found["blk.0.ffn_up.weight.counts"].tolist() == [[12.0]]
    sums = found["blk.0.ffn_up.weight.in_sum2"]
    assert np.array_equal(sums, matrix.sums["blk.0.ffn_up.weight"])


def test_the_older_format_is_written_as_by_llama_imatrix(tmp_path: Path) -> None:
    """Calls are chunks of 128 inputs, rounded up; experts without inputs have ones, and matrices
    without any are left out. Rejects sums in place of means, and calls that are rounded down."""
    sums = {
        "blk.1.ffn_up_exps.weight": np.array([[130.0, 260.0], [0.0, 0.0]], np.float32),
        "blk.0.attn_q.weight": np.array([[128.0, 64.0]], np.float32),
        "blk.2.attn_q.weight": np.zeros((1, 2), np.float32),
    }
    counts = {
        "blk.1.ffn_up_exps.weight": np.array([130.0, 0.0], np.float32),
        "blk.0.attn_q.weight": np.array([128.0], np.float32),
        "blk.2.attn_q.weight": np.zeros(1, np.float32),
    }
    path = tmp_path / "matrix.dat"
    matrix = ImportanceMatrix(sums, counts, ["é.txt"], 2)
    matrix.write(path)
    first, second = b"blk.0.attn_q.weight", b"blk.1.ffn_up_exps.weight"
    assert path.read_bytes() == b"".join(
        [
            struct.pack("<ii", 2, len(first)) + first,
            struct.pack("<iiff", 1, 2, 1.0, 0.5),
            struct.pack("<i", len(second)) + second,
            struct.pack("<iiffff", 2, 4, 2.0, 4.0, 2.0, 2.0),
            struct.pack("<ii", 2, 6) + "é.txt".encode(),
        ]
    )
    found = read_importance(path).importance()
    assert found["blk.1.ffn_up_exps.weight"].tolist() == [1.0, 2.0, 1.0, 1.0]


def test_experts_that_no_text_used_weigh_all_inputs_alike() -> None:
    sums = np.array([[2.0, 6.0], [0.0, 0.0]], np.float32)
    counts = np.array([2.0, 0.0], np.float32)
    found = ImportanceMatrix({"a": sums}, {"a": counts}).importance()["a"]
    assert found.tolist() == [[1.0, 3.0], [1.0, 1.0]]


def test_the_measured_squares_are_those_of_the_inputs(source: Path) -> None:
    """The attention's inputs of the first layer are the normed embeddings of the tokens."""
    pytest.importorskip("torch")
    checkpoint = load_checkpoint(source)
    assert checkpoint.tokenizer is not None
    text = "abcdefg" * 40
    tokens = checkpoint.tokenizer.encode(text)
    matrix = measure_importance(checkpoint, GGUFFile(source), [text], "a.txt")
    assert set(matrix.sums) == {
        f"blk.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    count = 128 * max(1, len(tokens) // 128)
    used = np.resize(np.array(tokens), count)
    embedding = np.asarray(checkpoint.tensors["model.embed_tokens.weight"])[used]
    norm = np.asarray(checkpoint.tensors["model.layers.0.input_layernorm.weight"])
    scale = np.sqrt((embedding.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    expected = ((embedding / scale * norm) ** 2).mean(0)
    for part in "qkv":
        name = f"blk.0.attn_{part}.weight"
        assert matrix.counts[name] == [count]
        assert np.allclose(matrix.importance()[name], expected, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k_m", "q4_0", "q5_1", "nvfp4"])
def test_the_command_measures_saves_and_reads(format: str, source: Path) -> None:
    """Rejects an importance that is measured and not used."""
    pytest.importorskip("torch")
    folder, texts = source.parent, source.with_name("texts.txt")
    texts.write_text("abc def gh\n\nfgh aab bcd")

    def run(target: str, *options: str) -> bytes:
        path = folder / target
        arguments = ["quantize", str(source), str(path), "--format", format, "--prompt", ""]
        done = CliRunner().invoke(app, [*arguments, *options])
        assert done.exit_code == 0, done.output
        return path.read_bytes()

    saved = str(folder / "matrix.gguf")
    measured = run("a.gguf", "--calibrate", str(texts), "--save-imatrix", saved)
    assert run("b.gguf", "--imatrix", saved) == measured
    assert run("c.gguf") != measured


def test_the_help_lists_all_formats() -> None:
    done = CliRunner().invoke(app, ["quantize", "--help"])
    found = " ".join(done.output.split()).partition("Format of the weights: ")[2]
    listed = re.findall(r"\b[a-z]+\d+[a-z0-9_]*", found.partition(".")[0])
    assert sorted(listed) == sorted([*map(str.lower, (*FORMATS, *MIXES)), "ptq161"])


@pytest.mark.slow
@pytest.mark.parametrize("format", [*FORMATS, *MIXES])
def test_llama_cpp_opens_what_is_written(format: str, source: Path) -> None:
    target = source.with_name("small.gguf")
    quantize_file(source, target, format)
    found = logits(built(load_checkpoint(target)), chain(TOKENS))
    expected = llama_cpp_logits(target, TOKENS)  # which rounds activations to eight bits
    assert np.abs(found - expected).mean() < 0.15 * np.abs(expected).mean()


def damaged(change: str) -> tuple[str, bytes]:
    """The name and the bytes of a file that is not read."""
    data = old_file(some_matrix())
    start = len(struct.pack("<i", 0))
    return {
        "empty": ("m.dat", b""),
        "cut": ("m.dat", data[:500]),
        "no entries": ("m.dat", struct.pack("<i", 0)),
        "a long name": ("m.dat", data[:start] + struct.pack("<i", 1 << 30) + data[start + 4 :]),
        "a negative length": ("m.dat", data[:start] + struct.pack("<i", -1) + data[start + 4 :]),
        "text": ("m.dat", b"this is a text"),
        "negative sums": ("m.dat", data[:60] + struct.pack("<f", -1.0) + data[64:]),
    }[change]


@pytest.mark.parametrize(
    "change",
    ["empty", "cut", "no entries", "a long name", "a negative length", "text", "negative sums"],
)
def test_damaged_files_end_in_one_line(change: str, tmp_path: Path) -> None:
    name, data = damaged(change)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="importance matrix|sums of squares") as error:
        read_importance(tmp_path / name)
    assert "\n" not in str(error.value) and name in str(error.value)


def test_a_model_is_no_importance_matrix(source: Path) -> None:
    with pytest.raises(CheckpointError, match="is no importance matrix; allowed are files of"):
        read_importance(source)


def test_sums_without_counts_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "x")
    writer.add_string("general.type", "imatrix")
    writer.add_tensor("blk.0.ffn_up.weight.in_sum2", np.ones((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="counts' is missing or not float32"):
        read_importance(tmp_path / "m.gguf")


def test_the_matrix_of_another_model_is_refused(source: Path) -> None:
    importance = {"blk.0.ffn_up.weight": np.ones(64, np.float32)}
    target = source.with_name("small.gguf")
    with pytest.raises(InvalidRequestError, match="is it that of another model"):
        quantize_file(source, target, "q4_k", importance=importance)
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "q8_0", "--imatrix", "m"], "an importance matrix changes nothing in q8_0"),
        (["--format", "ptq161", "--imatrix", "m"], "matrix changes nothing in ptq161"),
        (["--format", "q9", "--imatrix", "m"], "unknown format 'q9'"),
        (["--imatrix", "m", "--calibrate", "t"], "exclude each other"),
        (["--save-imatrix", "m"], "give both"),
        (["--imatrix", "/nowhere/m"], "/nowhere/m: cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], message: str, source: Path
) -> None:
    arguments: list[Any] = ["quantize", str(source), str(source.with_name("a.gguf")), *options]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and message in str(done.exception)
