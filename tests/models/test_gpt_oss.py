"""gpt-oss in the layouts of its checkpoints: MXFP4 in safetensors and in GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from anydecode import LLM
from anydecode.decoders.framework.attention_probe import AttentionProbe
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.interface import OutputSpec, Weight
from anydecode.kernels.library import load_library
from anydecode.models.families import load_network, spec_from_config
from anydecode.models.loading import load_checkpoint
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from gguf_models import finish, start_writer, write_folder
from tiny_models import built, chain, checkpoint_of, greedy, hf_logits, hf_model, logits, whole

PROMPT = [5, 17, 99, 3, 128, 64, 64, 11, 42]
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
EXPERTS, HIDDEN, INNER = 4, 64, 96
SETTINGS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
}
LAYOUTS = ("safetensors", "gguf")
#: The names of llama.cpp's converter.
GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    **{
        f"self_attn.{part}_proj.{leaf}": f"attn_{name}.{leaf}"
        for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
        for leaf in ("weight", "bias")
    },
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def packed_model() -> tuple[Any, dict[str, np.ndarray]]:
    """A model of `transformers` with dequantised MXFP4 experts, and its tensors as published.

    `transformers` dequantises the experts.
    """
    model = hf_model("GptOss", **SETTINGS)
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = np.random.default_rng(7)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for layer in range(model.config.num_hidden_layers):
        for kind, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            name = f"model.layers.{layer}.mlp.experts.{kind}_proj"
            shape = (EXPERTS, rows, columns // 32)
            blocks = generator.integers(0, 256, (*shape, 16), np.uint8)
            scales = generator.integers(121, 126, shape, np.uint8)
            values = convert_moe_packed_tensors(
                torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
            )
            model.get_parameter(name).data.copy_(values)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return model, tensors


def write_safetensors(path: Path, model: Any, tensors: dict[str, np.ndarray]) -> Path:
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    folder = write_folder(path / "tiny", tensors, **config)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    return folder


def gguf_block(blocks: np.ndarray, scale: int) -> np.ndarray:
    """One MXFP4 block of 32 values: byte i of the source holds the values 2i and 2i + 1, byte i of
    GGUF's the values i and i + 16."""
    values = [nibble for byte in blocks.tolist() for nibble in (byte & 15, byte >> 4)]
    packed = [values[i] | values[i + 16] << 4 for i in range(16)]
    return np.array([scale, *packed], np.uint8)


