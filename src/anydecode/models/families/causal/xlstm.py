"""xLSTM (Beck et al., 2024, arXiv:2405.04517) as xLSTM 7B (arXiv:2503.13427): layers of an MLP and
a recurrence with a matrix of memory."""

from __future__ import annotations

from typing import Any

from anydecode.kernels.interface import Recurrence
from anydecode.models.families.family import Family
from anydecode.models.families.patterns import all_recurrent
from anydecode.models.families.recurrent import RecurrentLayout
from anydecode.models.families.values import Config, bool_value, int_value, value_or
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import MAX_COUNT, number, refusal
from anydecode.models.linear import Linear
from anydecode.models.mlstm import Mlstm
from anydecode.models.spec import RecurrentSpec


def _sizes(config: Config) -> dict[str, Any]:
    hidden = int_value(config, "hidden_size")
    if bool_value(config, "use_bias"):
        raise refusal("use_bias", True, "false")
    if value_or(config, "embedding_dim", hidden) != hidden:
        raise refusal("embedding_dim", config["embedding_dim"], f"{hidden}, the hidden size")
    multiple = int_value(config, "ffn_round_up_to_multiple_of", 64)
    inner = hidden * number("ffn_proj_factor", value_or(config, "ffn_proj_factor", 2.667))
    return {
        "intermediate_size": int((inner + multiple - 1) // multiple) * multiple,
        "final_logit_softcapping": value_or(config, "output_logit_soft_cap", 30.0),
    }


def _spec(config: Config) -> RecurrentSpec:
    hidden, heads = (
        int_value(config, "hidden_size"),
        int_value(config, "num_heads", 8, high=MAX_COUNT),
    )
    sizes = []
    for key, default in (("v_dim_factor", 1.0), ("qk_dim_factor", 0.5)):
        size = int(hidden * number(key, value_or(config, key, default)))
        if size % heads:
            raise refusal("num_heads", heads, f"a divisor of the {size} numbers of {key}")
        sizes.append(size // heads)
    dim, size = sizes
    eps = number("eps", value_or(config, "eps", 1e-6), 0.0, 1.0)
    width = heads * (dim + 2 * size)
    return RecurrentSpec(
        Recurrence("mlstm", width, 1, None, heads, dim, heads, size, norm_eps=eps), "sigmoid"
    )


def _read(
    reader: TensorReader, config: Config, layer: str, spec: RecurrentSpec, hidden: int
) -> Mlstm:
    name, shape = f"{layer}.mlstm_layer", spec.shape
    heads, size, num_keys = shape.num_heads, shape.width_out, shape.num_heads * shape.state_size
    sizes = {"q": num_keys, "k": num_keys, "v": size, "ogate_preact": size}
    gates = {"igate_preact": heads, "fgate_preact": heads}
    parts = {
        **_parts(reader, name, "qkv_opreact", sizes, hidden, False),
        **_parts(reader, name, "ifgate_preact", gates, hidden, True),
    }
    return Mlstm(
        parts["v"],
        parts["k"],
        parts["q"],
        parts["ogate_preact"],
        parts["igate_preact"],
        parts["fgate_preact"],
        reader.linear(f"{name}.out_proj", (hidden, size), False),
        reader.vector(f"{name}.multihead_norm.weight", size),
        number("norm_eps", value_or(config, "norm_eps", 1e-6), 0.0, 1.0),
        number("gate_soft_cap", value_or(config, "gate_soft_cap", 15.0)),
    )


def _parts(
    reader: TensorReader,
    name: str,
    fused: str,
    sizes: dict[str, int],
    hidden: int,
    has_bias: bool,
) -> dict[str, Linear]:
    """Matrices that a checkpoint stores separately, or one after the other in a fused one."""
    total, start, parts = sum(sizes.values()), 0, {}
    is_fused = reader.has(f"{name}.{fused}.weight")
    for part, size in sizes.items():
        if is_fused:
            rows, alias = slice(start, start + size), f"{name}.{part}"
            full = (total, hidden)
            parts[part] = reader.linear(f"{name}.{fused}", full, has_bias, rows=rows, alias=alias)
        else:
            parts[part] = reader.linear(f"{name}.{part}", (size, hidden), has_bias)
        start += size
    return parts


FAMILIES = {
    "xlstm": Family(
        ("xLSTMForCausalLM",),
        all_recurrent,
        derived=_sizes,
        recurrent=RecurrentLayout(_spec, _read),
        stored_name=lambda config, name: name.replace("layers.", "blocks.", 1),
        keys={"norm_eps": ("rms_norm_eps",), "num_blocks": ("num_hidden_layers",)},
        names={
            "embed_tokens": "embeddings",
            "norm": "out_norm",
            "input_layernorm": "norm_mlstm",
            "post_attention_layernorm": "norm_ffn",
            "mlp.gate_up_proj": "ffn.proj_up_gate_z",
            "mlp.gate_proj": "ffn.proj_up_gate",
            "mlp.up_proj": "ffn.proj_up",
            "mlp.down_proj": "ffn.proj_down",
        },
        defaults={"max_position_embeddings": 1 << 20, "num_attention_heads": 1},
    )
}
