"""What families compute from a config: the attention types of the layers, which layers have a
rotary position embedding, and constant factors."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from anydecode.kernels.formats import DTYPES
from anydecode.models.families.family import Scales
from anydecode.models.families.values import (
    Config,
    bool_value,
    int_value,
    layer_overrides,
    list_value,
    mapping_value,
    num_layers,
    optional_number,
    value_or,
)
from anydecode.models.limits import ConfigError, number, refusal

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
#: The types of layers that are an MLP, or experts, only.
MLP, MOE = "mlp", "moe"
#: The type of layers with a gated memory unit.
MEMORY_UNIT = "memory_unit"
#: The type of layers of full attention that compute a second stream.
SIDE = "side_attention"
#: The key of the bases of the layers' rotary frequencies, 0 for none.
LAYER_THETA = "layer_rope_theta"
#: The letters of Nemotron-H's patterns.
_LETTERS = {"M": "linear_attention", "*": FULL, "-": MLP, "E": MOE}
#: The letters of the patterns of indexers.
_INDEXERS = {"F": "full", "S": "shared"}


def all_full(config: Config) -> list[str]:
    """Full attention in every layer."""
    return [FULL] * num_layers(config)


def all_sliding(config: Config) -> list[str]:
    """Sliding attention in every layer if the config has a window, else full."""
    kind = SLIDING if config.get("sliding_window") is not None else FULL
    return [kind] * num_layers(config)


def sliding_from_layer(config: Config) -> list[str]:
    """Qwen: sliding attention from layer `max_window_layers` on, if windows are enabled."""
    count, first = num_layers(config), int_value(config, "max_window_layers", 28, low=0)
    if not _uses_window(config):
        return [FULL] * count
    return [SLIDING if layer >= first else FULL for layer in range(count)]


def alternating_before_layer(config: Config) -> list[str]:
    """Qwen2-MoE: sliding attention in every second layer before `max_window_layers`, if windows are
    enabled."""
    count, stop = num_layers(config), int_value(config, "max_window_layers", 28, low=0)
    if not _uses_window(config):
        return [FULL] * count
    return [FULL if layer % 2 or layer >= stop else SLIDING for layer in range(count)]


def all_sliding_if_enabled(config: Config) -> list[str]:
    """Sliding attention in every layer, if windows are enabled."""
    kind = SLIDING if _uses_window(config) else FULL
    return [kind] * num_layers(config)


def sliding_without_rope(config: Config) -> list[str]:
    """SmolLM3: sliding attention in the layers without position embedding, if windows are
    enabled."""
    is_enabled = _uses_window(config)
    flags = rope_flags(config, [])
    return [FULL if has_rope or not is_enabled else SLIDING for has_rope in flags]


def rope_flags(config: Config, layer_types: list[str]) -> list[bool]:
    """SmolLM3: whether each layer has a rotary position embedding."""
    count = num_layers(config)
    flags = list_value(config, "no_rope_layers", int)  # despite its name, 1 means with rope
    if flags is None:
        interval = int_value(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    return [bool(flag) for flag in flags[:count]]


def rope_if_sliding(config: Config, layer_types: list[str]) -> list[bool]:
    """EXAONE 4 with windows: a rotary position embedding in layers with sliding attention."""
    if config.get("sliding_window") is None:
        return [True] * len(layer_types)
    return [kind == SLIDING for kind in layer_types]


def chunked_if_rope(config: Config) -> list[str]:
    """Llama 4: chunked attention in the layers with a rotary position embedding."""
    return [CHUNKED if has_rope else FULL for has_rope in rope_flags(config, [])]


def llama4_layers(config: Config) -> dict[str, Any]:
    """Llama 4: the sizes of MLPs and of experts, and which layers have experts."""
    flags = list_value(config, "no_rope_layers", int) or None  # an empty list is none
    if "moe_intermediate_size" in config:
        return {"no_rope_layers": flags}
    sparse, count = list_value(config, "moe_layers", int), num_layers(config)
    dense = [] if sparse is None else [layer for layer in range(count) if layer not in sparse]
    step = int_value(config, "interleave_moe_layer_step", 1)
    return {
        "no_rope_layers": flags,
        "moe_intermediate_size": config.get("intermediate_size"),
        "intermediate_size": int_value(config, "intermediate_size_mlp"),
        "mlp_only_layers": dense,
        "decoder_sparse_step": step if sparse is None else 1,
    }


def rope_unless_alibi(config: Config, layer_types: list[str]) -> list[bool]:
    """A rotary position embedding in every layer, unless attention has linear biases (`alibi`)."""
    return [not bool_value(config, "alibi")] * len(layer_types)


def layer_thetas(config: Config) -> list[float] | None:
    """The base of each layer's rotary frequencies, 0 for none; None: one for all."""
    thetas, count = config.get(LAYER_THETA), num_layers(config)
    if thetas is None:
        return None
    if not isinstance(thetas, list) or len(thetas) < count:
        raise refusal(LAYER_THETA, thetas, f"a list of {count} numbers")
    return [theta if theta == 0 else number(LAYER_THETA, theta) for theta in thetas[:count]]


