"""LoRA adapters against PEFT, and rows with different adapters in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, get_peft_model

from anydecode.errors import CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.lora import read_factors
from anydecode.models.opening import choose_executor
from tiny_models import LATENT_SIZES, chain, hf_logits, hf_model, logits, make_rows, own_model

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("Llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "everything": ("Llama", {"r": 3, "lora_alpha": 7, "target_modules": ALL}),
    "rslora": ("Llama", {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL}),
    "patterns": (
        "Llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "one layer": (
        "Qwen2",
        {"r": 4, "target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    ),
    "plain mlp": ("Starcoder2", {"r": 4, "target_modules": ["q_proj", "c_fc", "c_proj"]}),
    "interleaved": ("Ernie4_5", {"r": 4, "lora_alpha": 8, "target_modules": ALL}),
    "pairs of heads": ("DiffLlama", {"r": 4, "target_modules": ALL}),
    "interleaved partially": ("Glm4", {"r": 4, "target_modules": ["q_proj", "k_proj"]}),
    "fused": ("Phi3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]}),
}


def save_peft_model(
    family: str, options: dict[str, Any], path: Path, seed: int = 0, **settings: Any
) -> Any:
    """A PEFT model with random factors, saved to `path`."""
    torch.manual_seed(seed + 1)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = get_peft_model(hf_model(family, **settings), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return model.eval()


def adapter_logits(model: Any, adapter: int, tokens: list[int]) -> np.ndarray:
    rows = chain(tokens)
    rows.adapters = np.full(len(tokens), adapter, np.int32)
    return logits(model, rows)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_peft(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    peft_model = save_peft_model(family, options, tmp_path)
    expected = hf_logits(peft_model, PROMPT)
    ours = own_model(hf_model(family))
    plain = logits(ours, chain(PROMPT))
    assert ours.add_adapter(tmp_path) == 0
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 1e-2
    assert np.array_equal(adapter_logits(ours, -1, PROMPT), plain)
    assert np.array_equal(logits(ours, chain(PROMPT)), plain)


def test_adapters_of_recurrent_layers(tmp_path: Path) -> None:
    """The input projection is several products here, so that adapters cannot target it."""
    settings = {"layer_types": ["conv", "full_attention", "conv"]}
    options = {"r": 4, "target_modules": ["out_proj", "q_proj", "w1"]}
    expected = hf_logits(save_peft_model("Lfm2", options, tmp_path / "a", **settings), PROMPT)
    ours = own_model(hf_model("Lfm2", **settings))
    ours.add_adapter(tmp_path / "a")
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() < 1e-4
    save_peft_model("Lfm2", {"r": 4, "target_modules": ["in_proj"]}, tmp_path / "b", **settings)
    with pytest.raises(CheckpointError, match="conv.in_proj that an adapter can target"):
        ours.add_adapter(tmp_path / "b")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_adapters_of_latent_attention(tmp_path: Path, backend: str) -> None:
    """The matrix of keys and values is split by head, and its key part transposed."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    settings = {
        **LATENT_SIZES,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
    }
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    options = {"r": 3, "lora_alpha": 7, "target_modules": names}
    expected = hf_logits(save_peft_model("DeepseekV3", options, tmp_path, **settings), PROMPT)
    ours = own_model(hf_model("DeepseekV3", **settings), executor=choose_executor(backend))
    plain = logits(ours, chain(PROMPT))
    ours.add_adapter(tmp_path)
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 1e-2
    edit_tensors(
        tmp_path, lambda t: {k: v[:-1] if "kv_b_proj.lora_B" in k else v for k, v in t.items()}
    )
    with pytest.raises(CheckpointError, match="kv_b_proj has 87 outputs, the model 88"):
        ours.add_adapter(tmp_path)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_adapters_of_gemma4(tmp_path: Path, backend: str) -> None:
    """Of keys that are values too, of an MLP beside experts, and of the embeddings per layer, whose
    projection is computed before the layers."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    settings = {
        "initializer_range": 0.05,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "head_dim": 12,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    names = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
    names += ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
    options = {"r": 3, "lora_alpha": 7, "target_modules": names}
    expected = hf_logits(save_peft_model("Gemma4", options, tmp_path, **settings), PROMPT)
    ours = own_model(hf_model("Gemma4", **settings), executor=choose_executor(backend))
    plain = logits(ours, chain(PROMPT))
    ours.add_adapter(tmp_path)
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 1e-2


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_adapters_of_gemma3n(tmp_path: Path, backend: str) -> None:
    """Of the low-rank residuals and of the matrices that predict and correct streams."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    settings = {
        "initializer_range": 0.05,
        "layer_types": ["full_attention"] * 3,
        "head_dim": 12,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
        "num_kv_shared_layers": 1,
        "laurel_rank": 6,
    }
    names = ["q_proj", "gate_proj", "linear_left", "linear_right", "modality_router"]
    names += ["prediction_coefs", "correction_coefs", "per_layer_input_gate"]
    options = {"r": 3, "lora_alpha": 7, "target_modules": names}
    expected = hf_logits(save_peft_model("Gemma3n", options, tmp_path, **settings), PROMPT)
    ours = own_model(hf_model("Gemma3n", **settings), executor=choose_executor(backend))
    plain = logits(ours, chain(PROMPT))
    ours.add_adapter(tmp_path)
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() < 1e-4
    assert np.abs(plain - expected).max() > 1e-2


