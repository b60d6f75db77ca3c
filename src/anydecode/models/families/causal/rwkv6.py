"""RWKV-6, called Finch (Peng et al., 2024, arXiv:2404.05892), with the names of the repositories
of RWKV, and RWKV-6 in Qwen2 (QRWKV6; Goldstein et al., 2025, arXiv:2505.03005), whose MLPs are
those of Qwen2 and whose recurrence is gated linear attention. The names of both are converted when
a folder is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.kernels.formats import plain_weight
from anydecode.kernels.interface import Recurrence, WkvWeights
from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_recurrent
from anydecode.models.families.recurrent import RecurrentLayout
from anydecode.models.families.values import (
    Config,
    head_dim,
    int_value,
    value_or,
)
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, MAX_LAYERS, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.spec import RecurrentSpec
from anydecode.models.time_mix import DynamicMixWeights, LowRankProduct

#: The context length: the recurrence has none.
_MAX_POSITIONS = 1 << 20
#: The mixtures, as checkpoints name them.
_MIXES = "wkvrg"
#: What configs of RWKV-6 in Qwen2 may say about the time mixing.
_QWEN_SETTINGS = {
    "attention_output_bias": False,
    "balance_state": True,
    "gate_rank_type": 1,
    "groupnorm_att": False,
    "use_rope": False,
    "use_tokenshift": True,
}


def _sizes(config: Config) -> dict[str, Any]:
    hidden, dim = int_value(config, "hidden_size"), int_value(config, "head_dim", 64)
    if config.get("attention_hidden_size") not in (None, hidden):
        key = "attention_hidden_size"
        raise refusal(key, config[key], f"{hidden}, the hidden size")
    if hidden % dim:
        raise refusal("head_size", dim, f"a divisor of the hidden size {hidden}")
    inner = int_value(config, "intermediate_size", int(hidden * 3.5) // 32 * 32)
    # The config's heads are those of its class, which it does not use.
    return {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": dim,
        "intermediate_size": inner,
        "max_position_embeddings": _MAX_POSITIONS,
    }


def _qwen_sizes(config: Config) -> dict[str, Any]:
    for key, value in _QWEN_SETTINGS.items():
        if value_or(config, key, value) != value:
            raise refusal(key, config[key], str(value).lower())
    dim = head_dim(config)
    heads, rest = divmod(int_value(config, "hidden_size"), dim)
    if rest:
        raise refusal("head_dim", dim, f"a divisor of the hidden size {config['hidden_size']}")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": int_value(config, "num_key_value_heads", heads, high=heads),
        "head_dim": dim,
        "max_position_embeddings": _MAX_POSITIONS,
    }


def _gla_spec(config: Config) -> RecurrentSpec:
    hidden, dim = int_value(config, "hidden_size"), int_value(config, "head_dim", high=MAX_COUNT)
    groups = int_value(config, "num_key_value_heads")
    shape = Recurrence("gla", hidden, 1, None, hidden // dim, dim, groups, dim)
    return RecurrentSpec(shape)


def _spec(config: Config) -> RecurrentSpec:
    hidden, dim = int_value(config, "hidden_size"), int_value(config, "head_dim", high=MAX_COUNT)
    divisor = number("head_size_divisor", value_or(config, "head_size_divisor", 8))
    eps = number("layer_norm_epsilon", value_or(config, "layer_norm_eps", 1e-5), 0.0, 1.0)
    shape = Recurrence(
        "wkv6",
        width=2 * hidden,
        window=1,
        num_heads=hidden // dim,
        head_dim=dim,
        num_groups=hidden // dim,
        state_size=dim,
        norm_eps=number("group_norm_eps", value_or(config, "group_norm_eps", eps * divisor**2), 0),
    )
    return RecurrentSpec(shape)


def _read(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> DynamicMixWeights:
    name, shape = f"{layer}.attention", spec.shape

    num_keys, is_gla = shape.num_groups * shape.head_dim, shape.rule == "gla"

    def linear(module: str, size: int = hidden) -> Linear:
        return reader.linear(f"{name}.{module}", (size, hidden), False)

    # These matrices are small, and their ranks need not divide into blocks: they keep their format.
    def small(part: str, size: tuple[int, ...]) -> Linear:
        return Linear(plain_weight(reader.tensor(f"{name}.{part}", size)))

    rank = reader.shape(f"{name}.time_maa_w2")[-1]
    ups = reader.tensor(f"{name}.time_maa_w2", (len(_MIXES), hidden, rank))
    decay_rank = reader.shape(f"{name}.time_decay_w1")[0]
    decay = small("time_decay_w2", (hidden, decay_rank))
    decay.bias = reader.vector(f"{name}.time_decay", hidden)
    vectors = WkvWeights()
    if not is_gla:
        heads = shape.num_heads, shape.head_dim
        vectors.bonus = reader.tensor(f"{name}.time_faaaa", heads).ravel()
        vectors.norm, vectors.norm_bias = (
            reader.vector(f"{name}.ln_x.{part}", hidden) for part in ("weight", "bias")
        )
    output = linear("output")
    # GGUF files have the outputs of later layers halved, and halve the hidden states in between.
    period = int_value(config, "halved_every", 0, low=0, high=MAX_LAYERS)
    if period:
        output.scale = 2.0 ** (int(layer.rpartition(".")[2]) // period)
    return DynamicMixWeights(
        reader.vector(f"{name}.time_maa_x", hidden),
        _mixes(reader, name, hidden),
        small("time_maa_w1", (len(_MIXES) * rank, hidden)),
        [Linear(plain_weight(np.ascontiguousarray(up))) for up in ups],
        linear("receptance"),
        linear("key", num_keys),
        linear("value", num_keys),
        linear("gate"),
        output,
        LowRankProduct(small("time_decay_w1", (decay_rank, hidden)), decay, "tanh"),
        vectors,
        "sigmoid" if is_gla else "silu",
    )


def _mixes(reader: TensorReader, name: str, hidden: int) -> np.ndarray:
    """The shares of the position before; new GGUF files have them in one tensor."""
    if reader.has(f"{name}.time_maa"):
        return reader.tensor(f"{name}.time_maa", (len(_MIXES), hidden))
    return np.stack([reader.vector(f"{name}.time_maa_{part}", hidden) for part in _MIXES])


FAMILIES = {
    "rwkv6": Family(
        ("Rwkv6ForCausalLM",),
        all_recurrent,
        derived=_sizes,
        norm="layer",
        has_norm_bias=True,
        has_embedding_norm=True,
        mlp="plain",
        recurrent=RecurrentLayout(_spec, _read),
        keys={"layer_norm_epsilon": ("layer_norm_eps",), "head_size": ("head_dim",)},
        names={
            "embed_tokens": "embeddings",
            "embed_norm": "layers.0.pre_ln",
            "input_layernorm": "ln1",
            "post_attention_layernorm": "ln2",
            "mlp.mix": "feed_forward.time_maa_k",
            "mlp.receptance_mix": "feed_forward.time_maa_r",
            "mlp.receptance": "feed_forward.receptance",
            "mlp.up_proj": "feed_forward.key",
            "mlp.down_proj": "feed_forward.value",
        },
        defaults={"hidden_act": "sqrelu", "num_attention_heads": 1, "tie_word_embeddings": False},
    ),
    "rwkv6qwen2": Family(
        ("RWKV6Qwen2ForCausalLM",),
        all_recurrent,
        derived=_qwen_sizes,
        recurrent=RecurrentLayout(_gla_spec, _read),
    ),
}
