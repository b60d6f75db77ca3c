"""Converts a Hugging Face `config.json` to a `ModelSpec`, for every supported family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import DTYPES
from anydecode.kernels.interface import Attention
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
}

_SLIDING, _FULL = "sliding_attention", "full_attention"


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
        router_is_normalised: The default of `norm_topk_prob`.
        defaults: Values of keys that its configs may leave out.
        causal: Whether rows attend to earlier positions only.
        logit_shift: Of a diffusion model: 1 if row r predicts position r + 1.
        block_size: The config's key for the block size of a block-diffusion model.
        default_block_size: The block size if the config lacks the key; None for no blocks.
    """

    architectures: tuple[str, ...]
    layer_types: Callable[[Config], list[str]]
    norms: str = "pre"
    qk_norm: str | None = None
    norm_offset: float = 0.0
    has_scaled_embedding: bool = False
    has_attention_softcap: bool = False
    qkv_bias: bool = False
    router_is_normalised: bool = True
    defaults: Config = field(default_factory=dict)
    causal: bool = True
    logit_shift: int = 0
    block_size: str | None = None
    default_block_size: int | None = None


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


def _all_sliding_if_enabled(config: Config) -> list[str]:
    """Sliding attention in every layer, if windows are enabled."""
    kind = _SLIDING if _uses_window(config) else _FULL
    return [kind] * num_layers(config)


def _sliding_without_rope(config: Config) -> list[str]:
    """SmolLM3: sliding attention in the layers without position embedding, if windows are
    enabled."""
    is_enabled = _uses_window(config)
    return [_FULL if has_rope or not is_enabled else _SLIDING for has_rope in rope_layers(config)]


def _full_every_nth(config: Config) -> list[str]:
    """Gemma: full attention in every n-th layer, sliding attention in the others."""
    period = int_value(config, "sliding_window_pattern", 6)
    count = num_layers(config)
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(count)]


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

#: The entry points by which other packages add families; their names are model types.
GROUP = "anydecode.families"
#: The families by `model_type` of their configs.
FAMILIES: dict[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), _all_full),
    "mistral": Family(("MistralForCausalLM",), _all_sliding, defaults={"sliding_window": 4096}),
    "mixtral": Family(("MixtralForCausalLM",), _all_sliding, defaults={"rope_theta": 1e6}),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        _sliding_without_rope,
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
        router_is_normalised=False,
        defaults={"sliding_window": 4096},
    ),
    "phi3": Family(("Phi3ForCausalLM",), _all_sliding),
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
_MOE_MODEL_TYPES = ("mixtral", "qwen3_moe", "sdar_moe")
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
    counts = ("num_experts", "num_local_experts")
    if model_type not in _MOE_MODEL_TYPES and any(text.get(key) for key in counts):
        raise CheckpointError(f"a mixture of experts of model type {model_type!r} is not supported")
    text["model_type"] = model_type
    return {**FAMILIES[model_type].defaults, **text}


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
    if max_positions is not None:
        integer("max_positions", max_positions)
    limit = max_positions or _default_max_positions(config)
    return ModelSpec(
        architecture=_architecture(config) or config["model_type"],
        vocab_size=int_value(config, "vocab_size", high=MAX_TOKENS),
        hidden_size=int_value(config, "hidden_size"),
        max_positions=limit,
        norm_eps=number("rms_norm_eps", _value(config, "rms_norm_eps", 1e-6), 0.0, 1.0),
        layers=tuple(_layers(config, family, limit)),
        embedding_scale=_embedding_scale(config, dtype) if family.has_scaled_embedding else 1.0,
        logit_softcap=_optional_number(config, "final_logit_softcapping"),
        causal=family.causal,
        logit_shift=1 if bool_value(config, "right_shift_logits") else family.logit_shift,
        block_size=_block_size(config, family),
    )


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


def rope_layers(config: Config) -> list[bool]:
    """Whether each layer has a rotary position embedding (False only in SmolLM3)."""
    count = num_layers(config)
    if config["model_type"] != "smollm3":
        return [True] * count
    flags = _list(config, "no_rope_layers", int)  # despite its name, 1 means with rope
    if flags is None:
        interval = int_value(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    return [bool(flag) for flag in flags[:count]]


def is_expert_layer(config: Config, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    if config["model_type"] == "mixtral":
        return True
    if config["model_type"] not in _MOE_MODEL_TYPES:
        return False
    step = int_value(config, "decoder_sparse_step", 1)
    dense = _list(config, "mlp_only_layers", int) or []
    return layer not in dense and num_experts(config) > 0 and (layer + 1) % step == 0


def num_experts(config: Config) -> int:
    """The number of experts of a mixture-of-experts layer."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return int_value(config, key, low=0, high=MAX_EXPERTS)


def _layers(config: Config, family: Family, max_positions: int) -> list[LayerSpec]:
    layer_types = _list(config, "layer_types", str) or family.layer_types(config)
    count, has_rope = num_layers(config), rope_layers(config)
    if len(layer_types) < count or len(has_rope) < count:
        raise CheckpointError(
            f"layer_types or no_rope_layers has fewer entries than the config's {count} layers"
        )
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(f"activation {activation!r} is not supported")
    dim, trained = head_dim(config), int_value(config, "max_position_embeddings")
    ropes = {
        layer_type: make_rope(_rope_parameters(config, layer_type), dim, trained, max_positions)
        for layer_type in sorted(set(layer_types))
    }
    layers = []
    for layer in range(count):
        is_moe = is_expert_layer(config, layer)
        layers.append(
            LayerSpec(
                attention=_attention(config, family, layer_types[layer], dim),
                rope=ropes[layer_types[layer]] if has_rope[layer] else None,
                norms=family.norms,
                qk_norm=family.qk_norm,
                activation=_ACTIVATIONS[activation],
                num_experts=num_experts(config) if is_moe else 0,
                experts_per_token=int_value(config, "num_experts_per_tok") if is_moe else 0,
                normalise_experts=bool_value(config, "norm_topk_prob", family.router_is_normalised),
            )
        )
    return layers


def _attention(config: Config, family: Family, layer_type: str, dim: int) -> Attention:
    heads = int_value(config, "num_attention_heads", high=MAX_COUNT)
    if layer_type not in (_SLIDING, _FULL):
        raise CheckpointError(f"attention of type {layer_type!r} is not supported")
    return Attention(
        num_heads=heads,
        num_kv_heads=int_value(config, "num_key_value_heads", heads, high=MAX_COUNT),
        head_dim=dim,
        scale=(_optional_number(config, "query_pre_attn_scalar") or dim) ** -0.5,
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
    else:
        rope = {key: value for key, value in parameters.items() if not isinstance(value, dict)}
        rope.update(_mapping(config, "rope_scaling"))
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = theta
    name = rope_type(rope)
    if config["model_type"] == "phi3" and name == "yarn":
        name = "longrope"  # its name in early Phi-3 checkpoints is "yarn"
    rope["rope_type"] = name
    if config["model_type"] != "phi3" and name == "default":
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