def rope_if_theta(config: Config, layer_types: list[str]) -> list[bool]:
    """A rotary position embedding in the layers whose base is not 0."""
    thetas = layer_thetas(config)
    return [True] * len(layer_types) if thetas is None else [theta != 0 for theta in thetas]


def own_thetas(config: Config) -> dict[str, Any]:
    """The bases of the layers' rotary frequencies, if they are listed."""
    thetas = layer_thetas(config)
    if thetas is None:
        return {}
    own = {str(layer): {"own_rope_theta": theta} for layer, theta in enumerate(thetas) if theta}
    return {"per_layer_config": own}


def no_rope(config: Config, layer_types: list[str]) -> list[bool]:
    """No rotary position embedding in any layer."""
    return [False] * len(layer_types)


def rope_if_named(config: Config, layer_types: list[str]) -> list[bool]:
    """Granite 4: a rotary position embedding in all layers or none."""
    return [config.get("position_embedding_type") == "rope"] * len(layer_types)


def full_every_nth(config: Config) -> list[str]:
    """Full attention in every n-th layer, sliding attention in the others."""
    period = int_value(config, "sliding_window_pattern", 6)
    count = num_layers(config)
    return [SLIDING if (layer + 1) % period else FULL for layer in range(count)]


def full_every_third(config: Config) -> list[str]:
    """ModernBERT: full attention in the first of every `global_attn_every_n_layers` layers."""
    period = int_value(config, "global_attn_every_n_layers", 3)
    return [SLIDING if layer % period else FULL for layer in range(num_layers(config))]


def hybrid_pattern(config: Config) -> list[str]:
    """EXAONE 4: a period, or a text with one letter per layer of it, L for sliding attention."""
    count, pattern = num_layers(config), config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return [FULL] * count
    if isinstance(pattern, str) and set(pattern) <= set("LG") and pattern:
        letters = [pattern[layer % len(pattern)] for layer in range(count)]
        return [SLIDING if letter == "L" else FULL for letter in letters]
    return full_every_nth(config)


def all_recurrent(config: Config) -> list[str]:
    """A recurrent sublayer in every layer."""
    return ["linear_attention"] * num_layers(config)


def all_hybrid(config: Config) -> list[str]:
    """Falcon-H1: attention and a recurrence, in parallel, in every layer."""
    return ["hybrid"] * num_layers(config)


def granite_sizes(config: Config) -> dict[str, Any]:
    """Granite 4: the inner sizes of experts, and of the MLP that every token runs through."""
    if "moe_intermediate_size" in config:
        return {}
    inner = config.get("shared_intermediate_size") or config.get("intermediate_size")
    return {
        "moe_intermediate_size": config.get("intermediate_size"),
        "intermediate_size": inner,
    }


def falcon_h1_scales(config: Config) -> Scales:
    """Falcon-H1: the factors of embeddings and logits."""
    embedding, logits = (
        number(key, value_or(config, key, 1.0))
        for key in ("embedding_multiplier", "lm_head_multiplier")
    )
    return Scales(embedding, logits=logits)