def gguf_rows(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    flat = zip(blocks.reshape(-1, 16), scales.ravel().tolist(), strict=True)
    return np.stack([gguf_block(*pair) for pair in flat]).reshape(*blocks.shape[:2], -1)


def write_gguf(path: Path, model: Any, tensors: dict[str, np.ndarray]) -> Path:
    config = model.config
    sizes = {
        name: getattr(config, name)
        for name in (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size",
        )
    }  # fmt: skip
    file = path / "tiny.gguf"
    writer = start_writer(file, "gpt-oss", sizes)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(ROPE["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(ROPE["factor"])
    writer.add_rope_scaling_orig_ctx_len(ROPE["original_max_position_embeddings"])
    for name, tensor in tensors.items():
        if name in OUTER:
            writer.add_tensor(OUTER[name], tensor)
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest in GGUF_NAMES:
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[rest]}", tensor)
            continue
        kind, _, leaf = rest.removeprefix("mlp.experts.").partition("_proj")
        parts = {"down": tensor}
        if kind == "gate_up":
            parts = {"gate": tensor[:, 0::2], "up": tensor[:, 1::2]}
        for part, values in parts.items():
            target = f"blk.{layer}.ffn_{part}_exps"
            if leaf == "_bias":
                writer.add_tensor(f"{target}.bias", np.ascontiguousarray(values))
            elif leaf == "_blocks":
                scales = tensors[name.replace("_blocks", "_scales")]
                scales = scales if kind == "down" else scales[:, int(part == "up") :: 2]
                kind_code = gguf.GGMLQuantizationType.MXFP4
                writer.add_tensor(
                    f"{target}.weight", gguf_rows(values, scales), raw_dtype=kind_code
                )
    finish(writer)
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, tensors = packed_model()
    path = tmp_path_factory.mktemp("gpt-oss")
    return {
        "reference": model,
        "tensors": tensors,
        "safetensors": write_safetensors(path, model, tensors),
        "gguf": write_gguf(path, model, tensors),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_experts_match_transformers(models: dict[str, Any], layout: str) -> None:
    checkpoint = load_checkpoint(models[layout])
    model = built(checkpoint)
    routed = model.network.weights.layers[1].mlp.routed
    assert {weight.format for weight in routed.matrices} == {"MXFP4"}
    tokens = greedy(model, PROMPT, 64)
    text = PROMPT + tokens
    expected = hf_logits(models["reference"], text)
    assert np.abs(logits(model, chain(text)) - expected).max() < 1e-4
    assert tokens == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(set(tokens)) > 2


def test_both_layouts_hold_the_same_model(models: dict[str, Any]) -> None:
    """Every stored bit of the experts, and the config's rope, windows and biases."""
    one, other = (load_network(load_checkpoint(models[layout])) for layout in LAYOUTS)
    for layer, twin in zip(one.weights.layers, other.weights.layers, strict=True):
        for weight, same in zip(layer.mlp.routed.matrices, twin.mlp.routed.matrices, strict=True):
            assert (weight.name, weight.format) == (same.name, same.format)
            assert np.array_equal(weight.data, same.data)
        assert np.array_equal(layer.sinks, twin.sinks)
    for layer, twin in zip(one.spec.layers, other.spec.layers, strict=True):
        assert layer.attention == twin.attention and layer.routing == twin.routing
        assert np.allclose(layer.rope.frequencies, twin.rope.frequencies)
        assert layer.rope.factor == pytest.approx(twin.rope.factor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_native_kernels_run_packed_experts(models: dict[str, Any], layout: str) -> None:
    """Products of MXFP4 round activations to int8; passes of any size have the same bits."""
    if load_library() is None:
        pytest.skip("the native kernels are not available here")
    model = built(load_checkpoint(models[layout]), executor=choose_executor("native"))
    text = (PROMPT * 25)[:200]
    together = logits(model, chain(text), model.new_cache(200))
    expected = hf_logits(models["reference"], text)
    # Rounding may change which experts a row is routed to, so single rows may differ by more.
    errors = np.abs(together - expected).max(-1)
    assert np.median(errors) < 0.05 * np.abs(expected).max()
    cache = model.new_cache(200)
    parts = [
        logits(model, chain(text[:150]), cache),
        logits(model, chain(text[150:199], 150), cache),
    ]
    parts.append(logits(model, chain(text[199:], 199), cache))
    assert np.array_equal(np.concatenate(parts), together)


@pytest.mark.parametrize("cache", [None, "int8"])
def test_prefix_cache_batches_and_multi_step(models: dict[str, Any], cache: str | None) -> None:
    """The engine's tokens equal those of single passes, for new and for cached prompts."""
    executor = choose_executor("native" if load_library() else "torch")
    model = built(load_checkpoint(models["safetensors"]), executor=executor)
    prompts = [(PROMPT * 9)[:70], (PROMPT * 9)[:70] + [7], [3, 4]]
    with LLM(model, tokenizer=ByteTokenizer(), cache=cache) as llm:
        alone = [llm.generate(prompt, max_tokens=24, ignore_eos=True).tokens for prompt in prompts]
        again = llm.generate(prompts, max_tokens=24, ignore_eos=True)
        assert [one.tokens for one in again] == alone
    if cache is None:
        fresh = built(load_checkpoint(models["safetensors"]), executor=executor)
        assert alone == [greedy(fresh, prompt, 24) for prompt in prompts]


def test_attention_probe_counts_the_sink(models: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    reference, layer = models["reference"], 1  # full attention
    with torch.inference_mode():
        output = reference(
            torch.tensor([PROMPT]), output_attentions=True, output_hidden_states=True
        )
    model = built(load_checkpoint(models["safetensors"]))
    rows, cache = whole(chain(PROMPT), model), model.new_cache(16)
    model.run(rows, cache, OutputSpec(np.arange(len(PROMPT), dtype=np.int32)))
    positions = np.arange(len(PROMPT))
    state = output.hidden_states[layer][0].numpy()
    weights = AttentionProbe(model).attention(layer, state, positions, cache, positions, positions)
    assert np.abs(weights - output.attentions[layer][0].numpy()).max() < 1e-5
    assert (weights.sum(-1) < 1).all()


def test_the_triton_kernels_refuse_sinks(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anydecode.kernels.cuda.available.unavailable_reason", lambda: None)
    with pytest.raises(UnsupportedCombinationError, match="attention sinks"):
        built(load_checkpoint(models["safetensors"]), executor=choose_executor("triton"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("self_attn.sinks", None, "self_attn.sinks is missing"),
        ("mlp.router.bias", None, "mlp.router.bias is missing"),
        ("mlp.experts.down_proj_scales", None, "down_proj_scales is missing"),
        ("mlp.experts.gate_up_proj_bias", None, "gate_proj.bias is missing"),
        ("self_attn.sinks", np.zeros(3, np.float32), r"sinks has shape \(3,\), not \(4,\)"),
        (
            "mlp.experts.gate_up_proj_blocks",
            np.zeros((4, 192, 3, 16), np.uint8),
            r"blocks has shape \(4, 192, 3, 16\), not \(4, 192, 2, 16\)",
        ),
        ("mlp.experts.down_proj_scales", np.zeros((4, 64, 3), np.int8), "no tensor of bytes"),
    ],
)
def test_damaged_tensors_end_in_one_line(
    models: dict[str, Any], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensors = {**models["tensors"], f"model.layers.1.{name}": change}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    folder = write_safetensors(tmp_path, models["reference"], tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_network(load_checkpoint(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("swiglu_limit", "7", "swiglu_limit is '7'"),
        ("swiglu_limit", -1.0, "swiglu_limit is -1.0"),
        ("swiglu_alpha", [], "swiglu_alpha is"),
        ("num_experts_per_tok", 5, "experts_per_token is 5"),
        ("num_local_experts", None, "lacks 'num_local_experts'"),
        ("rope_parameters", {**ROPE, "truncate": 3}, "truncate is 3"),
    ],
)
def test_invalid_configs_end_in_one_line(key: str, value: Any, message: str) -> None:
    config = {**checkpoint_of(hf_model("GptOss", **SETTINGS)).config, key: value}
    with pytest.raises(CheckpointError, match=message) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)


def test_a_weight_of_another_format_is_requested(models: dict[str, Any]) -> None:
    network = load_network(load_checkpoint(models["gguf"]), "int8")
    routed = network.weights.layers[0].mlp.routed
    assert {weight.format for weight in routed.matrices} == {"Q8_0"}
    exact = load_network(load_checkpoint(models["gguf"]), "float32").weights.layers[0].mlp.routed
    experts = models["reference"].model.layers[0].mlp.experts
    expected = experts.gate_up_proj.detach().numpy()
    assert isinstance(exact.gate[2], Weight)
    assert np.array_equal(exact.gate[2].data, expected[2, :, 0::2].T)
    assert np.array_equal(exact.up[3].data, expected[3, :, 1::2].T)
