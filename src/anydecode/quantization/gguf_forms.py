"""The metadata of a GGUF file from the config of a model, by architecture, as llama.cpp's converter
names them. What a form does not say is found by comparing the architecture that the metadata
describe with that of the config (`differences`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from anydecode.models.families.config import rope_parameters, shared_size
from anydecode.models.families.patterns import FULL, SLIDING
from anydecode.models.families.rope import rope_type
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config, layer_config
from anydecode.models.loading.gguf_drafters import KEYS, ROPE_FREQS
from anydecode.models.loading.gguf_experts import SIGMOID, SOFTMAX
from anydecode.models.loading.gguf_keys import ARCHITECTURES
from anydecode.models.spec import LayerSpec, ModelSpec
from anydecode.quantization.gguf_recurrent_forms import (
    RECURRENT_FORMS,
    Form,
    Metadata,
    granite_factors,
    kv_heads,
)

_EMBEDDING_TOLERANCE = 5e-3  # of a factor that is rounded to bfloat16
_TOLERANCE = 1e-5
#: The divisor of a rotary frequency of 0, and what is no frequency.
_NO_ROTATION, _SMALLEST = 1e30, 1e-25


def _first(spec: ModelSpec) -> LayerSpec:
    return next(layer for layer in spec.layers if layer.attention is not None)


def _has_window(layer: LayerSpec) -> bool:
    return layer.attention is not None and layer.attention.window is not None


def _window(spec: ModelSpec) -> int | None:
    """The window of the layers that have one."""
    windows = (layer.attention.window for layer in spec.layers if layer.attention is not None)
    return next((window for window in windows if window is not None), None)


def _none(spec: ModelSpec, config: Config) -> Metadata:
    return {}


def _windows(spec: ModelSpec, config: Config) -> Metadata:
    """The window, and which layers have it."""
    window = _window(spec)
    if window is None:
        return {}
    flags = [_has_window(layer) for layer in spec.layers]
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": flags}


def _phi3(spec: ModelSpec, config: Config) -> Metadata:
    parameters = rope_parameters(config, FULL)
    original = parameters["original_max_position_embeddings"]
    found: Metadata = {
        "attention.sliding_window": _window(spec) or 0,
        "rope.scaling.original_context_length": original,
    }
    if rope_type(parameters) == "longrope":
        factor = parameters.get("attention_factor")
        if factor is None:
            scale = config["max_position_embeddings"] / original
            factor = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
        found["rope.scaling.attn_factor"] = float(factor)
    return found


def _gemma2(spec: ModelSpec, config: Config) -> Metadata:
    attention = _first(spec).attention
    assert attention is not None
    return {
        "attention.sliding_window": _window(spec) or 0,
        "attn_logit_softcapping": float(attention.softcap or 0.0),
        "final_logit_softcapping": float(spec.logit_softcap or 0.0),
    }


def _gemma3(spec: ModelSpec, config: Config) -> Metadata:
    found: Metadata = {"rope.freq_base_swa": float(rope_parameters(config, SLIDING)["rope_theta"])}
    if spec.logit_softcap is not None:
        found["final_logit_softcapping"] = spec.logit_softcap
    window = _window(spec)
    return found if window is None else {**found, "attention.sliding_window": window}


def _gpt_oss(spec: ModelSpec, config: Config) -> Metadata:
    return {"attention.sliding_window": _window(spec) or 0}


def _granite(spec: ModelSpec, config: Config) -> Metadata:
    return granite_factors(config)


def _cohere(spec: ModelSpec, config: Config) -> Metadata:
    found: Metadata = {"logit_scale": float(config["logit_scale"])}
    window = _window(spec)
    return found if window is None else {**found, "attention.sliding_window": window}


def _olmo(spec: ModelSpec, config: Config) -> Metadata:
    limit = config.get("clip_qkv")
    return {} if limit is None else {"attention.clamp_kqv": float(limit)}


def _mpt(spec: ModelSpec, config: Config) -> Metadata:
    return {
        **_olmo(spec, config),
        "attention.max_alibi_bias": float(config.get("alibi_bias_max", 8.0)),
    }


def _layer_sizes(spec: ModelSpec, config: Config) -> Metadata:
    """The sizes in which layers of Gemma 3n and 4 differ, and the layers that share keys and
    values."""
    count = len(spec.layers)
    found: Metadata = {
        **_windows(spec, config),
        "feed_forward_length": [layer_config(config, i)["intermediate_size"] for i in range(count)],
        "attention.shared_kv_layers": sum(x.cache_layer is not None for x in spec.layers),
        "embedding_length_per_layer_input": spec.per_layer_size,
        "rope.freq_base_swa": float(rope_parameters(config, SLIDING)["rope_theta"]),
    }
    if spec.logit_softcap is not None:
        found["final_logit_softcapping"] = spec.logit_softcap
    return found


def _gemma3n(spec: ModelSpec, config: Config) -> Metadata:
    cutoffs = [layer.gate_cutoff for layer in spec.layers]
    return {
        **_layer_sizes(spec, config),
        "altup.active_idx": spec.active_stream,
        "altup.num_inputs": spec.num_streams,
        "activation_sparsity_scale": [-math.inf if x is None else float(x) for x in cutoffs],
    }


def _gemma4(spec: ModelSpec, config: Config) -> Metadata:
    """Layers with a window have heads of another size."""
    shapes = [layer.attention for layer in spec.layers if layer.attention is not None]
    full, sliding = (
        next((x.head_dim for x in shapes if (x.window is None) == is_full), shapes[0].head_dim)
        for is_full in (True, False)
    )
    return {
        **_layer_sizes(spec, config),
        "attention.head_count_kv": [x.num_kv_heads for x in shapes],
        **dict.fromkeys(("attention.key_length", "attention.value_length"), full),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), sliding),
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }


def _parallel(spec: ModelSpec, config: Config) -> Metadata:
    return {"use_parallel_residual": spec.layers[0].is_parallel}


def _ministral3(spec: ModelSpec, config: Config) -> Metadata:
    """The growth of queries, and of the factor that YaRN has."""
    parameters = rope_parameters(config, FULL)
    keys = {
        "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        "attention.temperature_scale": "llama_4_scaling_beta",
    }
    return {key: float(parameters[x]) for key, x in keys.items() if parameters.get(x) is not None}


def _beside_shared(spec: ModelSpec, config: Config) -> Metadata:
    """Experts beside shared ones, behind the first layers, with sigmoid scores."""
    dense = next((i for i, layer in enumerate(spec.layers) if layer.num_experts), len(spec.layers))
    return {
        "expert_shared_count": int(config["n_shared_experts"]),
        "leading_dense_block_count": dense,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_gating_func": SIGMOID,
    }


def _deepseek(spec: ModelSpec, config: Config) -> Metadata:
    """DeepSeek-V2, V3, Kimi K2 and GLM-4.7-Flash. The attention is that of one head of keys:
    latents."""
    found = _latent(spec, config)
    if any(layer.num_experts for layer in spec.layers):
        found |= _groups_beside_shared(spec, config)
        if config["model_type"] == "deepseek_v2":
            found["expert_gating_func"] = SOFTMAX
    return found


def _groups_beside_shared(spec: ModelSpec, config: Config) -> Metadata:
    """The same with groups of experts, from some of which they are chosen."""
    return {
        **_beside_shared(spec, config),
        "expert_group_count": int(config.get("n_group") or 1),
        "expert_group_used_count": int(config.get("topk_group") or 1),
    }


def _kimi_linear(spec: ModelSpec, config: Config) -> Metadata:
    """Kimi Linear: recurrent layers have no key heads."""
    shape = next(layer.recurrence.shape for layer in spec.layers if layer.recurrence is not None)
    return {
        **_latent(spec, config),
        **_groups_beside_shared(spec, config),
        **kv_heads(spec),
        "ssm.conv_kernel": shape.window,
        "kda.head_dim": shape.head_dim,
    }


def _latent(spec: ModelSpec, config: Config) -> Metadata:
    """The sizes of latent attention."""
    attention, latent = _first(spec).attention, _first(spec).latent
    assert attention is not None and latent is not None
    rotary = attention.head_dim - attention.value_dim
    found: Metadata = {
        "attention.kv_lora_rank": attention.value_dim,
        "attention.value_length": attention.value_dim,
        "attention.key_length_mla": latent.key_dim + rotary,
        "attention.value_length_mla": latent.value_dim,
        "rope.dimension_count": rotary,
    }
    if config.get("q_lora_rank") is not None:
        found["attention.q_lora_rank"] = int(config["q_lora_rank"])
    multiplier = rope_parameters(config, FULL).get("mscale_all_dim")
    if multiplier:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * float(multiplier)
    return found


def _bert(spec: ModelSpec, config: Config) -> Metadata:
    return {"attention.causal": False}


def _modern_bert(spec: ModelSpec, config: Config) -> Metadata:
    """The window counts the tokens on both sides of one, and the pattern the layers from one with
    full attention to the next."""
    flags = [_has_window(layer) for layer in spec.layers]
    later = (index for index, flag in enumerate(flags) if index and not flag)
    return {
        **_bert(spec, config),
        "attention.sliding_window": 2 * ((_window(spec) or 1) - 1),
        "attention.sliding_window_pattern": next(later, len(flags)),
        "rope.freq_base_swa": float(rope_parameters(config, SLIDING)["rope_theta"]),
        "hidden_activation": str(config["hidden_activation"]),
    }


#: The architectures that can be written.
FORMS: dict[str, Form] = {
    **dict.fromkeys(
        (
            *("llama", "smollm3", "qwen2", "qwen3", "qwen3moe", "qwen2moe", "olmoe", "gemma"),
            *("gpt2", "starcoder", "codeshell", "falcon", "bloom"),
            *("seed_oss", "starcoder2", "arcee", "glm4", "chatglm", "ernie4_5", "nemotron", "phi2"),
        ),
        _none,
    ),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "olmo2": _windows,
    "exaone4": _windows,
    "granite": _granite,
    "command-r": _cohere,
    "cohere2": _cohere,
    "olmo": _olmo,
    **dict.fromkeys(("stablelm", "gptneox"), _parallel),
    "mistral3": _ministral3,
    **dict.fromkeys(("glm4moe", "dots1"), _beside_shared),
    "deepseek2": _deepseek,
    "kimi-linear": _kimi_linear,
    "mpt": _mpt,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "bert": _bert,
    "modern-bert": _modern_bert,
    **RECURRENT_FORMS,
}
#: Families whose files have the architecture of another one.
_OTHERS = {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "deepseek_v3": "deepseek2",
    **dict.fromkeys(("kimi_k2", "glm4_moe_lite"), "deepseek2"),
    "falcon_mamba": "mamba",
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "distilbert"), "bert"),
}
#: Architectures of models with experts, by those without.
_WITH_EXPERTS = {"nemotron_h": "nemotron_h_moe"}
#: Architectures whose experts have the size of `feed_forward_length`.
_WITHOUT_SIZE = ("llama", "olmoe", "granitehybrid")


def architectures() -> dict[str, str]:
    """The architecture of files by the key of the family, for all that can be written."""
    first: dict[str, str] = {}
    for name, (model_type, _) in ARCHITECTURES.items():
        if name in FORMS:
            first.setdefault(model_type, name)
    return first | _OTHERS


def architecture_of(model_type: str, spec: ModelSpec) -> str:
    """The architecture of the file of a model, whose `model_type` is one of `architectures`."""
    name = architectures()[model_type]
    has_experts = any(layer.num_experts for layer in spec.layers)
    return _WITH_EXPERTS.get(name, name) if has_experts else name


def metadata_of(architecture: str, spec: ModelSpec, config: Config) -> Metadata:
    """The metadata of a model, with whole keys.

    Args:
        architecture: A key of `FORMS`.
        spec: Its architecture.
        config: Its config, as `text_config` returns it.
    """
    values: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": config.get("intermediate_size"),
        "num_hidden_layers": len(spec.layers),
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": spec.norm_eps if spec.norm == "rms" else None,
    }
    layer = next((layer for layer in spec.layers if layer.attention is not None), None)
    if layer is not None and layer.attention is not None:
        attention = layer.attention
        values |= {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
        }
    own: Metadata = {KEYS[name]: value for name, value in values.items() if value is not None}
    own["vocab_size"] = spec.vocab_size
    if layer is not None:
        own["attention.value_length"] = own["attention.key_length"]
        own |= _rope(layer, config)
    if spec.norm == "layer":
        own["attention.layer_norm_epsilon"] = spec.norm_eps
    own |= _experts(architecture, spec, config)
    own |= FORMS[architecture](spec, config)
    return {f"{architecture}.{key}": value for key, value in own.items()}


def _experts(architecture: str, spec: ModelSpec, config: Config) -> Metadata:
    moe = FAMILIES[config["model_type"]].moe
    layer = next((layer for layer in spec.layers if layer.routing is not None), None)
    if moe is None or layer is None or layer.routing is None:
        return {}
    found: Metadata = {
        "expert_count": layer.num_experts,
        "expert_used_count": layer.routing.experts_per_token,
    }
    if architecture not in _WITHOUT_SIZE:
        found["expert_feed_forward_length"] = config[moe.inner_size]
    if size := shared_size(config, moe):
        found["expert_shared_feed_forward_length"] = size
    return found


def _rope(layer: LayerSpec, config: Config) -> Metadata:
    """The rotary embedding of layers with full attention."""
    if layer.rope is None:
        return {}
    parameters = rope_parameters(config, FULL)
    found: Metadata = {
        "rope.dimension_count": 2 * layer.rope.frequencies.size,
        KEYS["rope_theta"]: float(parameters["rope_theta"]),
    }
    kind = rope_type(parameters)
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = float(parameters["factor"])
    if kind == "longrope":
        found["rope.scaling.type"] = kind
    if kind != "yarn":
        return found
    original = parameters["original_max_position_embeddings"]
    found["rope.scaling.original_context_length"] = original
    for name, key in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if parameters.get(name) is not None:
            found[f"rope.scaling.{key}"] = float(parameters[name])
    return found


def rope_tensors(spec: ModelSpec, config: Config) -> dict[str, np.ndarray]:
    """The divisors of rotary frequencies, float32 `[rotary_dim / 2]`, by the names of their
    tensors; none if the metadata say them all."""
    layers = sorted(spec.layers, key=_has_window)  # that with full attention first
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    if rope is None:
        return {}
    parameters = rope_parameters(config, FULL)
    if rope_type(parameters) == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(parameters[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope_type(parameters) not in ("llama3", "proportional"):
        return {}
    size = 2 * rope.frequencies.size
    plain = parameters["rope_theta"] ** -(np.arange(0, size, 2) / size)
    rotates = rope.frequencies > 0
    divisors = np.full(len(plain), _NO_ROTATION)
    divisors[rotates] = plain[rotates] / rope.frequencies[rotates]
    return {ROPE_FREQS: divisors.astype(np.float32)}


def differences(own: Any, other: Any, name: str = "") -> Iterator[str]:
    """The names of the properties in which two architectures differ, but for the names of classes
    and the order of stored rows."""
    if is_dataclass(own) and type(own) is type(other):
        for field in fields(own):
            if field.name not in ("architecture", "interleaved_rope"):
                parts = getattr(own, field.name), getattr(other, field.name)
                yield from differences(*parts, f"{name}.{field.name}".lstrip("."))
    elif isinstance(own, tuple) and isinstance(other, tuple) and len(own) == len(other):
        for index, parts in enumerate(zip(own, other, strict=True)):
            yield from differences(*parts, f"{name}[{index}]")
    elif not _is_equal(own, other, name):
        yield name


def _is_equal(own: Any, other: Any, name: str) -> bool:
    if isinstance(own, np.ndarray) and isinstance(other, np.ndarray):
        return own.shape == other.shape and np.allclose(own, other, _TOLERANCE, _SMALLEST)
    if type(own) is float and type(other) is float:
        tolerance = _EMBEDDING_TOLERANCE if name == "embedding_scale" else _TOLERANCE
        return math.isclose(own, other, rel_tol=tolerance)
    return bool(own == other)
