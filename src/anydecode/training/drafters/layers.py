"""The parts of drafters' layers during training: of the kind of the target's, named as in Llama's
layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Attention, Weight
from anydecode.models.network import GatedMlp, LayerWeights, Network
from anydecode.training.transformer import Norm, rotate

#: Keys of the target's config that a drafter of its kind of layers takes over.
_ROPE_KEYS = ("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True, eq=False)
class LayerShape:
    """Sizes and rotary frequencies of a layer: those of the target's layers."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    frequencies: np.ndarray
    norm_eps: float

    def config(self, target: dict[str, Any], layers: int) -> dict[str, Any]:
        """The keys of a config for `layers` such layers. `target` is the target's config."""
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **{key: target[key] for key in _ROPE_KEYS if key in target},
        }


def check_head(network: Network) -> None:
    """Raise UnsupportedCombinationError for a target whose logits are not its head's products."""
    spec = network.spec
    if not spec.causal:
        raise UnsupportedCombinationError(
            "drafters can be trained for models that generate from left to right, not for"
            " diffusion models"
        )
    is_plain = (spec.logit_scale, spec.logit_softcap) == (1.0, None) and spec.num_streams == 1
    if not is_plain:
        raise UnsupportedCombinationError(
            "drafters can be trained for models with one stream and a head without factors"
        )


def layer_shape(network: Network) -> LayerShape:
    """The shape of the target's last layer. Raises UnsupportedCombinationError for targets of
    another kind than dense Llama-like ones."""
    spec, last = network.spec, network.spec.layers[-1]
    attention, mlp = last.attention, network.weights.layers[-1].mlp
    is_plain = (
        isinstance(attention, Attention)
        and attention.latent_dim is None
        and last.rope is not None
        and 2 * len(last.rope.frequencies) == attention.head_dim
        and (last.rope.factor, last.rope.growth) == (1.0, 0.0)
        and isinstance(mlp, GatedMlp)
        and last.activation == "silu"
        and spec.norm == "rms"
    )
    if not is_plain:
        raise UnsupportedCombinationError(
            "drafters with layers can be trained for models whose last layer is that of Llama"
        )
    assert isinstance(attention, Attention) and isinstance(mlp, GatedMlp) and last.rope is not None
    return LayerShape(
        width=spec.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_width=attention.head_dim,
        hidden=mlp.gate.weight.out_features,
        frequencies=last.rope.frequencies,
        norm_eps=spec.norm_eps,
    )


class Projections(nn.Module):
    """The matrices of an attention that reads `inputs` numbers per row."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        queries, keys = (count * shape.head_width for count in (shape.heads, shape.kv_heads))
        self.head_width, self.repeats = shape.head_width, shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)
        self._frequencies: torch.Tensor
        self.register_buffer("_frequencies", torch.from_numpy(shape.frequencies), persistent=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated and scaled, `[batch, heads, rows, head_width]`, of `x` `[batch, rows, inputs]` at
        `positions` `[rows]` or `[batch, rows]`."""
        return self._rotated(self.q_proj(x), positions) * self.head_width**-0.5

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated, `[batch, heads, rows, head_width]`: a copy for every query head."""
        return self._rotated(self.k_proj(x), positions).repeat_interleave(self.repeats, 1)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, rows, head_width]`: a copy for every query head."""
        return self._split(self.v_proj(x)).repeat_interleave(self.repeats, 1)

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """The attention's output from mixed values `[batch, heads, rows, head_width]`."""
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_width).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)
        if angles.dim() == 3:
            angles = angles[:, None]
        return rotate(self._split(x), (angles.cos(), angles.sin()))


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DraftLayer(nn.Module):
    """A layer whose attention reads `inputs` numbers per row. `input_norm` is whether it has a norm
    before the attention."""

    def __init__(self, shape: LayerShape, inputs: int, input_norm: bool = True) -> None:
        super().__init__()
        if input_norm:
            self.input_layernorm = Norm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.width, shape.norm_eps)
        self.self_attn = Projections(shape, inputs)
        self.mlp = Mlp(shape)

    def add_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the MLP of its norm."""
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output

    @torch.no_grad()
    def copy(self, layer: LayerWeights) -> None:
        """Start as a layer of the target. What the attention reads before the last numbers, which
        are those of the target's layer, starts near 0."""
        attention, mlp = self.self_attn, layer.mlp
        assert isinstance(mlp, GatedMlp) and layer.query and layer.key and layer.value
        assert layer.output is not None
        for module, linear in (
            (attention.q_proj, layer.query),
            (attention.k_proj, layer.key),
            (attention.v_proj, layer.value),
        ):
            matrix = as_tensor(linear.weight)
            nn.init.normal_(module.weight, std=0.02)
            module.weight[:, -matrix.shape[1] :].copy_(matrix)
        attention.o_proj.weight.copy_(as_tensor(layer.output.weight))
        self.mlp.gate_proj.weight.copy_(as_tensor(mlp.gate.weight))
        self.mlp.up_proj.weight.copy_(as_tensor(mlp.up.weight))
        self.mlp.down_proj.weight.copy_(as_tensor(mlp.down.weight))
        copy_norm(self.post_attention_layernorm, layer.mlp_norm)
        if hasattr(self, "input_layernorm"):
            copy_norm(self.input_layernorm, layer.attention_norm)


@torch.no_grad()
def copy_norm(norm: Norm, values: np.ndarray | None) -> None:
    """Set the weights of a norm, if there are values."""
    if values is not None:
        norm.weight.copy_(torch.from_numpy(values))


def as_tensor(weight: Weight) -> torch.Tensor:
    """A matrix in float32, `[out_features, in_features]`."""
    return torch.from_numpy(dequantize(weight))
