"""Models in the 4-bit layouts of bitsandbytes, beside `transformers` with the numbers that they
mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from gguf_models import write_folder
from quantized_parts import bitsandbytes_four_bits
from tiny_models import built, chain, greedy, hf_logits, hf_model, logits

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
#: As `transformers` writes them.
SETTINGS = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
TEXT = [3 + 7 * i % 120 for i in range(24)]
Matrices = Iterator[tuple[str, np.ndarray]]


def linear(state: dict[str, np.ndarray], skipped: tuple[str, ...] = ()) -> Matrices:
    """The modules of a model that bitsandbytes quantises, `[out, in]`: all linear ones that are not
    skipped."""
    for name in [name for name, array in state.items() if array.ndim == 2]:
        module = name.removesuffix(".weight")
        if "embed" not in name and not module.startswith(("lm_head", *skipped)):
            yield module, state.pop(name)


def mixtral(state: dict[str, np.ndarray]) -> Matrices:
    """A module per matrix of each expert, as published; the router is quantised too."""
    for name in [name for name in state if ".experts." in name]:
        block, _, kind = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        for expert, matrix in enumerate(state.pop(name)):
            if kind == "down_proj":
                yield f"{block}.{expert}.w2", matrix
            else:
                for part, half in zip(("w1", "w3"), np.split(matrix, 2), strict=True):
                    yield f"{block}.{expert}.{part}", half
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        yield name.removesuffix(".weight").replace(".mlp.", ".block_sparse_moe."), state.pop(name)
    yield from linear(state)


def gpt_oss(state: dict[str, np.ndarray]) -> Matrices:
    """A module per expert with the rows of gate and up in turn, and a router inside of another
    module, as in files of Unsloth."""
    for name in [name for name in state if ".experts." in name]:
        block, _, kind = name.rpartition(".")
        for expert, part in enumerate(state.pop(name)):
            if kind.endswith("_bias"):
                state[f"{block}.{kind.removesuffix('_bias')}s.{expert}.bias"] = part
            else:
                yield f"{block}.{kind}s.{expert}", part.T
    for name in [name for name in state if ".router." in name]:
        state[name.replace(".router.", ".router.linear.")] = state.pop(name)
    yield from linear(state, tuple(f"model.layers.{layer}.mlp.router" for layer in range(2)))


def dynamic(state: dict[str, np.ndarray]) -> Matrices:
    """Some modules are skipped: one of three that are one product, and an MLP."""
    yield from linear(state, ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp"))


def gpt2(state: dict[str, np.ndarray]) -> Matrices:
    """Matrices that are `[in, out]` in the model; bitsandbytes has all as `[out, in]`."""
    for name in [name for name in state if "c_" in name and name.endswith(".weight")]:
        yield name.removesuffix(".weight"), state.pop(name).T


#: The prefix of the classes of `transformers`, their settings, and what is quantised.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, np.ndarray]], Matrices]]] = {
    "llama": ("Llama", {}, linear),
    "tied embeddings": ("Qwen2", {"tie_word_embeddings": True}, linear),
    "skipped modules": ("Qwen3", {"head_dim": 32}, dynamic),
    "fused projections": ("Phi3", {}, linear),
    "experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, mixtral),
    "experts of gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 8},
        gpt_oss,
    ),
    "queries, keys and values by head": ("GPTNeoX", {}, linear),
    "transposed matrices": ("GPT2", {"n_embd": 128, "n_head": 4, "n_layer": 2}, gpt2),
}


def save(
    folder: Path,
    model: Any,
    modules: Callable[[dict[str, np.ndarray]], Matrices],
    **options: Any,
) -> tuple[Path, set[str]]:
    """A folder with the model in 4 bits, in two shards that divide the parts of modules, and the
    names of its modules. The model gets the numbers that they mean."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors, names = {}, set()
    for module, matrix in modules(state):
        parts, values = bitsandbytes_four_bits(np.ascontiguousarray(matrix), **options)
        matrix[...] = values
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        names.add(module)
    tensors |= {name: np.ascontiguousarray(array) for name, array in state.items()}
    kind = options.get("kind", "nf4")
    settings = {**SETTINGS, "bnb_4bit_quant_type": kind}
    config = {**model.config.to_dict(), "quantization_config": settings}
    write_folder(folder, {}, **config)
    (folder / "model.safetensors").unlink()
    index = {}
    for shard in range(2):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        chosen = dict(list(tensors.items())[shard::2])
        save_file(chosen, folder / file)
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder, names


