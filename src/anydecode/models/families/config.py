"""A Hugging Face `config.json` as a `ModelSpec`, family by family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Attention
from anydecode.models.families.rope import make_rope, rope_type
from anydecode.models.limits import MAX_COUNT, MAX_SIZE, integer, number, refusal
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
    """What sets a family apart. `architectures` are the names that its configs may have under this
    key; `windows(config)` lists each layer's attention type; `defaults` stand for keys its config
    may leave out."""

    architectures: tuple[str, ...]
    windows: Callable[[Config], list[str]]
    norms: str = "pre"
    qk_norm: str | None = None
    norm_offset: float = 0.0  # norm weights are stored less this
    has_scaled_embedding: bool = False
    has_attention_softcap: bool = False
    qkv_bias: bool = False  # q, k and v have biases whatever `attention_bias` says
    router_is_normalised: bool = True
    defaults: Config = field(default_factory=dict)
    causal: bool = True
    logit_shift: int = 0  # of a diffusion model: 1 where row r predicts position r + 1
    block_size: str | None = None  # the config's key for the blocks a diffusion model sees
    default_block_size: int | None = None  # where the config lacks it; None: no blocks


def _no_windows(config: Config) -> list[str]:
    """Every layer sees everything."""
    return [_FULL] * num_layers(config)


def _one_window(config: Config) -> list[str]:
    """Every layer alike: sliding where the config names a window."""
    kind = _SLIDING if config.get("sliding_window") is not None else _FULL
    return [kind] * num_layers(config)


def _late_windows(config: Config) -> list[str]:
    """Qwen: the layers from `max_window_layers` on slide, if the config says so at all."""
    count, first = num_layers(config), size_of(config, "max_window_layers", 28, low=0)
    if not _uses_window(config):
        return [_FULL] * count
    return [_SLIDING if layer >= first else _FULL for layer in range(count)]


def _switched_window(config: Config) -> list[str]:
    """Every layer slides, if the config switches windows on."""
    kind = _SLIDING if _uses_window(config) else _FULL
    return [kind] * num_layers(config)


def _windows_without_rope(config: Config) -> list[str]:
    """SmolLM3: windows, if on, stand in the layers without position embedding."""
    on = _uses_window(config)
    return [_FULL if has or not on else _SLIDING for has in rotated_layers(config)]


def _periodic_windows(config: Config) -> list[str]:
    """Gemma: every n-th layer sees everything."""
    period = size_of(config, "sliding_window_pattern", 6)
    count = num_layers(config)
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(count)]


def _uses_window(config: Config) -> bool:
    return flag(config, "use_sliding_window") and config.get("sliding_window") is not None


_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), _no_windows),
    "mistral": Family(("MistralForCausalLM",), _one_window, defaults={"sliding_window": 4096}),
    "mixtral": Family(("MixtralForCausalLM",), _one_window, defaults={"rope_theta": 1e6}),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        _windows_without_rope,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6},
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM",), _late_windows, qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "qwen3": Family(
        ("Qwen3ForCausalLM",),
        _late_windows,
        qk_norm="head",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        _switched_window,
        qk_norm="head",
        router_is_normalised=False,
        defaults={"sliding_window": 4096},
    ),
    "phi3": Family(("Phi3ForCausalLM",), _one_window),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        _no_windows,
        norms="post",
        qk_norm="full",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",),
        _periodic_windows,
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
    # Its config has a cap for attention scores, which transformers does not apply.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        _periodic_windows,
        norms="both",
        qk_norm="head",
        norm_offset=1.0,
        has_scaled_embedding=True,
        defaults={**_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
}


def _two_way(like: str, *architectures: str, **changes: Any) -> Family:
    """The family `like`, whose rows see what comes after them, too."""
    return replace(FAMILIES[like], architectures=architectures, causal=False, **changes)


FAMILIES |= {
    # Masked diffusion (LLaDA's own layout is put into the usual words when it is loaded).
    "llada": _two_way("llama", "LLaDAModelLM", defaults={"rms_norm_eps": 1e-5}),
    "dream": _two_way("qwen2", "DreamModel", logit_shift=1),
    # Models of any kind that the dLLM library made see both ways.
    "a2d-llama": _two_way("llama", "A2DLlamaLMHeadModel", block_size="block_size"),
    "a2d-qwen2": _two_way("qwen2", "A2DQwen2LMHeadModel"),
    "a2d-qwen3": _two_way("qwen3", "A2DQwen3LMHeadModel"),
    # Block diffusion: a row sees its own block and those before. SDAR's configs lack the block
    # size; its generation script and the servers that run it default to 4.
    "sdar": _two_way("qwen3", "SDARForCausalLM", block_size="block_size", default_block_size=4),
    "sdar_moe": _two_way(
        "qwen3_moe", "SDARMoeForCausalLM", block_size="block_size", default_block_size=4
    ),
    "fast_dllm_qwen": _two_way(
        "qwen2",
        "Fast_dLLM_QwenForCausalLM",
        logit_shift=1,
        block_size="bd_size",
        default_block_size=32,
    ),
    # Their own layout, too, is put into the usual words.
    "bd3lm": _two_way("llama", "BD3LM", block_size="block_size"),
    "mdlm": _two_way("llama", "MDLM", "BD3LM"),
    # Causal, and trained to fill masks behind what it sees.
    "wedlm": replace(FAMILIES["qwen2"], architectures=("WeDLMForCausalLM",), qkv_bias=False),
    "wedlm_qwen3": replace(FAMILIES["qwen3"], architectures=("WeDLMForCausalLM",)),
}
_MIXTURES = ("mixtral", "qwen3_moe", "sdar_moe")
#: Models of text and more whose language model (`text_config`) runs alone.
_MULTIMODAL = (
    "Gemma3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)


def text_config(config: Config) -> dict[str, Any]:
    """The part that describes the language model, with its family's defaults filled in.

    Raises CheckpointError for families that are not supported. `architectures` is checked besides
    `model_type`, which different models share (LLaDA and LLaDA-MoE, Qwen3 and Efficient-DLM).
    """
    if "text_config" in config:
        check_multimodal(config)
    own = _mapping(config, "text_config") if "text_config" in config else dict(config)
    kind = own.get("model_type") or config.get("model_type")
    kind = "gemma3_text" if kind == "gemma3" else kind
    if kind in ("Dream", "Fast_dLLM_Qwen", "WeDLM"):
        kind = kind.lower()
    if kind == "wedlm":  # biases stand where they are stored
        kind, own["attention_bias"] = ("wedlm_qwen3" if own.get("qk_norm") else "wedlm"), False
    if not isinstance(kind, str) or kind not in FAMILIES:
        name = _architecture(config) or "no architecture"
        raise CheckpointError(
            f"model type {kind!r} ({name}) is not supported; supported are {', '.join(FAMILIES)}"
        )
    _check_architecture(own, kind, FAMILIES[kind].architectures)
    counts = ("num_experts", "num_local_experts")
    if kind not in _MIXTURES and any(own.get(key) for key in counts):
        raise CheckpointError(f"a mixture of experts of model type {kind!r} is not supported")
    own["model_type"] = kind
    return {**FAMILIES[kind].defaults, **own}


def check_multimodal(config: Config) -> None:
    """Raise CheckpointError for a config with a `text_config` whose language model does not run
    alone, as far as is known."""
    _check_architecture(config, config.get("model_type"), _MULTIMODAL)


def _check_architecture(config: Config, kind: Any, known: tuple[str, ...]) -> None:
    """Raise CheckpointError where the config has `architectures` and none of them is known."""
    names = config.get("architectures") or []
    if names and not set(names) & set(known):
        raise CheckpointError(
            f"architecture {', '.join(names)} of model type {kind!r} is not supported;"
            f" supported is {', '.join(known)}"
        )


def spec_from_config(
    config: Config, *, dtype: str | None = None, max_positions: int | None = None
) -> ModelSpec:
    """The shape of the model a config describes.

    `dtype` is the number format asked for (None: the checkpoint's own); it rounds Gemma's embedding
    scale as transformers does. `max_positions` is the context limit (None: what the model was
    trained for), on which the rope scalings `dynamic` and `longrope` depend. Raises CheckpointError
    for what is unsupported or missing.
    """
    config = text_config(config)
    family = FAMILIES[config["model_type"]]
    if config.get("use_bidirectional_attention"):
        raise CheckpointError("bidirectional attention in a Gemma config is not supported")
    if max_positions is not None:
        integer("max_positions", max_positions)
    limit = max_positions or _trained_positions(config)
    return ModelSpec(
        architecture=_architecture(config) or config["model_type"],
        vocab_size=size_of(config, "vocab_size"),
        hidden_size=size_of(config, "hidden_size"),
        max_positions=limit,
        norm_eps=number("rms_norm_eps", _given(config, "rms_norm_eps", 1e-6), 0.0, 1.0),
        layers=tuple(_layers(config, family, limit)),
        embedding_scale=_embedding_scale(config, dtype) if family.has_scaled_embedding else 1.0,
        logit_softcap=_number(config, "final_logit_softcapping"),
        causal=family.causal,
        logit_shift=1 if flag(config, "right_shift_logits") else family.logit_shift,
        block_size=_block_size(config, family),
    )


def _block_size(config: Config, family: Family) -> int | None:
    """The blocks in which rows see each other; None where all rows do."""
    key = family.block_size
    if key is None or config.get(key) is None:
        return family.default_block_size
    return size_of(config, key)


def _architecture(config: Config) -> str | None:
    """The first of the config's architectures, if it names any."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def size_of(
    config: Config, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE
) -> int:
    """The integer under `key`; null counts as left out. Raises CheckpointError where it is no
    integer from `low` to `high`, or is missing and has no default."""
    value = _given(config, key, default)
    if value is None:
        raise CheckpointError(f"the config lacks {key!r}")
    return integer(key, value, low, high)