@pytest.mark.parametrize("module", ["x_proj", "dt_proj"])
def test_adapters_cannot_target_the_gates_of_mamba(module: str, tmp_path: Path) -> None:
    save_peft_model("Mamba", {"r": 4, "target_modules": [module]}, tmp_path)
    with pytest.raises(CheckpointError, match=f"mixer.{module} that an adapter can target"):
        own_model(hf_model("Mamba")).add_adapter(tmp_path)


@pytest.mark.parametrize(
    ("patterns", "scale"),
    [
        ({}, 4 / 2),
        ({"q_proj": 6}, 6 / 2),
        ({"attn.q_proj": 6}, 6 / 2),
        ({"model.layers.0.attn.q_proj": 6}, 6 / 2),
        ({"proj": 6, "tn.q_proj": 8, "layers.0.attn": 10}, 4 / 2),  # no whole names at the end
    ],
)
def test_an_alpha_belongs_to_the_modules_whose_names_end_with_its_key(
    patterns: dict[str, int], scale: float, tmp_path: Path
) -> None:
    stem = "base_model.model.model.layers.0.attn.q_proj"
    factors = {"A": np.ones((2, 8), np.float32), "B": np.ones((8, 2), np.float32)}
    save_file(
        {f"{stem}.lora_{name}.weight": factor for name, factor in factors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (module,) = read_factors(tmp_path)[1].values()
    assert module.scale == scale


@pytest.mark.parametrize("change", [{"lora_alpha": 9}, {"use_rslora": True}])
def test_a_wrong_scale_changes_the_logits(change: dict[str, Any], tmp_path: Path) -> None:
    """Negative control: another alpha, or the other rule for the scale, exceeds the margin."""
    peft_model = save_peft_model("Llama", CASES["attention"][1], tmp_path)
    expected = hf_logits(peft_model, PROMPT)
    rewrite(tmp_path, **change)
    ours = own_model(hf_model("Llama"))
    ours.add_adapter(tmp_path)
    assert np.abs(adapter_logits(ours, 0, PROMPT) - expected).max() > 1e-3


def test_rows_use_their_own_adapters(tmp_path: Path) -> None:
    """Three sequences in one pass, two with adapters and one without, are bit-equal to separate
    passes."""
    model = own_model(hf_model("Llama"))
    for number, case in enumerate(("everything", "attention")):
        save_peft_model("Llama", CASES[case][1], tmp_path / case, seed=number)
        assert model.add_adapter(tmp_path / case) == number
    count = len(PROMPT)
    rows = make_rows(
        PROMPT * 3,
        list(range(count)) * 3,
        range(3 * count),
        [np.arange(i * count, (i + 1) * count) for i in range(3)],
        [0] * count + [1] * count + [2] * count,
        list(range(1, count + 1)) * 3,
    )
    rows.adapters = np.repeat(np.array([1, -1, 0], np.int32), count)
    together = logits(model, rows).reshape(3, count, -1)
    for part, adapter in zip(together, (1, -1, 0), strict=True):
        assert np.array_equal(part, adapter_logits(model, adapter, PROMPT))
    assert not np.array_equal(together[0], together[2])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_adapters_of_experts_and_routers(tmp_path: Path, backend: str) -> None:
    """Adapters of single experts and of the router, with the names of saved files."""
    if backend == "native" and load_library() is None:
        pytest.skip("the native kernels are not available here")
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    merged_model = own_model(hf_model("Qwen3Moe", **settings))
    model = own_model(hf_model("Qwen3Moe", **settings), executor=choose_executor(backend))
    generator = np.random.default_rng(0)
    factors, stem = {}, "base_model.model.model.layers.1.mlp"
    for name, out, width in (("experts.2.up_proj", 24, 48), ("gate", 4, 48)):
        factors[f"{stem}.{name}.lora_A.weight"] = generator.standard_normal((2, width), np.float32)
        factors[f"{stem}.{name}.lora_B.weight"] = generator.standard_normal((out, 2), np.float32)
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 1}')
    plain = logits(model, chain(PROMPT))
    model.add_adapter(tmp_path)
    adapted = adapter_logits(model, 0, PROMPT)
    layer = merged_model.network.weights.layers[1].mlp
    for weight, name in (
        (layer.routed.up[2], "experts.2.up_proj"),
        (layer.router.weight, "gate"),
    ):
        down, up = (factors[f"{stem}.{name}.lora_{x}.weight"] for x in "AB")
        weight.data = weight.data + up @ down * np.float32(0.5)
    assert np.abs(logits(merged_model, chain(PROMPT)) - adapted).max() < 1e-4
    assert np.abs(plain - adapted).max() > 1e-3


def rewrite(path: Path, **change: Any) -> None:
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **change}))


