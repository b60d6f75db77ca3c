"""The metadata of GGUF files of models with recurrent layers, by architecture."""

from __future__ import annotations

from collections.abc import Callable

from anydecode.models.families.recurrent import step_rank
from anydecode.models.families.values import Config
from anydecode.models.loading.gguf_experts import SIGMOID
from anydecode.models.loading.gguf_recurrent import RANKS
from anydecode.models.spec import ModelSpec
from anydecode.quantization.gguf import Value

Metadata = dict[str, Value]
#: The keys of an architecture, without its name, from the architecture and the config of a model.
Form = Callable[[ModelSpec, Config], Metadata]


def _recurrence(spec: ModelSpec) -> Metadata:
    """The sizes of the recurrence."""
    shape = next(layer.recurrence.shape for layer in spec.layers if layer.recurrence is not None)
    return {
        "ssm.conv_kernel": shape.window,
        "ssm.inner_size": shape.width_out,
        "ssm.state_size": shape.state_size,
        "ssm.time_step_rank": shape.num_heads,
        "ssm.group_count": shape.num_groups,
    }


def kv_heads(spec: ModelSpec) -> Metadata:
    """The number of key heads of each layer: 0 where there is no attention."""
    layers = (layer.attention for layer in spec.layers)
    heads = [0 if one is None else one.num_kv_heads for one in layers]
    return {"attention.head_count_kv": heads}


def _gated_delta(spec: ModelSpec, config: Config) -> Metadata:
    """Qwen3-Next. Layers without attention follow each other up to one with it."""
    period = next((i for i, x in enumerate(spec.layers, 1) if x.recurrence is None), None)
    return {
        **_recurrence(spec),
        "full_attention_interval": period or len(spec.layers) + 1,
    }


def _qwen_3_5(spec: ModelSpec, config: Config) -> Metadata:
    """Qwen3.5: the parts of rotary embeddings of images, which are the same for texts."""
    parameters = config.get("rope_parameters") or {}
    sections = [int(number) for number in parameters.get("mrope_section") or (11, 11, 10)]
    return {**_gated_delta(spec, config), "rope.dimension_sections": [*sections, 0]}


def _lfm2(spec: ModelSpec, config: Config) -> Metadata:
    """LFM2."""
    shape = next(layer.recurrence.shape for layer in spec.layers if layer.recurrence is not None)
    return {**kv_heads(spec), "shortconv.l_cache": shape.window}


def _lfm2_moe(spec: ModelSpec, config: Config) -> Metadata:
    """LFM2 with experts behind the first layers."""
    return {
        **_lfm2(spec, config),
        "leading_dense_block_count": int(config["first_k_dense_replace"]),
        "expert_gating_func": SIGMOID,
    }


#: A model without attention and MLPs.
_MIXERS_ALONE: Metadata = {"feed_forward_length": 0, "attention.head_count": 0}


def _mamba(spec: ModelSpec, config: Config) -> Metadata:
    """Mamba, and Falcon-Mamba, which has norms of the gates."""
    sizes = {**_recurrence(spec), "ssm.time_step_rank": step_rank(config)}
    has_norms = config["model_type"] == "falcon_mamba"
    return {**_MIXERS_ALONE, **sizes, **({"ssm.dt_b_c_rms": True} if has_norms else {})}


def _mamba_2(spec: ModelSpec, config: Config) -> Metadata:
    """Mamba-2."""
    return {**_MIXERS_ALONE, **_recurrence(spec)}


def _falcon_h1(spec: ModelSpec, config: Config) -> Metadata:
    """Falcon-H1, whose factors are part of the weights."""
    return _recurrence(spec)


def granite_factors(config: Config) -> Metadata:
    """The factors of Granite."""
    names = (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    keys = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    return {
        key: float(config[name])
        for key, name in zip(keys, names, strict=True)
        if config.get(name) is not None
    }


def _granite_hybrid(spec: ModelSpec, config: Config) -> Metadata:
    """Granite 4. The size of experts is that of MLPs."""
    size = "moe_intermediate_size" if config.get("num_local_experts") else "intermediate_size"
    return {
        **granite_factors(config),
        **_recurrence(spec),
        **kv_heads(spec),
        "feed_forward_length": int(config[size]),
        "rope.scaling.finetuned": any(layer.rope is not None for layer in spec.layers),
    }


def _nemotron_h(spec: ModelSpec, config: Config) -> Metadata:
    """Nemotron-H: each layer is a recurrence, attention or an MLP."""
    has_mlp = (layer.attention is None and layer.recurrence is None for layer in spec.layers)
    dense, inner = config.get("intermediate_size"), config.get("moe_intermediate_size")
    sizes = [
        int((inner if layer.num_experts else dense) or 0) if flag else 0
        for layer, flag in zip(spec.layers, has_mlp, strict=True)
    ]
    found: Metadata = {
        **_recurrence(spec),
        **kv_heads(spec),
        "feed_forward_length": sizes,
        "attention.layer_norm_epsilon": spec.norm_eps,
    }
    if not any(layer.num_experts for layer in spec.layers):
        return found
    found |= {
        "expert_shared_count": 1,
        "expert_weights_norm": bool(config.get("norm_topk_prob", True)),
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "expert_group_count": int(config.get("n_group") or 1),
        "expert_group_used_count": int(config.get("topk_group") or 1),
    }
    if config.get("moe_latent_size") is not None:
        found["moe_latent_size"] = int(config["moe_latent_size"])
    return found


def _rwkv7(spec: ModelSpec, config: Config) -> Metadata:
    """RWKV-7: the size of its heads and the ranks of its products."""
    ranks = {f"attention.{key}": int(config[name]) for key, name in RANKS.items()}
    return {"attention.head_count": 0, "wkv.head_size": int(config["head_dim"]), **ranks}


RECURRENT_FORMS: dict[str, Form] = {
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "mamba": _mamba,
    "mamba2": _mamba_2,
    "falcon-h1": _falcon_h1,
    "rwkv7": _rwkv7,
    "granitehybrid": _granite_hybrid,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "qwen3next": _gated_delta,
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen_3_5),
}
