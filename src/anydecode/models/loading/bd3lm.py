"""The diffusion transformer of MDLM and BD3-LM (kuleshov-group/bd3lm-owt-block_size4 and others) in
the words of the Hugging Face layout of Llama, which computes the same numbers.

Their models are told no time, so what modulates a layer is constant: scales go into the norms,
shifts through the matrices behind into biases, gates into the matrices that end a sublayer. A layer
norm is an RMS norm of states whose mean is zero, and the mean is taken off what is added to the
states. The MLP without a gate has one whose other factor is always 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anydecode.errors import CheckpointError
from anydecode.kernels.interface import Weight
from anydecode.models.loading.lazy import MissingTensorError, Reader

_KEYS = {
    "hidden_dim": "hidden_size",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "model_length": "max_position_embeddings",
}
_LAYER = re.compile(r"backbone\.blocks\.(\d+)\.norm1\.weight")


def is_bd3lm(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in this layout."""
    return config.get("model_type") in ("bd3lm", "mdlm") and "hidden_dim" in config


def standard(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors by their usual names. Raises CheckpointError for models that are told the
    time, and for causal ones."""
    for key in ("time_conditioning", "causal"):
        if config.get(key):
            raise CheckpointError(f"{key} true is not supported in a {config['model_type']} config")
    found = {_KEYS.get(key, key): value for key, value in config.items()}
    found |= {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    found |= {"tie_word_embeddings": False}
    if isinstance(found.get("hidden_size"), int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    if not config.get("cross_attn", True):
        found["block_size"] = None
    source = _Source(readers)
    made: dict[str, Reader] = {
        "model.embed_tokens.weight": partial(source.centred, "vocab_embed.embedding", 1),
        "model.norm.weight": partial(source.norm, "output_layer.", "norm_final", 1),
        "lm_head.weight": partial(source.get, "output_layer.linear.weight"),
        "lm_head.bias": partial(source.bias, "output_layer.", "linear", 0),
    }
    layers = [match[1] for match in map(_LAYER.fullmatch, readers) if match is not None]
    for index in layers:
        made |= _layer(source, f"backbone.blocks.{index}.", f"model.layers.{index}.")
    return found, made


def _layer(source: _Source, own: str, usual: str) -> dict[str, Reader]:
    own = own.removeprefix("backbone.")
    parts: dict[str, Callable[[], torch.Tensor]] = {
        "input_layernorm.weight": partial(source.norm, own, "norm1", 1),
        "self_attn.qkv_proj.weight": partial(source.get, f"{own}attn_qkv.weight"),
        "self_attn.qkv_proj.bias": partial(source.bias, own, "attn_qkv", 0),
        "self_attn.o_proj.weight": partial(source.ending, own, "attn_out.weight", 2),
        "post_attention_layernorm.weight": partial(source.norm, own, "norm2", 4),
        "mlp.gate_proj.weight": partial(source.get, f"{own}mlp.0.weight"),
        "mlp.gate_proj.bias": partial(source.bias, own, "mlp.0", 3),
        "mlp.up_proj.weight": lambda: torch.zeros_like(source.get(f"{own}mlp.0.weight")),
        "mlp.up_proj.bias": lambda: torch.ones_like(source.get(f"{own}mlp.0.bias")),
        "mlp.down_proj.weight": partial(source.ending, own, "mlp.2.weight", 5),
        "mlp.down_proj.bias": partial(source.ending, own, "mlp.2.bias", 5),
    }
    return {f"{usual}{name}": reader for name, reader in parts.items()}


class _Source:
    """The stored tensors, without the prefix of all, in float32."""

    def __init__(self, readers: dict[str, Reader]) -> None:
        self._readers = readers

    def get(self, name: str) -> torch.Tensor:
        reader = self._readers.get(f"backbone.{name}")
        if reader is None:
            raise MissingTensorError(f"the checkpoint has no tensor 'backbone.{name}'")
        tensor = reader()
        assert not isinstance(tensor, Weight)
        return tensor.float()

    def centred(self, name: str, dim: int) -> torch.Tensor:
        """Less its mean along `dim`, that of the states."""
        tensor = self.get(name)
        return tensor - tensor.mean(dim, keepdim=True)

    def norm(self, own: str, name: str, scale: int) -> torch.Tensor:
        """A norm's weight, scaled by chunk `scale` of the modulation."""
        weight = self.get(f"{own}{name}.weight")
        return weight * (1 + self._modulation(own, scale, len(weight)))

    def bias(self, own: str, name: str, shift: int) -> torch.Tensor:
        """What a matrix makes of chunk `shift` of the modulation, and the bias it has, if any."""
        matrix = self.get(f"{own}{name}.weight")
        made = matrix @ self._modulation(own, shift, matrix.shape[1])
        return made + self.get(f"{own}{name}.bias") if self._has(f"{own}{name}.bias") else made

    def ending(self, own: str, name: str, gate: int) -> torch.Tensor:
        """A matrix or a bias at a sublayer's end, through the gate and less the states' mean."""
        tensor = self.get(f"{own}{name}")
        if self._has(f"{own}adaLN_modulation.weight"):
            factors = self._modulation(own, gate, len(tensor))
            tensor = tensor * (factors if tensor.dim() == 1 else factors[:, None])
        return tensor - tensor.mean(0, keepdim=True)

    def _has(self, name: str) -> bool:
        return f"backbone.{name}" in self._readers

    def _modulation(self, own: str, chunk: int, size: int) -> torch.Tensor:
        """A chunk of `size` of what modulates a layer: zeros in a model without modulation."""
        if not self._has(f"{own}adaLN_modulation.weight"):
            return torch.zeros(size)
        whole = self.get(f"{own}adaLN_modulation.weight") @ self._condition()
        whole = whole + self.get(f"{own}adaLN_modulation.bias")
        return whole[chunk * size : (chunk + 1) * size]

    def _condition(self) -> torch.Tensor:
        """What the model makes of time 0, which it is always told."""
        first = self.get("sigma_map.mlp.0.weight")
        half = first.shape[1] // 2
        waves = torch.zeros(first.shape[1])
        waves[:half] = 1  # cosines of 0; the sines are 0
        x = torch.nn.functional.silu(first @ waves + self.get("sigma_map.mlp.0.bias"))
        x = self.get("sigma_map.mlp.2.weight") @ x + self.get("sigma_map.mlp.2.bias")
        return torch.nn.functional.silu(x)
