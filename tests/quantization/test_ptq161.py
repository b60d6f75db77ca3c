"""Weights in 1.61 bits: their certificate, mistakes that it rejects, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from typer.testing import CliRunner

from anydecode.certification.oracles.quantization.ptq161 import nats
from anydecode.cli.main import app
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels import ptq161 as layout
from anydecode.kernels.formats import check_weight, dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.quantization import ptq161
from certificates import assert_certified, assert_rejected
from gguf_models import make_tensors, write_gguf
from tiny_models import built, chain, logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Llama, whose queries and keys are stored for interleaved rotary pairs."""
    pytest.importorskip("torch")
    tensors = {name: 0.1 * tensor for name, tensor in make_tensors("llama").items()}
    path = tmp_path / "source.gguf"
    write_gguf(path, "llama", tensors, "F16")
    return path


def weight(rows: int = 5, width: int = 64) -> Weight:
    draw = np.random.default_rng(0)
    salient = layout.num_salient(width)
    columns = draw.uniform(0.5, 2, width).astype(bfloat16)
    columns[draw.permutation(width)[:salient]] = 0
    return layout.pack(
        draw.normal(size=(rows, 4)).astype(np.float16),
        draw.random((rows, width - salient)) < 0.5,
        draw.integers(0, 16, (rows, salient)).astype(np.uint8),
        columns,
    )


@pytest.mark.slow
def test_certificate() -> None:
    pytest.importorskip("torch")
    assert_certified("ptq161")


def test_certificate_rejects_the_columns_with_the_largest_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plausible mistake: salience by weights, not by activations."""
    torch = pytest.importorskip("torch")
    from anydecode.models import ptq161_blocks

    class ByWeights(ptq161_blocks.Binarized):
        def __init__(self, matrix: Any, largest: Any) -> None:
            super().__init__(matrix, torch.amax(matrix.abs(), 0))

    monkeypatch.setattr(ptq161_blocks, "Binarized", ByWeights)
    assert_rejected("ptq161")


def test_certificate_rejects_swapped_nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pack = layout.pack

    def swapped(numbers: Any, signs: Any, codes: Any, columns: Any, name: str = "") -> Weight:
        pairs = codes[:, : codes.shape[1] // 2 * 2]
        pairs[:] = pairs.reshape(len(codes), -1, 2)[..., ::-1].reshape(pairs.shape)
        return pack(numbers, signs, codes, columns, name)

    monkeypatch.setattr("anydecode.models.ptq161_blocks.pack", swapped)
    assert_rejected("ptq161")


@pytest.mark.slow
def test_certificate_rejects_scales_that_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from anydecode.models import ptq161_blocks

    monkeypatch.setattr(ptq161_blocks, "_learn", lambda *arguments: None)
    nats.cache_clear()
    assert_rejected("ptq161")
    nats.cache_clear()


@pytest.mark.slow
def test_certificate_rejects_an_update_of_the_exact_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plausible mistake: the update restores the quantised matrices, and is added to others."""
    pytest.importorskip("torch")
    from anydecode.models import ptq161_blocks

    restore = ptq161_blocks.restore

    def onto_exact(network: Network, quantized: list[Weight], *options: Any) -> None:
        matrices = [weight for layer in network.weights.layers for weight in layer.matrices]
        exact = [dequantize(weight) for weight in matrices]
        restore(network, quantized, *options)
        for weight, one, stored in zip(matrices, exact, quantized, strict=True):
            weight.data = weight.data - dequantize(stored) + one

    monkeypatch.setattr(ptq161_blocks, "restore", onto_exact)
    assert_rejected("ptq161")


@pytest.mark.slow
def test_certificate_rejects_a_single_quantisation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    quantize = ptq161.quantize_network

    def once(*arguments: Any, restore: int = 0) -> dict[str, Weight]:
        return quantize(*arguments)

    monkeypatch.setattr(ptq161, "quantize_network", once)
    assert_rejected("ptq161")


