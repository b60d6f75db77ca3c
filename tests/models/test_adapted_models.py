"""Folders of adapters that are opened as models: packed matrices keep their format, and the adapter
is computed beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from safetensors.numpy import save_file

from anydecode import LLM
from anydecode.benchmarks.divergence import logits_of
from anydecode.certification.checks import Restarts
from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize, plain_weight, quantize
from anydecode.kernels.library import load_library
from anydecode.models.linear import Linear
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import open_model
from anydecode.models.scripted import ByteTokenizer
from gguf_models import LAYERS, SIZES, make_tensors

RANK, SCALE = 3, 2.0
MODULES = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
IDS = [3, 1, 4, 15, 9, 2, 6, 5]


def save_model(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    config = {
        **SIZES,
        "vocab_size": 259,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def base_tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    tensors = make_tensors("llama")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = generator.standard_normal((259, SIZES["hidden_size"]), np.float32)
    return {
        name: x * np.float32(0.2) if x.ndim == 2 and ".layers." in name else x
        for name, x in tensors.items()
    }


def save_adapter(folder: Path, base: Path, block: int | None) -> dict[str, np.ndarray]:
    """Write an adapter whose update of every weight is below half of a step of four bits, so that
    rounding its sum with the packed weights would remove it. Returns the updates."""
    folder.mkdir()
    generator = np.random.default_rng(7)
    tensors, updates = {}, {}
    for layer in range(LAYERS):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            rows, columns = base_tensors()[f"{name}.weight"].shape
            down = generator.standard_normal((RANK, columns), np.float32) * np.float32(0.12)
            up = generator.standard_normal((rows, RANK), np.float32) * np.float32(0.12)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            updates[f"{name}.weight"] = np.float32(SCALE) * (up @ down)
    config = {
        "base_model_name_or_path": str(base),
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    if block is not None:
        settings = {"block_size": block, "mask_token_id": 257, "right_shift_logits": True}
        (folder / "block.json").write_text(json.dumps(settings))
    return updates


def linears(network: Any) -> dict[str, Linear]:
    found = {}
    for layer in network.weights.layers:
        for linear in (
            layer.query,
            layer.key,
            layer.value,
            layer.output,
            *vars(layer.mlp).values(),
        ):
            found[linear.weight.name] = linear
    return found


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_adapter_is_computed_beside_packed_weights(tmp_path: Path, backend: str) -> None:
    """The logits are near those of the sum of the dequantised weights and the update; without the
    update, or if their sum is packed again, they are not."""
    if backend == "native" and load_library() is None:
        pytest.skip("no compiler")
    if backend == "torch":
        pytest.importorskip("torch")
    tensors = base_tensors()
    base = save_model(tmp_path / "base", tensors)
    updates = save_adapter(tmp_path / "adapter", base, None)
    packed = {
        name: dequantize(quantize(x, "Q4_0", name)) if name in updates or ".mlp." in name else x
        for name, x in tensors.items()
    }
    summed = {name: x + updates.get(name, 0.0) for name, x in packed.items()}
    summed = {name: np.ascontiguousarray(x, np.float32) for name, x in summed.items()}
    save_model(tmp_path / "sum", summed)

    def logits(folder: str, dtype: str) -> np.ndarray:
        model, _ = open_model(tmp_path / folder, dtype=dtype, threads=1, backend=backend)
        return logits_of(model, IDS)

    expected, beside = logits("sum", "float32"), logits("adapter", "int4")
    model, _ = open_model(tmp_path / "adapter", dtype="int4", threads=1, backend=backend)
    found = linears(model.network)
    assert {linear.weight.format for linear in found.values()} == {"Q4_0"}
    for name, linear in found.items():
        assert (linear.update is not None) == (f"{name}.weight" in updates), name
    error = np.abs(beside - expected).mean()
    assert np.abs(logits("base", "int4") - expected).mean() > 4 * error
    assert np.abs(logits("sum", "int4") - expected).mean() > 1.3 * error


def test_plain_weights_have_the_adapter_merged(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", base_tensors())
    updates = save_adapter(tmp_path / "adapter", base, None)
    checkpoint = load_checkpoint(tmp_path / "adapter")
    for name, update in updates.items():
        merged = np.asarray(checkpoint.tensors[name], np.float32)
        assert np.abs(merged - base_tensors()[name] - update).max() < 0.01
    model, _ = open_model(tmp_path / "adapter", dtype="float32", threads=1)
    assert all(linear.update is None for linear in linears(model.network).values())


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["sdar:threshold=0.2", "fast-dllm:cache=block,threshold=0.2"])
def test_blocks_beside_packed_weights_are_equal_alone_batched_and_restarted(
    tmp_path: Path, decoder: str
) -> None:
    base = save_model(tmp_path / "base", base_tensors())
    save_adapter(tmp_path / "adapter", base, 4)
    prompts = [[5, 6, 7], [9], list(range(30, 41)), [3, 3]]
    options: dict[str, Any] = {"decoder": decoder, "max_tokens": 18, "ignore_eos": True, "seed": 3}

    def opened() -> LLM:
        model, _ = open_model(tmp_path / "adapter", dtype="int4", threads=1)
        assert (model.spec.block_size, model.spec.logit_shift) == (4, 1)
        return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024)

    for temperature in (0.0, 0.9):
        with opened() as llm:
            alone = [llm.generate(p, temperature=temperature, **options).tokens for p in prompts]
            batch = llm.generate(prompts, temperature=temperature, **options)
            assert [one.tokens for one in batch] == alone
        with opened() as llm, Restarts(llm.engine, seed=2):
            batch = llm.generate(prompts, temperature=temperature, **options)
            assert [one.tokens for one in batch] == alone
            llm.engine.check_integrity()


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", base_tensors())
    save_adapter(tmp_path / "adapter", base, None)
    name = "base_model.model.model.layers.0.mlp.up_proj"
    wrong = {
        f"{name}.lora_A.weight": np.ones((RANK, 32), np.float32),
        f"{name}.lora_B.weight": np.ones((96, RANK), np.float32),
    }
    save_file(wrong, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \(96, 32\)"):
        open_model(tmp_path / "adapter", dtype="int4", threads=1)


def test_an_update_is_the_product_of_its_matrices() -> None:
    torch = pytest.importorskip("torch")
    from anydecode.kernels.reference import ReferenceBackend

    generator = np.random.default_rng(1)
    matrices = [generator.standard_normal(shape, np.float32) for shape in ((6, 4), (2, 4), (6, 2))]
    weight, down, up = map(plain_weight, matrices)
    x = generator.standard_normal((3, 4), np.float32)
    linear = Linear(weight, scale=0.5, update=(down, up))
    found = linear.apply(ReferenceBackend("cpu"), torch.from_numpy(x)).numpy()
    expected = 0.5 * (x @ matrices[0].T + x @ matrices[1].T @ matrices[2].T)
    assert np.allclose(found, expected, atol=1e-5)
    assert linear.matrices == [weight, down, up]
