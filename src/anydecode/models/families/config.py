"""Converts a Hugging Face `config.json` to a `ModelSpec`, for every supported family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import Activation, Attention, ClampedSwiglu, Rope, Routing
from anydecode.models.families.rope import make_rope, rope_type
from anydecode.models.limits import (
    MAX_COUNT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TOKENS,
    integer,
    number,
    refusal,
)
from anydecode.models.spec import LayerSpec, ModelSpec

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class MixtureOfExperts:
    """The properties of a family's mixture of experts.

    Attributes:
        inner_size: The config's key for the inner size of an expert.
        is_normalised: The default of `norm_topk_prob`, see `Routing.normalise`.
        has_biases: Whether the router and the experts have biases.
        is_interleaved: Whether stacked matrices are `[experts, in, out]`, with the columns of gate
            and up alternating (gpt-oss).
        scoring: See `Routing.scoring`.
        has_selection_bias: See `ExpertWeights.selection_bias`.
        shared_module: The module of the MLP that every token runs through, if there is one.
        shared_size: The config's key for its inner size; None for `n_shared_experts` times that of
            an expert.
        has_shared_gate: Whether its output is multiplied by a sigmoid of the token.
    """

    inner_size: str = "moe_intermediate_size"
    is_normalised: bool = True
    has_biases: bool = False
    is_interleaved: bool = False
    scoring: str = "softmax"
    has_selection_bias: bool = False
    shared_module: str | None = None
    shared_size: str | None = None
    has_shared_gate: bool = False


@dataclass(frozen=True)
class Family:
    """The properties of a model family.

    Attributes:
        architectures: Allowed values of `architectures` in its configs.
        layer_types: Returns the attention type of each layer of a config.
        norms: See `LayerSpec.norms`.
        qk_norm: See `LayerSpec.qk_norm`.
        norm_offset: Added to stored norm weights.
        has_scaled_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        has_attention_softcap: Whether `attn_logit_softcapping` applies.
        qkv_bias: Whether q, k and v have biases even without `attention_bias`.
        defaults: Values of keys that its configs may leave out.
        causal: Whether rows attend to earlier positions only.
        logit_shift: Of a diffusion model: 1 if row r predicts position r + 1.
        block_size: The config's key for the block size of a block-diffusion model.
        default_block_size: The block size if the config lacks the key; None for no blocks.
        keys: Config keys of the family, and the keys that they stand for.
        names: The usual names of a layer's modules, and the names in the family's checkpoints.
        output_bias: Whether `attention_bias` includes the attention's output.
        has_partial_rotary: Whether `partial_rotary_factor` applies.
        interleaved_rope: See `LayerSpec.interleaved_rope`.
        norm_after_rope: See `LayerSpec.norm_after_rope`.
        rope_layers: Returns whether each layer has a rotary position embedding, from the config and
            the attention type of each layer; None: all have.
        norm: See `ModelSpec.norm`.
        has_norm_bias: Whether norms have biases.
        mlp: See `LayerSpec.mlp`.
        is_parallel: See `LayerSpec.is_parallel`; the key `use_parallel_residual` may turn it off.
        has_position_table: See `ModelSpec.has_position_table`.
        scales: Returns the factors of embeddings, scores, sublayers and logits; None: the usual
            ones.
        moe: Its mixture of experts, if it has one.
        has_sinks: See `LayerSpec.has_sinks`.
        has_clamped_swiglu: Whether the activation is a `ClampedSwiglu`.
    """

    architectures: tuple[str, ...]
    layer_types: Callable[[Config], list[str]]
    norms: str = "pre"
    qk_norm: str | None = None
    norm_offset: float = 0.0
    has_scaled_embedding: bool = False
    has_attention_softcap: bool = False
    qkv_bias: bool = False
    defaults: Config = field(default_factory=dict)
    causal: bool = True
    logit_shift: int = 0
    block_size: str | None = None
    default_block_size: int | None = None
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    output_bias: bool = True
    has_partial_rotary: bool = False
    interleaved_rope: bool = False
    norm_after_rope: bool = False
    rope_layers: Callable[[Config, list[str]], list[bool]] | None = None
    scales: Callable[[Config], Scales] | None = None
    norm: str = "rms"
    has_norm_bias: bool = False
    mlp: str = "gated"
    is_parallel: bool = False
    has_position_table: bool = False
    moe: MixtureOfExperts | None = None
    has_sinks: bool = False
    has_clamped_swiglu: bool = False


class Scales(NamedTuple):
    """Constant factors of a model. `attention` is None for the usual 1 / sqrt(head size)."""

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits: float = 1.0


def _all_full(config: Config) -> list[str]:
    """Full attention in every layer."""
    return [_FULL] * num_layers(config)


def _all_sliding(config: Config) -> list[str]:
    """Sliding attention in every layer if the config has a window, else full."""
    kind = _SLIDING if config.get("sliding_window") is not None else _FULL
    return [kind] * num_layers(config)


def _sliding_from_layer(config: Config) -> list[str]:
    """Qwen: sliding attention from layer `max_window_layers` on, if windows are enabled."""
    count, first = num_layers(config), int_value(config, "max_window_layers", 28, low=0)
    if not _uses_window(config):
        return [_FULL] * count
    return [_SLIDING if layer >= first else _FULL for layer in range(count)]


def _alternating_before_layer(config: Config) -> list[str]:
    """Qwen2-MoE: sliding attention in every second layer before `max_window_layers`, if windows are
    enabled."""
    count, stop = num_layers(config), int_value(config, "max_window_layers", 28, low=0)
    if not _uses_window(config):
        return [_FULL] * count
    return [_FULL if layer % 2 or layer >= stop else _SLIDING for layer in range(count)]


def _all_sliding_if_enabled(config: Config) -> list[str]:
    """Sliding attention in every layer, if windows are enabled."""
    kind = _SLIDING if _uses_window(config) else _FULL
    return [kind] * num_layers(config)


def _sliding_without_rope(config: Config) -> list[str]:
    """SmolLM3: sliding attention in the layers without position embedding, if windows are
    enabled."""
    is_enabled = _uses_window(config)
    flags = _rope_flags(config, [])
    return [_FULL if has_rope or not is_enabled else _SLIDING for has_rope in flags]


def _rope_flags(config: Config, layer_types: list[str]) -> list[bool]:
    """SmolLM3: whether each layer has a rotary position embedding."""
    count = num_layers(config)
    flags = _list(config, "no_rope_layers", int)  # despite its name, 1 means with rope
    if flags is None:
        interval = int_value(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    return [bool(flag) for flag in flags[:count]]


def _rope_if_sliding(config: Config, layer_types: list[str]) -> list[bool]:
    """EXAONE 4 with windows: a rotary position embedding in layers with sliding attention."""
    if config.get("sliding_window") is None:
        return [True] * len(layer_types)
    return [kind == _SLIDING for kind in layer_types]


def _no_rope(config: Config, layer_types: list[str]) -> list[bool]:
    """No rotary position embedding in any layer."""
    return [False] * len(layer_types)


def _rope_if_named(config: Config, layer_types: list[str]) -> list[bool]:
    """Granite 4: a rotary position embedding in all layers or none."""
    return [config.get("position_embedding_type") == "rope"] * len(layer_types)


def _full_every_nth(config: Config) -> list[str]:
    """Full attention in every n-th layer, sliding attention in the others."""
    period = int_value(config, "sliding_window_pattern", 6)
    count = num_layers(config)
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(count)]


def _hybrid_pattern(config: Config) -> list[str]:
    """EXAONE 4: a period, or a text with one letter per layer of it, L for sliding attention."""
    count, pattern = num_layers(config), config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return [_FULL] * count
    if isinstance(pattern, str) and set(pattern) <= set("LG") and pattern:
        letters = [pattern[layer % len(pattern)] for layer in range(count)]
        return [_SLIDING if letter == "L" else _FULL for letter in letters]
    return _full_every_nth(config)


def _all_attention(config: Config) -> list[str]:
    """Granite 4: the types must be listed, because the layers of most models are no attention."""
    raise CheckpointError("the config lacks 'layer_types'")


def _granite_scales(config: Config) -> Scales:
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    embedding, attention, residual = (number(key, _value(config, key, 1.0)) for key in factors)
    logits = 1.0 / number("logits_scaling", _value(config, "logits_scaling", 1.0))
    return Scales(embedding, attention, residual, logits)


def _cohere_scales(config: Config) -> Scales:
    return Scales(logits=number("logit_scale", _value(config, "logit_scale", 0.0625)))


def _minicpm_scales(config: Config) -> Scales:
    depth = number("scale_depth", _value(config, "scale_depth", 1.0))
    base = int_value(config, "dim_model_base", 1)
    return Scales(
        embedding=number("scale_emb", _value(config, "scale_emb", 1.0)),
        residual=depth / math.sqrt(num_layers(config)),
        logits=base / int_value(config, "hidden_size"),
    )


def _uses_window(config: Config) -> bool:
    return bool_value(config, "use_sliding_window") and config.get("sliding_window") is not None


_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}

_GPT: dict[str, Any] = {"norm": "layer", "has_norm_bias": True, "mlp": "plain"}
#: Both MLP and attention read the only norm of a layer.
_COHERE: dict[str, Any] = {
    "norm": "layer",
    "is_parallel": True,
    "interleaved_rope": True,
    "scales": _cohere_scales,
    "names": {"post_attention_layernorm": "input_layernorm"},
    "defaults": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
}

#: The entry points by which other packages add families; their names are model types.
GROUP = "anydecode.families"
#: The families by `model_type` of their configs.
FAMILIES: dict[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), _all_full),
    "mistral": Family(("MistralForCausalLM",), _all_sliding, defaults={"sliding_window": 4096}),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        _all_sliding,
        defaults={"rope_theta": 1e6},
        moe=MixtureOfExperts("intermediate_size"),
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        _sliding_without_rope,
        rope_layers=_rope_flags,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM",), _sliding_from_layer, qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "qwen3": Family(
        ("Qwen3ForCausalLM",),
        _sliding_from_layer,
        qk_norm="head",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        _all_sliding_if_enabled,
        qk_norm="head",
        defaults={"sliding_window": 4096},
        moe=MixtureOfExperts(is_normalised=False),
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        _full_every_nth,
        defaults={
            "sliding_window_pattern": 2,
            "sliding_window": 128,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
        },
        moe=MixtureOfExperts("intermediate_size", has_biases=True, is_interleaved=True),
        has_sinks=True,
        has_clamped_swiglu=True,
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        _alternating_before_layer,
        qkv_bias=True,
        defaults={"sliding_window": 4096},
        moe=MixtureOfExperts(
            is_normalised=False,
            shared_module="shared_expert",
            shared_size="shared_expert_intermediate_size",
            has_shared_gate=True,
        ),
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        _all_full,
        qk_norm="full",
        defaults={"rms_norm_eps": 1e-5},
        moe=MixtureOfExperts("intermediate_size", is_normalised=False),
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",),
        _all_full,
        qk_norm="head",
        defaults={
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
        },
        moe=MixtureOfExperts(
            scoring="sigmoid", has_selection_bias=True, shared_module="shared_experts"
        ),
        output_bias=False,
        has_partial_rotary=True,
    ),
    "phi3": Family(("Phi3ForCausalLM",), _all_sliding, has_partial_rotary=True),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        _all_full,
        norms="post",
        qk_norm="full",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",),
        _full_every_nth,
        norms="both",
        norm_offset=1.0,
        has_scaled_embedding=True,
        has_attention_softcap=True,
        defaults={
            **_GEMMA,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Its config has a softcap for attention scores, which transformers does not apply.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _full_every_nth,
        norms="both",
        qk_norm="head",
        norm_offset=1.0,
        has_scaled_embedding=True,
        defaults={**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
}
FAMILIES |= {
    "granite": Family(("GraniteForCausalLM",), _all_full, scales=_granite_scales),
    # Granite 4 models without state-space layers and experts.
    "granitemoehybrid": Family(
        ("GraniteMoeHybridForCausalLM",),
        _all_attention,
        scales=_granite_scales,
        rope_layers=_rope_if_named,
        keys={"shared_intermediate_size": ("intermediate_size",)},
        names={
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        },
    ),
    "minicpm": Family(
        ("MiniCPMForCausalLM",),
        _all_full,
        scales=_minicpm_scales,
        defaults={"tie_word_embeddings": True},
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",),
        _all_full,
        norms="both",
        has_partial_rotary=True,
        interleaved_rope=True,
        output_bias=False,
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        defaults={
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        _all_full,
        interleaved_rope=True,
        keys={"use_bias": ("attention_bias", "mlp_bias")},
        defaults={
            "head_dim": 128,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",),
        _all_full,
        output_bias=False,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",),
        _full_every_nth,
        norms="post",
        qk_norm="full",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "ministral": Family(("MinistralForCausalLM",), _all_sliding, defaults={"sliding_window": 4096}),
    "ministral3": Family(
        ("Ministral3ForCausalLM",),
        _all_sliding,
        defaults={"head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "exaone4": Family(
        ("Exaone4ForCausalLM",),
        _hybrid_pattern,
        norms="post",
        qk_norm="head",
        rope_layers=_rope_if_sliding,
        defaults={"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
    ),
    "hunyuan_v1_dense": Family(
        ("HunYuanDenseV1ForCausalLM",),
        _all_full,
        qk_norm="head",
        norm_after_rope=True,
        names={
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
    # The families below have layer norms.
    "starcoder2": Family(
        ("Starcoder2ForCausalLM",),
        _all_sliding,
        norm="layer",
        has_norm_bias=True,
        mlp="plain",
        keys={
            "norm_epsilon": ("layer_norm_eps",),
            "use_bias": ("attention_bias", "mlp_bias"),
        },
        names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        defaults={
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "cohere": Family(("CohereForCausalLM",), _all_full, **_COHERE),
    "cohere2": Family(
        ("Cohere2ForCausalLM",),
        _full_every_nth,
        rope_layers=_rope_if_sliding,
        **{
            **_COHERE,
            "defaults": {
                "tie_word_embeddings": True,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
        },
    ),
    # Their layouts are converted when they are loaded.
    "gpt2": Family(
        ("GPT2LMHeadModel",),
        _all_full,
        rope_layers=_no_rope,
        has_position_table=True,
        defaults={"attention_bias": True, "mlp_bias": True},
        **_GPT,
    ),
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        _all_full,
        is_parallel=True,
        has_partial_rotary=True,
        defaults={"partial_rotary_factor": 0.25, "mlp_bias": True},
        **_GPT,
    ),
    "falcon": Family(("FalconForCausalLM", "RWForCausalLM"), _all_full, is_parallel=True, **_GPT),
}


def _bidirectional(like: str, *architectures: str, **changes: Any) -> Family:
    """The family `like`, with bidirectional attention."""
    return replace(FAMILIES[like], architectures=architectures, causal=False, **changes)


FAMILIES |= {
    # Masked diffusion (LLaDA's own layout is converted when it is loaded).
    "llada": _bidirectional("llama", "LLaDAModelLM", defaults={"rms_norm_eps": 1e-5}),
    "dream": _bidirectional("qwen2", "DreamModel", logit_shift=1),
    # Autoregressive models that the dLLM library converted to diffusion models.
    "a2d-llama": _bidirectional("llama", "A2DLlamaLMHeadModel", block_size="block_size"),
    "a2d-qwen2": _bidirectional("qwen2", "A2DQwen2LMHeadModel"),
    "a2d-qwen3": _bidirectional("qwen3", "A2DQwen3LMHeadModel"),
    # Block diffusion: a row attends to its own block and those before it. SDAR's configs lack the
    # block size; its generation script and the servers that run it default to 4.
    "sdar": _bidirectional(
        "qwen3", "SDARForCausalLM", block_size="block_size", default_block_size=4
    ),
    "sdar_moe": _bidirectional(
        "qwen3_moe", "SDARMoeForCausalLM", block_size="block_size", default_block_size=4
    ),
    "fast_dllm_qwen": _bidirectional(
        "qwen2",
        "Fast_dLLM_QwenForCausalLM",
        logit_shift=1,
        block_size="bd_size",
        default_block_size=32,
    ),
    # Their own layout is converted when it is loaded.
    "bd3lm": _bidirectional("llama", "BD3LM", block_size="block_size"),
    "mdlm": _bidirectional("llama", "MDLM", "BD3LM"),
    # Causal, and trained to predict mask tokens after the visible tokens.
    "wedlm": replace(FAMILIES["qwen2"], architectures=("WeDLMForCausalLM",), qkv_bias=False),
    "wedlm_qwen3": replace(FAMILIES["qwen3"], architectures=("WeDLMForCausalLM",)),
}
#: The keys for the number of experts.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Multimodal architectures whose language model (`text_config`) can run alone.
_MULTIMODAL = (
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)


def text_config(config: Config) -> dict[str, Any]:
    """The part of a config that describes the language model, with its family's defaults.

    `architectures` is checked in addition to `model_type`, which different models share (LLaDA and
    LLaDA-MoE, Qwen3 and Efficient-DLM).

    Raises:
        CheckpointError: The family is not supported.
    """
    if "text_config" in config:
        check_multimodal(config)
    text = _mapping(config, "text_config") if "text_config" in config else dict(config)
    model_type = text.get("model_type") or config.get("model_type")
    model_type = "gemma3_text" if model_type == "gemma3" else model_type
    if model_type in ("Dream", "Fast_dLLM_Qwen", "WeDLM"):
        model_type = model_type.lower()
    if model_type == "wedlm":  # biases are read if they are stored
        model_type, text["attention_bias"] = (
            ("wedlm_qwen3" if text.get("qk_norm") else "wedlm"),
            False,
        )
    if not isinstance(model_type, str) or not _is_known(model_type):
        name = _architecture(config) or "no architecture"
        raise CheckpointError(
            f"model type {model_type!r} ({name}) is not supported; supported are"
            f" {', '.join(FAMILIES)}"
        )
    _check_architecture(text, model_type, FAMILIES[model_type].architectures)
    if FAMILIES[model_type].moe is None and any(text.get(key) for key in _NUM_EXPERTS):
        raise CheckpointError(f"a mixture of experts of model type {model_type!r} is not supported")
    text["model_type"] = model_type
    family = FAMILIES[model_type]
    for key, targets in family.keys.items():
        if key in text:
            text.update(dict.fromkeys(targets, text[key]))
    return {**family.defaults, **text}


def _is_known(model_type: str) -> bool:
    """Whether there is a family of this name. One that another package offers is added."""
    if model_type not in FAMILIES:
        for point in entry_points(group=GROUP, name=model_type):
            FAMILIES[model_type] = point.load()
    return model_type in FAMILIES


def check_multimodal(config: Config) -> None:
    """Raise CheckpointError for a config with a `text_config`, unless its language model is known
    to run alone."""
    _check_architecture(config, config.get("model_type"), _MULTIMODAL)


def _check_architecture(config: Config, model_type: Any, supported: tuple[str, ...]) -> None:
    """Raise CheckpointError if the config has `architectures` and none of them is supported."""
    names = _list(config, "architectures", str)
    if names and not set(names) & set(supported):
        raise CheckpointError(
            f"architecture {', '.join(names)} of model type {model_type!r} is not supported;"
            f" supported is {', '.join(supported)}"
        )


def spec_from_config(
    config: Config, *, dtype: str | None = None, max_positions: int | None = None
) -> ModelSpec:
    """The architecture of the model that a config describes.

    Args:
        config: The keys of `config.json`.
        dtype: The requested weight format; None means the checkpoint's own. Gemma's embedding scale
            is rounded to it, as in transformers.
        max_positions: The context length; None means the one the model was trained for. The rope
            scalings `dynamic` and `longrope` depend on it.

    Raises:
        CheckpointError: A key is missing, invalid or unsupported.
    """
    config = text_config(config)
    family = FAMILIES[config["model_type"]]
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("bidirectional attention in a Gemma config is not supported")
    if config["model_type"] == "minicpm" and config.get("sparse_config") is not None:
        raise CheckpointError("sparse attention (sparse_config) is not supported")
    if config.get("use_qk_norm") and family.qk_norm is None:
        raise CheckpointError("layer norms of queries and keys (use_qk_norm) are not supported")
    if config.get("clip_qkv") is not None:
        raise refusal("clip_qkv", config["clip_qkv"], "null")
    if max_positions is not None:
        high = MAX_SIZE
        if family.has_position_table:
            high = int_value(config, "max_position_embeddings")
        integer("max_positions", max_positions, 1, high)
    limit = max_positions or _default_max_positions(config)
    scales = family.scales(config) if family.scales is not None else Scales()
    if family.has_scaled_embedding:
        scales = Scales(_embedding_scale(config, dtype))
    return ModelSpec(
        architecture=_architecture(config) or config["model_type"],
        vocab_size=int_value(config, "vocab_size", high=MAX_TOKENS),
        hidden_size=int_value(config, "hidden_size"),
        max_positions=limit,
        norm_eps=_norm_eps(config, family),
        layers=tuple(_layers(config, family, limit, scales.attention)),
        embedding_scale=scales.embedding,
        logit_scale=scales.logits,
        logit_softcap=_optional_number(config, "final_logit_softcapping"),
        causal=family.causal,
        logit_shift=1 if bool_value(config, "right_shift_logits") else family.logit_shift,
        block_size=_block_size(config, family),
        residual_scale=scales.residual,
        norm=family.norm,
        has_position_table=family.has_position_table,
    )


def _norm_eps(config: Config, family: Family) -> float:
    if family.norm == "layer":
        return number("layer_norm_eps", _value(config, "layer_norm_eps", 1e-5), 0.0, 1.0)
    return number("rms_norm_eps", _value(config, "rms_norm_eps", 1e-6), 0.0, 1.0)


def _block_size(config: Config, family: Family) -> int | None:
    """The block size of a block-diffusion model; None for no blocks."""
    key = family.block_size
    if key is None or config.get(key) is None:
        return family.default_block_size
    return int_value(config, key)


def _architecture(config: Config) -> str | None:
    """The first of the config's architectures, if there is one."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def int_value(
    config: Config, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
) -> int:
    """The integer under `key`; null counts as missing.

    Raises:
        CheckpointError: It is not an integer from `low` to `high`, or is missing without a default.
    """
    value = _value(config, key, default)
    if value is None:
        raise CheckpointError(f"the config lacks {key!r}")
    return integer(key, value, low, high)


