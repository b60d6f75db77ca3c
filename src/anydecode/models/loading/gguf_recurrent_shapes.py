"""The tensors of the recurrent sublayers of a GGUF file, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.models.families.recurrent import HYBRID, RECURRENT_TYPES
from anydecode.models.families.table import FAMILIES
from anydecode.models.families.values import Config

#: The name of a tensor in its layer, its shape, and whether it is required.
Expected = tuple[str, tuple[int, ...], bool]


def has_recurrence(config: Config, kind: str) -> bool:
    """Whether a layer of type `kind` has a recurrent sublayer."""
    return FAMILIES[config["model_type"]].recurrent is not None and (
        kind in (*RECURRENT_TYPES, HYBRID)
    )


def recurrent_shapes(config: Config, layer: int) -> Iterator[Expected]:
    """The tensors of a layer's recurrent sublayer."""
    if "mix_rank" in config:
        yield from _dynamic_mix(config)
    elif "decay_low_rank_dim" in config:
        yield from _time_mix(config, layer)
    elif "conv_L_cache" in config:
        yield from _short_conv(config)
    elif "linear_key_head_dim" in config:
        yield from _gated_delta(config)
    elif config["model_type"] == "jamba":
        yield from _jamba(config)
    elif config["model_type"] == "plamo2":
        yield from _plamo(config)
    elif config["model_type"] == "minimax":
        yield from _lightning(config)
    elif "linear_head_dim" in config:
        yield from _kimi_delta(config)
    elif "time_step_rank" in config:
        sizes = (config["intermediate_size"], config["state_size"], config["conv_kernel"])
        yield from _mamba("mixer", config, sizes, config["use_conv_bias"])
    else:
        yield from _mamba_2(config)


def _lightning(config: Config) -> Iterator[Expected]:
    hidden, size = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    yield "self_attn.qkv_proj.weight", (3 * size, hidden), True
    yield "self_attn.output_gate.weight", (size, hidden), True
    yield "self_attn.o_proj.weight", (hidden, size), True
    yield "self_attn.norm.weight", (size,), True