def flag(config: Config, key: str, default: bool = False) -> bool:
    """The boolean under `key`; null counts as left out."""
    value = _given(config, key, default)
    if not isinstance(value, bool):
        raise refusal(key, value, "true or false")
    return value


def _given(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _number(config: Config, key: str) -> float | None:
    """The number under `key`; None where it is null or missing."""
    value = config.get(key)
    return None if value is None else number(key, value)


def _mapping(config: Config, key: str) -> dict[str, Any]:
    """A copy of the object under `key`; empty where it is null or missing."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise refusal(key, value, "an object")
    return dict(value or {})


def _list(config: Config, key: str, kind: type) -> list[Any] | None:
    """The list under `key`, of entries of one kind; None where it is null or missing."""
    value = config.get(key)
    right = isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
    if value is not None and not right:
        raise refusal(key, value, f"a list of {kind.__name__}")
    return value


def num_layers(config: Config) -> int:
    """Layers of the model."""
    return size_of(config, "num_hidden_layers", high=MAX_COUNT)


def head_dim(config: Config) -> int:
    """Dimensions per head: as given, or an equal share of the hidden size."""
    heads = size_of(config, "num_attention_heads", high=MAX_COUNT)
    return size_of(config, "head_dim", size_of(config, "hidden_size") // heads, high=MAX_COUNT)


def rotated_layers(config: Config) -> list[bool]:
    """Which layers have position embedding (all but in SmolLM3)."""
    count = num_layers(config)
    if config["model_type"] != "smollm3":
        return [True] * count
    flags = _list(config, "no_rope_layers", int)  # 1 means with rope, whatever the name says
    if flags is None:
        interval = size_of(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    return [bool(flag) for flag in flags[:count]]


def is_expert_layer(config: Config, layer: int) -> bool:
    """Whether a layer's MLP is a mixture of experts."""
    if config["model_type"] == "mixtral":
        return True
    if config["model_type"] not in _MIXTURES:
        return False
    step = size_of(config, "decoder_sparse_step", 1)
    dense = _list(config, "mlp_only_layers", int) or []
    return layer not in dense and num_experts(config) > 0 and (layer + 1) % step == 0


def num_experts(config: Config) -> int:
    """Experts per mixture layer."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return size_of(config, key, low=0, high=MAX_COUNT)


def _layers(config: Config, family: Family, limit: int) -> list[LayerSpec]:
    types = _list(config, "layer_types", str) or family.windows(config)
    count, rotated = num_layers(config), rotated_layers(config)
    if len(types) < count or len(rotated) < count:
        raise CheckpointError(f"the config describes fewer than its {count} layers")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(f"activation {activation!r} is not supported")
    dim, trained = head_dim(config), size_of(config, "max_position_embeddings")
    ropes = {
        kind: make_rope(_rope_parameters(config, kind), dim, trained, limit)
        for kind in sorted(set(types))
    }
    layers = []
    for layer in range(count):
        mixed = is_expert_layer(config, layer)
        layers.append(
            LayerSpec(
                attention=_attention(config, family, types[layer], dim),
                rope=ropes[types[layer]] if rotated[layer] else None,
                norms=family.norms,
                qk_norm=family.qk_norm,
                activation=_ACTIVATIONS[activation],
                num_experts=num_experts(config) if mixed else 0,
                experts_per_token=size_of(config, "num_experts_per_tok") if mixed else 0,
                normalise_experts=flag(config, "norm_topk_prob", family.router_is_normalised),
            )
        )
    return layers


def _attention(config: Config, family: Family, kind: str, dim: int) -> Attention:
    heads = size_of(config, "num_attention_heads", high=MAX_COUNT)
    if kind not in (_SLIDING, _FULL):
        raise CheckpointError(f"attention of type {kind!r} is not supported")
    return Attention(
        num_heads=heads,
        num_kv_heads=size_of(config, "num_key_value_heads", heads, high=MAX_COUNT),
        head_dim=dim,
        scale=(_number(config, "query_pre_attn_scalar") or dim) ** -0.5,
        window=size_of(config, "sliding_window") if kind == _SLIDING else None,
        softcap=_number(config, "attn_logit_softcapping") if family.has_attention_softcap else None,
    )


def _rope_parameters(config: Config, kind: str) -> dict[str, Any]:
    """The rope parameters of one layer type, from the new layout (`rope_parameters`, flat or per
    layer type) or the old one (`rope_theta`, `rope_scaling`, `rope_local_base_freq`)."""
    given = _mapping(config, "rope_parameters")
    theta = _given(config, "rope_theta", 10_000.0)
    if kind in given:
        own = _mapping(given, kind)
    elif config["model_type"] == "gemma3_text" and kind == _SLIDING:
        own, theta = {}, config["rope_local_base_freq"]
    else:
        own = {key: value for key, value in given.items() if not isinstance(value, dict)}
        own.update(_mapping(config, "rope_scaling"))
    if own.get("rope_theta") is None:
        own["rope_theta"] = theta
    name = rope_type(own)
    if config["model_type"] == "phi3" and name == "yarn":
        name = "longrope"  # early Phi-3 checkpoints call it so
    own["rope_type"] = name
    if config["model_type"] != "phi3" and name == "default":
        own.pop("partial_rotary_factor", None)
    elif own.get("partial_rotary_factor") is None:
        own["partial_rotary_factor"] = config.get("partial_rotary_factor")
    original = config.get("original_max_position_embeddings")
    if original is not None:
        own["original_max_position_embeddings"] = original
    own.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return own


def _trained_positions(config: Config) -> int:
    """The default context limit: positions for which no scaling needs to look at the length."""
    longest = size_of(config, "max_position_embeddings")
    parameters = _rope_parameters(config, _FULL)
    if rope_type(parameters) == "longrope":
        return min(longest, size_of(parameters, "original_max_position_embeddings"))
    return longest


def _embedding_scale(config: Config, dtype: str | None) -> float:
    """sqrt(hidden_size), rounded to the float format asked for, or else the checkpoint's own."""
    named = dtype if dtype in _FLOATS else str(config.get("dtype") or config.get("torch_dtype"))
    precision = _FLOATS.get(named.removeprefix("torch."), torch.float32)
    return float(torch.tensor(math.sqrt(size_of(config, "hidden_size")), dtype=precision))


_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