@pytest.mark.parametrize(
    "options", [{"is_nested": True}, {"kind": "fp4", "run": 128}], ids=["nf4", "fp4"]
)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_of_transformers(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    prefix, settings, modules = MODELS[name]
    model = hf_model(prefix, **{**SIZES, **settings})
    before = hf_logits(model, TEXT)
    folder, names = save(tmp_path / "m", model, modules, **options)
    expected = hf_logits(model, TEXT)
    checkpoint = load_checkpoint(folder)
    format = options.get("kind", "nf4").upper()
    packed = {
        name: tensor.format
        for name, tensor in checkpoint.tensors.items()
        if isinstance(tensor, Weight)
    }
    assert set(packed.values()) == {format}
    if prefix.startswith("GPT"):  # whose modules have other names here, and are divided
        assert len(packed) == len(names) + 2 * model.config.num_hidden_layers
    else:
        assert set(packed) == {f"{module}.weight" for module in names}
    exact = logits(built(checkpoint, "float32"), chain(TEXT))
    assert np.abs(exact - expected).max() < 1e-4 < 0.1 < np.abs(exact - before).max()
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    native = built(checkpoint, executor=choose_executor("native"))
    assert {weight.format for weight in native.network.matrices()} >= {format}
    found = logits(native, chain(TEXT))
    share = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    change = np.linalg.norm(found - before) / np.linalg.norm(before)
    assert share < 0.1 < 0.3 < change  # rounded activations; other weights
    cache = native.new_cache(64)
    parts = [(0, 1), (1, 17), (17, 24)]
    steps = [logits(native, chain(TEXT[a:b], a), cache) for a, b in parts]
    assert np.array_equal(np.concatenate(steps), found)


def test_greedy_texts_are_those_of_transformers(tmp_path: Path) -> None:
    """64 tokens, with the weights expanded: rounded activations decide near-ties."""
    model = hf_model("Llama", **SIZES)
    folder, _ = save(tmp_path / "m", model, linear, is_nested=True)
    import torch

    answer = model.generate(
        torch.tensor([TEXT]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    assert greedy(built(load_checkpoint(folder), "float32"), TEXT, 64) == answer[0, 24:].tolist()


def test_packed_weights_take_four_and_a_half_bits(tmp_path: Path) -> None:
    """4 bits and a float32 number for every 64 weights; the file has one for every 256."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    model = hf_model("Llama", **{**SIZES, "vocab_size": 64})
    folder, names = save(tmp_path / "m", model, linear, run=256)
    native = built(load_checkpoint(folder), executor=choose_executor("native"))
    weights = [one for one in native.network.matrices() if one.name in names]
    assert len(weights) == len(names) == 14
    count = sum(one.out_features * one.in_features for one in weights)
    outer = 2 * 4 * 64 * 128  # bytes of the embedding and the head, in float32
    assert (native.executor.packer.num_bytes - outer) * 8 == 4.5 * count


@pytest.mark.parametrize("storage", [np.float16, bfloat16, np.float32, np.int8])
def test_codes_may_be_stored_as_numbers_of_another_type(storage: Any, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, which FSDP needs."""
    matrix = np.random.default_rng(2).standard_normal((6, 128), np.float32)
    parts, values = bitsandbytes_four_bits(matrix)
    parts["weight"] = parts["weight"].reshape(-1).view(storage).reshape(-1, 1)
    tensors = {f"x.{part}": array for part, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=SETTINGS)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight) and weight.format == "NF4"
    assert np.array_equal(dequantize(weight), values)


@pytest.mark.parametrize("run", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("width", [64, 96, 192])
@pytest.mark.parametrize("is_nested", [False, True])
def test_runs_of_every_size_go_on_from_row_to_row(
    run: int, width: int, is_nested: bool, tmp_path: Path
) -> None:
    """Rows of a multiple of 64 are packed, with a run of such a size; others become plain."""
    matrix = np.random.default_rng(2).standard_normal((35, width), np.float32)
    parts, values = bitsandbytes_four_bits(matrix, "fp4", is_nested, "float32", run)
    tensors = {f"x.{part}": array for part, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=SETTINGS)
    weight = load_checkpoint(folder).tensors["x.weight"]
    assert isinstance(weight, Weight)
    assert weight.format == ("F32" if run == 32 or width == 96 else "FP4")
    assert np.array_equal(dequantize(weight), values)
    if not is_nested:  # runs that begin anew in each row are others
        rows = [bitsandbytes_four_bits(row[None], "fp4", run=run)[1] for row in matrix]
        assert np.array_equal(np.concatenate(rows), values) == (width % run == 0)


@pytest.mark.parametrize("part", ["weight.nested_absmax", "weight.nested_quant_map", "weight"])
def test_a_missing_part_is_named(part: str, tmp_path: Path) -> None:
    matrix = np.random.default_rng(2).standard_normal((6, 128), np.float32)
    parts, _ = bitsandbytes_four_bits(matrix, is_nested=True)
    del parts[part]
    tensors = {f"x.{name}": array for name, array in parts.items()}
    folder = write_folder(tmp_path / "m", tensors, quantization_config=SETTINGS)
    with pytest.raises(CheckpointError, match=part.removeprefix("weight.")) as caught:
        load_checkpoint(folder).tensors["x.weight"]
    assert "\n" not in str(caught.value) and "x" in str(caught.value)