def time_mix_vectors(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the vectors of RWKV, but for those of its norms."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    if "mix_rank" in config:
        parts = [f"attention.time_{part}" for part in ("decay", *(f"maa_{x}" for x in "xwkvrg"))]
        own: dict[str, tuple[int, ...]] = {name: (hidden,) for name in parts}
        own["attention.time_maa"] = 5, hidden
        if config["model_type"] != "rwkv6":
            return own
        own |= {f"feed_forward.time_maa_{part}": (hidden,) for part in "kr"}
        return {**own, "attention.time_faaaa": (hidden // dim, dim)}
    names = ("attn.k_k", "attn.k_a", "ffn.x_k", *(f"attn.{x}_lora.lora.2.bias" for x in "wav"))
    vectors: dict[str, tuple[int, ...]] = {name: (hidden,) for name in names}
    count = 6 if config.get("has_gate", True) else 5
    if "has_head_norms" in config:  # ARWKV, whose MLPs mix nothing
        del vectors["ffn.x_k"]
    return {**vectors, "attn.x_x": (count, hidden), "attn.r_k": (hidden // dim, dim)}


def _dynamic_mix(config: Config) -> Iterator[Expected]:
    hidden, rank, decay_rank = (config[x] for x in ("hidden_size", "mix_rank", "decay_rank"))
    is_qwen = config["model_type"] == "rwkv6qwen2"
    num_keys = config["num_key_value_heads"] * config["head_dim"] if is_qwen else hidden
    for part in ("receptance", "key", "value", "gate", "output"):
        size = num_keys if part in ("key", "value") else hidden
        yield f"attention.{part}.weight", (size, hidden), True
        if is_qwen:
            yield f"attention.{part}.bias", (size,), False
    yield "attention.time_maa_w1", (5 * rank, hidden), True
    yield "attention.time_maa_w2", (5, hidden, rank), True
    yield "attention.time_decay_w1", (decay_rank, hidden), True
    yield "attention.time_decay_w2", (hidden, decay_rank), True
    if not is_qwen:
        yield "feed_forward.receptance.weight", (hidden, hidden), True
        for leaf in ("weight", "bias"):
            yield f"attention.ln_x.{leaf}", (hidden,), True
    for name, shape in time_mix_vectors(config).items():
        is_mix = name.startswith("attention.time_maa") and not name.endswith("_x")
        yield name, shape, not is_mix  # in one tensor or five


def _time_mix(config: Config, layer: int) -> Iterator[Expected]:
    hidden, is_first = config["hidden_size"], layer == 0
    for part in "rkvo":
        yield f"attn.{part}_proj.weight", (hidden, hidden), True
    for part, key in (("w", "decay"), ("a", "a"), ("g", "gate"), ("v", "v")):
        if (part == "v" and is_first) or (part == "g" and not config.get("has_gate", True)):
            continue
        rank = config[f"{key}_low_rank_dim"]
        yield f"attn.{part}_lora.lora.0.weight", (rank, hidden), True
        yield f"attn.{part}_lora.lora.2.weight", (hidden, rank), True
    for leaf in ("weight", "bias") if config.get("has_head_norms", True) else ():
        yield f"attn.g_norm.{leaf}", (hidden,), True
    for name, shape in time_mix_vectors(config).items():
        if not (is_first and name.startswith("attn.v_")):
            yield name, shape, True


def _short_conv(config: Config) -> Iterator[Expected]:
    hidden = config["hidden_size"]
    yield "conv.conv.weight", (hidden, 1, config["conv_L_cache"]), True
    yield "conv.in_proj.weight", (3 * hidden, hidden), True
    yield "conv.out_proj.weight", (hidden, hidden), True


def _mamba(
    name: str, config: Config, sizes: tuple[int, int, int], has_conv_bias: bool
) -> Iterator[Expected]:
    """The mixer `name`; `sizes` are those of its channels, states and convolution."""
    hidden, rank = config["hidden_size"], config["time_step_rank"]
    inner, size, window = sizes
    yield f"{name}.in_proj.weight", (2 * inner, hidden), True
    yield f"{name}.x_proj.weight", (rank + 2 * size, inner), True
    yield f"{name}.dt_proj.weight", (inner, rank), True
    yield f"{name}.out_proj.weight", (hidden, inner), True
    yield f"{name}.conv1d.weight", (inner, 1, window), True
    yield f"{name}.conv1d.bias", (inner,), has_conv_bias
    yield f"{name}.dt_proj.bias", (inner,), True
    yield f"{name}.A", (inner, size), True
    yield f"{name}.D", (inner,), True


def _jamba(config: Config) -> Iterator[Expected]:
    size, inner = config["mamba_d_state"], config["mamba_expand"] * config["hidden_size"]
    sizes = (inner, size, config["mamba_d_conv"])
    yield from _mamba("mamba", config, sizes, config["mamba_conv_bias"])
    for part, count in (("dt", config["time_step_rank"]), ("b", size), ("c", size)):
        yield f"mamba.{part}_layernorm.weight", (count,), True


def _plamo(config: Config) -> Iterator[Expected]:
    hidden, size, heads = (
        config[key] for key in ("hidden_size", "mamba_d_state", "mamba_num_heads")
    )
    inner, rank = heads * config["head_dim"], max(64, hidden // 16)
    yield "mamba.in_proj.weight", (2 * inner, hidden), True
    yield "mamba.x_proj.weight", (2 * size + rank, inner), True
    yield "mamba.dt_proj.weight", (heads, rank), True
    yield "mamba.out_proj.weight", (hidden, inner), True
    yield "mamba.conv1d.weight", (inner, 1, config["mamba_d_conv"]), True
    for vector in ("A", "D", "dt_proj.bias"):
        yield f"mamba.{vector}", (heads,), True
    for part, count in (("dt", rank), ("b", size), ("c", size)):
        yield f"mamba.{part}_layernorm.weight", (count,), True


def _mamba_2(config: Config) -> Iterator[Expected]:
    hidden, inner, heads = config["hidden_size"], config["mamba_d_ssm"], config["mamba_n_heads"]
    width = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield "mamba.in_proj.weight", (inner + width + heads, hidden), True
    yield "mamba.out_proj.weight", (hidden, inner), True
    yield "mamba.conv1d.weight", (width, 1, config["mamba_d_conv"]), True
    yield "mamba.conv1d.bias", (width,), config["mamba_conv_bias"]
    yield "mamba.norm.weight", (inner,), config.get("mamba_rms_norm", True)
    for vector in ("A", "D", "dt_bias"):
        yield f"mamba.{vector}", (heads,), True


def _gated_delta(config: Config) -> Iterator[Expected]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    num_keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_values, name = heads * config["linear_value_head_dim"], "linear_attn"
    width = 2 * num_keys + num_values
    is_fused = config["has_fused_inputs"]
    yield f"{name}.in_proj_qkvz.weight", (width + num_values, hidden), is_fused
    yield f"{name}.in_proj_qkv.weight", (width, hidden), not is_fused
    yield f"{name}.in_proj_z.weight", (num_values, hidden), not is_fused
    is_separate = config["has_separate_gates"]
    yield f"{name}.in_proj_ba.weight", (2 * heads, hidden), not is_separate
    for part in "ab":
        yield f"{name}.in_proj_{part}.weight", (heads, hidden), is_separate
    yield f"{name}.conv1d.weight", (width, 1, config["linear_conv_kernel_dim"]), True
    yield f"{name}.norm.weight", (config["linear_value_head_dim"],), True
    yield f"{name}.out_proj.weight", (hidden, num_values), True
    for vector in ("A", "dt_bias"):
        yield f"{name}.{vector}", (heads,), True


def _kimi_delta(config: Config) -> Iterator[Expected]:
    hidden, heads = config["hidden_size"], config["linear_num_heads"]
    dim, name = config["linear_head_dim"], "self_attn"
    size = heads * dim
    for part in "qkv":
        yield f"{name}.{part}_proj.weight", (size, hidden), True
        yield f"{name}.{part}_conv1d.weight", (size, 1, config["linear_conv_kernel_dim"]), True
    # Those of full rank, in place of two matrices each.
    whole = {"bailing_hybrid": "fg", "kimi_k3": "g"}.get(config["model_type"], "")
    for part in "fg":
        if part in whole:
            yield f"{name}.{part}_proj.weight", (size, hidden), True
            continue
        yield f"{name}.{part}_a_proj.weight", (dim, hidden), True
        yield f"{name}.{part}_b_proj.weight", (size, dim), True
    yield f"{name}.b_proj.weight", (heads, hidden), True
    yield f"{name}.o_norm.weight", (dim,), True
    yield f"{name}.o_proj.weight", (hidden, size), True
    yield f"{name}.A", (heads,), True
    yield f"{name}.dt_bias", (size,), True