def bool_value(config: Config, key: str, default: bool = False) -> bool:
    """The boolean under `key`; null counts as missing."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value


def _value(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _optional_number(config: Config, key: str) -> float | None:
    """The number under `key`; None if it is null or missing."""
    value = config.get(key)
    return None if value is None else number(key, value)


def _mapping(config: Config, key: str) -> dict[str, Any]:
    """A copy of the object under `key`; empty if it is null or missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refusal(key, value, "an object")
    return dict(value or {})


def _list(config: Config, key: str, kind: type) -> list[Any] | None:
    """The list under `key`, with entries of one type; None if it is null or missing."""
    value = config.get(key)
    is_valid = isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
    if value is not None and not is_valid:
        raise refusal(key, value, f"a list of {kind.__name__}")
    return value


def num_layers(config: Config) -> int:
    """The number of layers."""
    return int_value(config, "num_hidden_layers", high=MAX_LAYERS)


def head_dim(config: Config) -> int:
    """Dimensions per head: `head_dim`, or else the hidden size divided by the number of heads."""
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    return int_value(config, "head_dim", int_value(config, "hidden_size") // heads, high=MAX_COUNT)


def is_expert_layer(config: Config, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    if FAMILIES[config["model_type"]].moe is None:
        return False
    step = int_value(config, "decoder_sparse_step", 1)
    dense = _list(config, "mlp_only_layers", int) or []
    first = int_value(config, "first_k_dense_replace", 0, low=0)
    is_sparse = layer >= first and layer not in dense and (layer + 1) % step == 0
    return is_sparse and num_experts(config) > 0


def num_experts(config: Config) -> int:
    """The number of experts of a mixture-of-experts layer."""
    key = next((key for key in _NUM_EXPERTS if key in config), "num_experts")
    return int_value(config, key, low=0, high=MAX_EXPERTS)


def shared_size(config: Config, moe: MixtureOfExperts) -> int:
    """The inner size of the MLP that every token runs through; 0 if there is none."""
    if moe.shared_module is None:
        return 0
    if moe.shared_size is not None:
        return int_value(config, moe.shared_size, low=0)
    count = int_value(config, "n_shared_experts", 1, low=0, high=MAX_EXPERTS)
    return count * int_value(config, moe.inner_size)


def _routing(config: Config, moe: MixtureOfExperts) -> Routing:
    return Routing(
        int_value(config, "num_experts_per_tok"),
        normalise=bool_value(config, "norm_topk_prob", moe.is_normalised),
        scoring=moe.scoring,
        num_groups=int_value(config, "n_group", 1),
        groups_per_token=int_value(config, "topk_group", 1),
        scale=number("routed_scaling_factor", _value(config, "routed_scaling_factor", 1.0)),
    )


def _activation(config: Config, family: Family) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"activation {name!r} is not supported")
    if not family.has_clamped_swiglu:
        return _ACTIVATIONS[name]
    default = ClampedSwiglu()
    return ClampedSwiglu(
        number("swiglu_alpha", _value(config, "swiglu_alpha", default.alpha)),
        number("swiglu_limit", _value(config, "swiglu_limit", default.limit)),
    )


def _layer_types(config: Config, family: Family) -> list[str]:
    """The attention type of each layer."""
    types = _list(config, "layer_types", str) or family.layer_types(config)
    return [_FULL if kind == "attention" else kind for kind in types]


def _layers(
    config: Config, family: Family, max_positions: int, attention_scale: float | None
) -> list[LayerSpec]:
    count, layer_types = num_layers(config), _layer_types(config, family)
    has_rope = [True] * count
    if family.rope_layers is not None:
        has_rope = family.rope_layers(config, layer_types)
    if len(layer_types) < count or len(has_rope) < count:
        raise CheckpointError(
            f"layer_types or no_rope_layers has fewer entries than the config's {count} layers"
        )
    activation = _activation(config, family)
    dim, trained = head_dim(config), int_value(config, "max_position_embeddings")
    ropes = {
        layer_type: make_rope(_rope_parameters(config, layer_type), dim, trained, max_positions)
        for layer_type in sorted(set(layer_types))
    }
    is_parallel = family.is_parallel and bool_value(config, "use_parallel_residual", True)
    query_ropes = {kind: _query_rope(config, kind, rope) for kind, rope in ropes.items()}
    layers = []
    for layer in range(count):
        is_moe = is_expert_layer(config, layer)
        layers.append(
            LayerSpec(
                attention=_attention(config, family, layer_types[layer], dim, attention_scale),
                rope=ropes[layer_types[layer]] if has_rope[layer] else None,
                norms=family.norms,
                qk_norm=family.qk_norm if bool_value(config, "use_qk_norm", True) else None,
                activation=activation,
                num_experts=num_experts(config) if is_moe else 0,
                routing=_routing(config, family.moe) if is_moe and family.moe else None,
                has_sinks=family.has_sinks,
                query_rope=query_ropes[layer_types[layer]] if has_rope[layer] else None,
                norm_after_rope=family.norm_after_rope,
                interleaved_rope=family.interleaved_rope,
                mlp=family.mlp,
                is_parallel=is_parallel,
            )
        )
    return layers


def _query_rope(config: Config, layer_type: str, rope: Rope) -> Rope | None:
    """The rotary embedding of Ministral 3's queries, which grow with the position."""
    if config["model_type"] != "ministral3":
        return None
    parameters = _rope_parameters(config, layer_type)
    key = "llama_4_scaling_beta"
    growth = number(key, _value(parameters, key, 0.0), 0.0)
    period = int_value(parameters, "original_max_position_embeddings")
    return replace(rope, growth=growth, growth_period=period) if growth else None


def _attention(
    config: Config, family: Family, layer_type: str, dim: int, scale: float | None
) -> Attention:
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    if layer_type not in (_SLIDING, _FULL):
        raise CheckpointError(f"attention of type {layer_type!r} is not supported")
    return Attention(
        num_heads=heads,
        num_kv_heads=int_value(config, "num_key_value_heads", heads, high=MAX_COUNT),
        head_dim=dim,
        scale=scale or (_optional_number(config, "query_pre_attn_scalar") or dim) ** -0.5,
        window=int_value(config, "sliding_window") if layer_type == _SLIDING else None,
        softcap=_optional_number(config, "attn_logit_softcapping")
        if family.has_attention_softcap
        else None,
    )


def _rope_parameters(config: Config, layer_type: str) -> dict[str, Any]:
    """The rope parameters of one layer type, from the current keys (`rope_parameters`, flat or per
    layer type) or the older ones (`rope_theta`, `rope_scaling`, `rope_local_base_freq`)."""
    parameters = _mapping(config, "rope_parameters")
    theta = _value(config, "rope_theta", 10_000.0)
    if layer_type in parameters:
        rope = _mapping(parameters, layer_type)
    elif config["model_type"] == "gemma3_text" and layer_type == _SLIDING:
        rope, theta = {}, config["rope_local_base_freq"]
    elif config["model_type"] == "olmo3" and layer_type == _SLIDING:
        rope = {}  # only full attention has a scaling
    else:
        rope = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
        rope.update(_mapping(config, "rope_scaling"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = theta
    name = rope_type(rope)
    if config["model_type"] == "phi3" and name == "yarn":
        name = "longrope"  # its name in early Phi-3 checkpoints is "yarn"
    if config["model_type"] == "hunyuan_v1_dense" and name == "dynamic" and rope.get("alpha"):
        name = "ntk_alpha"
    rope["rope_type"] = name
    if not FAMILIES[config["model_type"]].has_partial_rotary and name == "default":
        rope.pop("partial_rotary_factor", None)
    elif rope.get("partial_rotary_factor") is None:
        rope["partial_rotary_factor"] = config.get("partial_rotary_factor")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


def _default_max_positions(config: Config) -> int:
    """The default context length: the largest for which no rope scaling depends on the length."""
    longest = int_value(config, "max_position_embeddings")
    parameters = _rope_parameters(config, _FULL)
    if rope_type(parameters) == "longrope":
        return min(longest, int_value(parameters, "original_max_position_embeddings"))
    return longest


def _embedding_scale(config: Config, dtype: str | None) -> float:
    """sqrt(hidden_size), rounded to the requested float format, or else to the checkpoint's."""
    float_name = (
        dtype if dtype in _FLOATS else str(config.get("dtype") or config.get("torch_dtype"))
    )
    precision = _FLOATS.get(float_name.removeprefix("torch."), DTYPES["F32"])
    # Rounded as in training, where the factor has the dtype of the weights.
    root = np.float32(math.sqrt(int_value(config, "hidden_size")))
    return float(root.astype(precision))


_FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}