def nemotron_h_layers(config: Config) -> dict[str, Any]:
    """Nemotron-H: its layers, from a list or a pattern, which of them have experts, and the inner
    size of its recurrence."""
    types, pattern = list_value(config, "layer_types", str), config.get("hybrid_override_pattern")
    if types is None:
        if not isinstance(pattern, str) or not set(pattern) <= set(_LETTERS):
            raise refusal("hybrid_override_pattern", pattern, "a text of the letters M, E, * and -")
        types = [_LETTERS[letter] for letter in pattern]
    heads, size = int_value(config, "mamba_n_heads"), int_value(config, "mamba_d_head")
    return {
        "layer_types": types,
        "num_hidden_layers": len(types),
        "mamba_d_ssm": heads * size,
        "mlp_only_layers": [layer for layer, kind in enumerate(types) if kind != MOE],
    }


def attention_every_nth(config: Config) -> list[str]:
    """Qwen3-Next: full attention in every n-th layer, a recurrence in the others."""
    period, count = int_value(config, "full_attention_interval", 4), num_layers(config)
    return ["linear_attention" if (layer + 1) % period else FULL for layer in range(count)]


def cache_layers(config: Config, layer_types: list[str]) -> list[int | None]:
    """Gemma 3n and 4: for each layer, the earlier one whose keys and values it shares, or None.

    The last `num_kv_shared_layers` layers share those of the last layer of their type before them.
    Mistral Large 4 lists them, a layer with keys of its own by its own number.
    """
    count = len(layer_types)
    listed = list_value(config, "kv_source_layers", int)
    if listed is not None:
        if len(listed) < count:
            raise refusal("kv_source_layers", listed, f"a list of {count} layers")
        return [None if source == layer else source for layer, source in enumerate(listed[:count])]
    num_shared = int_value(config, "num_kv_shared_layers", 0, low=0, high=count - 1)
    own = layer_types[: count - num_shared]
    missing = {SLIDING, FULL, CHUNKED} & (set(layer_types) - set(own))
    if missing:
        raise ConfigError(
            f"num_kv_shared_layers is {num_shared}: there is no earlier layer of type"
            f" {', '.join(sorted(missing))}"
        )
    last = {kind: layer for layer, kind in enumerate(own) if kind in (SLIDING, FULL, CHUNKED)}
    return [None] * len(own) + [last.get(kind) for kind in layer_types[len(own) :]]


def gemma4_layers(config: Config) -> dict[str, Any]:
    """Gemma 4: the types of its layers, the sizes in which layers differ, and its experts."""
    types = list_value(config, "layer_types", str) or full_every_nth(config)
    types = [*types[: num_layers(config) - 1], FULL]
    overrides = layer_overrides(config)
    if not overrides:
        sizes = {"head_dim": int_value(config, "global_head_dim", 512)}
        kv_heads = config.get("num_global_key_value_heads")
        if bool_value(config, "attention_k_eq_v") and kv_heads is not None:
            sizes["num_key_value_heads"] = kv_heads
        overrides = {str(i): sizes for i, kind in enumerate(types) if kind == FULL}
    if bool_value(config, "use_double_wide_mlp"):
        wide = {"intermediate_size": 2 * int_value(config, "intermediate_size")}
        for index, source in enumerate(cache_layers(config, types)):
            if source is not None:
                overrides[str(index)] = {**wide, **mapping_value(overrides, str(index))}
    has_experts = bool_value(config, "enable_moe_block")
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    return {
        "layer_types": types,
        "per_layer_config": overrides,
        "num_experts": int_value(config, "num_experts") if has_experts else 0,
        "num_experts_per_tok": config.get("top_k_experts"),
        "rope_parameters": mapping_value(config, "rope_parameters") or rope,
    }