def test_a_file_has_the_logits_of_its_dense_weights(source: Path) -> None:
    """And the same bits in passes of any size; packed products and the reference agree."""
    target = source.with_name("small.gguf")
    summary = ptq161.quantize_gguf(
        source, target, ["a text to calibrate with " * 20], epochs=1, restore=0
    )
    assert summary.formats["PTQ161"] == 21 and 0.3 < summary.error < 0.7
    checkpoint, dense = load_checkpoint(target), load_checkpoint(source)
    for name, stored in checkpoint.tensors.items():
        if isinstance(stored, Weight) and stored.format == "PTQ161":
            exact = np.asarray(dense.tensors[name], np.float32)
            # Rows in another order have nothing in common.
            assert np.sum(exact * dequantize(stored)) > 0.5 * np.sum(exact**2)
    reference = logits(built(checkpoint, "float32"), chain(TOKENS))
    torch = logits(built(checkpoint), chain(TOKENS))
    model = built(checkpoint, executor=choose_executor("native"))
    together = logits(model, chain(TOKENS))
    assert np.allclose(torch, together, rtol=0.02, atol=0.02 * np.abs(together).max())
    assert np.linalg.norm(reference - together) < 0.02 * np.linalg.norm(reference)
    cache = model.new_cache(len(TOKENS))
    parts = [logits(model, chain(TOKENS[a:b], a), cache) for a, b in ((0, 6), (6, 12), (12, 13))]
    assert np.array_equal(np.concatenate(parts), together)


def test_a_file_with_other_columns_is_refused_in_one_line(source: Path) -> None:
    target = source.with_name("small.gguf")
    ptq161.quantize_gguf(source, target, ["a text to calibrate with"], epochs=0)
    content = target.read_bytes()
    name = b"blk.1.attn_q.columns"
    for wrong, message in (
        (b"blk.1.attn_q.colunms", "is not part of the llama models|has no 'blk.1.attn_q.columns'"),
        (b"", "not a PTQ161 matrix of 64 by 64 with 13 salient inputs"),
    ):
        changed = content.replace(name, wrong) if wrong else zeroed(target)
        target.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_checkpoint(target).tensors["model.layers.1.self_attn.q_proj.weight"]
        assert "\n" not in str(caught.value)
        target.write_bytes(content)


def zeroed(path: Path) -> bytes:
    """The file with all columns of one matrix salient."""
    info = GGUFFile(path).tensors["blk.1.attn_q.columns"]
    content = bytearray(path.read_bytes())
    content[info.offset : info.offset + info.num_bytes] = bytes(info.num_bytes)
    return bytes(content)


def test_bits_per_weight() -> None:
    for width in (576, 1536, 4096):
        size = layout.row_bytes(width) * 8 / width
        assert 1.6 <= size - 64 / width < 1.62
    assert layout.num_salient(4096) == 819 and layout.num_salient(576) == 115


def test_other_parts_are_refused() -> None:
    check_weight(weight())
    changes: list[dict[str, Any]] = [
        {"columns": None},
        {"columns": np.ones(64, bfloat16)},
        {"columns": np.zeros(64, np.float32)},
        {"data": np.zeros((5, 10), np.uint8)},
    ]
    for change in changes:
        wrong = weight()
        for name, value in change.items():
            setattr(wrong, name, value)
        with pytest.raises(CheckpointError, match="not a PTQ161 matrix of 5 by 64 with 13 salient"):
            check_weight(wrong)


def test_the_command(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptq161, "MAX_TEXTS", 1)
    texts, target = source.with_name("texts.txt"), source.with_name("small.gguf")
    texts.write_text("One text.\n\nAnother one.")
    arguments = ["quantize", str(source), str(target), "--prompt", "", "--calibrate", str(texts)]
    refused = CliRunner().invoke(app, [*arguments, "--epochs", "1"])
    assert "are options of ptq161 alone" in str(refused.exception)
    options = ["--format", "ptq161", "--epochs", "1", "--restore", "1"]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    again = source.with_name("again.gguf")
    refused = CliRunner().invoke(app, ["quantize", str(target), str(again), "--prompt", ""])
    assert "use the file from which it was made" in str(refused.exception)


def test_other_models_and_options_are_refused() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedCombinationError, match="ptq161 is for causal models whose"):
        ptq161.quantize_network(load_checkpoint("tiny-diffusion"), ["a text"])
    with pytest.raises(InvalidRequestError, match="epochs is -1"):
        ptq161.ptq161(epochs=-1)
    with pytest.raises(InvalidRequestError, match="restore is -1"):
        ptq161.ptq161(restore=-1)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        ptq161.calibration_texts(Path("/nowhere"))