def edit_tensors(path: Path, edit: Any) -> None:
    file = path / "adapter_model.safetensors"
    save_file(edit(load_file(file)), file)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda p: rewrite(p, peft_type="IA3"), "type IA3"),
        (lambda p: rewrite(p, use_dora=True), "use_dora=True"),
        (lambda p: rewrite(p, bias="all"), "bias='all'"),
        (lambda p: rewrite(p, r=5), "has rank 4, but its config has 5"),
        (lambda p: (p / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda p: (p / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda p: (p / "adapter_model.safetensors").write_bytes(b"xx"), "cannot be read"),
        (
            lambda p: edit_tensors(p, lambda t: dict(list(t.items())[1:])),
            "lora_A.weight is missing",
        ),
        (
            lambda p: edit_tensors(p, lambda t: {k.replace("q_", "z_"): v for k, v in t.items()}),
            "no module model.layers.0.self_attn.z_proj",
        ),
        (
            lambda p: edit_tensors(
                p, lambda t: {k: v[:, :9].copy() if "_A" in k else v for k, v in t.items()}
            ),
            "do not fit",
        ),
        (lambda p: edit_tensors(p, lambda t: {**t, "x.magnitude": np.ones(1)}), "x.magnitude"),
        (
            lambda p: edit_tensors(p, lambda t: {k: v * np.float32("nan") for k, v in t.items()}),
            "not finite",
        ),
    ],
)
def test_broken_adapters_are_rejected(corrupt: Any, message: str, tmp_path: Path) -> None:
    save_peft_model("Llama", CASES["attention"][1], tmp_path)
    corrupt(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        own_model(hf_model("Llama")).add_adapter(tmp_path)