def two_sided_window(config: Config) -> dict[str, Any]:
    """EmbeddingGemma: the config has the size of the whole window; each side has half of it."""
    if "has_two_sides" in config:
        return {}
    return {"sliding_window": int_value(config, "sliding_window") // 2 + 1, "has_two_sides": True}


def gemma3n_layers(config: Config) -> dict[str, Any]:
    """Gemma 3n: the sizes of its MLPs, and the thresholds of their gates in standard deviations."""
    count, changes = num_layers(config), {}
    inner = config.get("intermediate_size")
    if isinstance(inner, list):
        if len(inner) < count:
            raise refusal(
                "intermediate_size", inner, f"one size, or one for each of {count} layers"
            )
        sizes = {str(layer): {"intermediate_size": inner[layer]} for layer in range(count)}
        changes = {"intermediate_size": inner[0], "per_layer_config": sizes}
    cutoffs = config.get("gate_cutoffs")
    if cutoffs is None:
        cutoffs = [NormalDist().inv_cdf(x) if x else None for x in _sparsity(config, count)]
    if not isinstance(cutoffs, list) or len(cutoffs) < count:
        raise refusal("gate_cutoffs", cutoffs, f"a list of {count} numbers")
    return {**changes, "gate_cutoffs": cutoffs}


def _sparsity(config: Config, count: int) -> list[float]:
    """The share of zeros in the gate of each layer of Gemma 3n."""
    key = "activation_sparsity_pattern"
    values = config.get(key)
    if values is None:
        values = [0.95 if count > 10 and layer < 10 else 0.0 for layer in range(count)]
    if not isinstance(values, list):
        values = [values] * count
    if len(values) < count:
        raise refusal(key, values, f"one number, or one for each of {count} layers")
    return [number(key, value, 0.0, 0.9999) for value in values[:count]]


def listed_attention(config: Config) -> list[str]:
    """LFM2: attention in the layers of `full_attn_idxs` (all without it), convolution in others."""
    count = num_layers(config)
    full = list_value(config, "full_attn_idxs", int)
    return [FULL if full is None or layer in full else "conv" for layer in range(count)]


def lfm2_sizes(config: Config) -> dict[str, Any]:
    """LFM2: the inner size of its MLPs, and its layers' types."""
    inner = int_value(config, "intermediate_size")
    if bool_value(config, "block_auto_adjust_ff_dim", True):
        factor = number("block_ffn_dim_multiplier", value_or(config, "block_ffn_dim_multiplier", 1))
        multiple = int_value(config, "block_multiple_of", 256)
        inner = -(-int(factor * int(2 * inner / 3)) // multiple) * multiple
    return {"intermediate_size": inner, "block_auto_adjust_ff_dim": False}


def recurrent_gemma_layers(config: Config) -> list[str]:
    """RecurrentGemma: a pattern of recurrences and of attention with a window, repeated."""
    count = num_layers(config)
    key = "block_types" if config.get("block_types") is not None else "_block_types"
    pattern = list_value(config, key, str) or ["recurrent", "recurrent", "attention"]
    if not set(pattern) <= {"recurrent", "attention"}:
        raise refusal(key, pattern, "a list of recurrent and attention")
    kinds = {"recurrent": "linear_attention", "attention": SLIDING}
    return [kinds[pattern[layer % len(pattern)]] for layer in range(count)]


def recurrent_gemma_sizes(config: Config) -> dict[str, Any]:
    """RecurrentGemma: the config has the size of both halves of a gated MLP together, and layer
    types under another key."""
    return {
        "intermediate_size": int_value(config, "intermediate_size", low=2) // 2,
        "layer_types": recurrent_gemma_layers(config),
    }


def recurrent_gemma_scales(config: Config) -> Scales:
    """RecurrentGemma: embeddings are scaled by the root of the hidden size in bfloat16."""
    root = np.float32(int_value(config, "hidden_size") ** 0.5)
    return Scales(float(root.astype(DTYPES["BF16"])))


def granite_scales(config: Config) -> Scales:
    factors = ("embedding_multiplier", "attention_multiplier", "residual_multiplier")
    embedding, attention, residual = (number(key, value_or(config, key, 1.0)) for key in factors)
    logits = 1.0 / number("logits_scaling", value_or(config, "logits_scaling", 1.0))
    return Scales(embedding, attention, residual, logits)


def deepseek_v2_routing(config: Config) -> dict[str, Any]:
    """DeepSeek-V2: no weights of experts are normalised. Its own code would not scale them then,
    and transformers ignores the key."""
    if bool_value(config, "norm_topk_prob"):
        raise refusal("norm_topk_prob", True, "false for deepseek_v2")
    return {}


def dense_layers(config: Config) -> dict[str, Any]:
    """GLM-4.7-Flash: the layers without experts, from a list; the first one without it."""
    types = list_value(config, "mlp_layer_types", str)
    if types is None:
        return {"first_k_dense_replace": 1}
    if not set(types) <= {"dense", "sparse"} or len(types) < num_layers(config):
        raise refusal("mlp_layer_types", types, "dense or sparse for each layer")
    dense = [layer for layer, kind in enumerate(types) if kind == "dense"]
    return {"first_k_dense_replace": 0, "mlp_only_layers": dense}


def listed_dense_layers(config: Config) -> dict[str, Any]:
    """The layers without experts, if the config lists them."""
    return {} if config.get("mlp_layer_types") is None else dense_layers(config)


def indexer_types(config: Config) -> list[str]:
    """DeepSeek-V3.2 and others: which layers have an indexer, "full": those of a list or a pattern,
    or every `index_topk_freq`-th one after the first `index_skip_topk_offset` - 1."""
    types, pattern = list_value(config, "indexer_types", str), config.get("index_topk_pattern")
    kinds = ("full", "shared")
    for layer, kind in enumerate(types or ()):
        if kind not in kinds:
            raise refusal(f"indexer_types[{layer}]", kind, " or ".join(kinds))
    if types is not None:
        return types
    if isinstance(pattern, str) and set(pattern) <= set(_INDEXERS):
        return [_INDEXERS[letter] for letter in pattern]
    if pattern is not None:
        raise refusal("index_topk_pattern", pattern, "a text of F and S")
    step = int_value(config, "index_topk_freq", 1)
    first = int_value(config, "index_skip_topk_offset", 2, low=0) - 1
    return [kinds[max(layer - first, 0) % step > 0] for layer in range(num_layers(config))]


def ernie_layers(config: Config) -> dict[str, Any]:
    """ERNIE 4.5 with experts: the layers after the last one that has some."""
    last, count = value_or(config, "moe_layer_end_index", -1), num_layers(config)
    last = count - 1 if last == -1 else int_value(config, "moe_layer_end_index", low=0)
    return {"mlp_only_layers": list(range(last + 1, count))}


def cohere_scales(config: Config) -> Scales:
    return Scales(logits=number("logit_scale", value_or(config, "logit_scale", 0.0625)))


def mpt_scales(config: Config) -> Scales:
    return Scales(attention=optional_number(config, "softmax_scale"))


def minicpm_scales(config: Config) -> Scales:
    depth = number("scale_depth", value_or(config, "scale_depth", 1.0))
    base = int_value(config, "dim_model_base", 1)
    return Scales(
        embedding=number("scale_emb", value_or(config, "scale_emb", 1.0)),
        residual=depth / math.sqrt(num_layers(config)),
        logits=base / int_value(config, "hidden_size"),
    )


def looped_layers(config: Config, loops: int, has_norms: bool) -> dict[str, Any]:
    """The layers of a model that runs them `loops` times in sequence, whose weights are those of
    `num_stored_layers`; with `has_norms` the final norm follows each run."""
    if "num_stored_layers" in config:
        return {}
    stored, types = num_layers(config), list_value(config, "layer_types", str)
    return {
        "layer_types": types and types * loops,
        "num_stored_layers": stored,
        "layer_sources": list(range(stored)) * loops,
        "num_hidden_layers": loops * stored,
        "has_loop_norms": has_norms,
    }


def _uses_window(config: Config) -> bool:
    return bool_value(config, "use_sliding_window") and config.get("sliding_window") is not None
