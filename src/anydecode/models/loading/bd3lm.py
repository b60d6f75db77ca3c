"""Converts the diffusion transformer of MDLM and BD3-LM (kuleshov-group/bd3lm-owt-block_size4 and
others) to the Hugging Face layout of Llama, which computes the same function.

These models have no time conditioning, so the adaLN modulation of a layer is constant: scales are
folded into the norm weights, shifts into the biases of the next matrices, gates into the output
matrices of the sublayers. A layer norm equals an RMS norm of hidden states with mean zero, so the
mean is subtracted from the embedding and from the outputs of the sublayers. The MLP, which is not
gated, becomes a gated MLP whose up projection is always 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from anydecode.kernels.interface import Weight
from anydecode.models.limits import ConfigError
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


def to_hf_layout(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors in the Hugging Face layout of Llama.

    Raises:
        CheckpointError: The model has time conditioning, is causal, or lacks its block size.
    """
    for key in ("time_conditioning", "causal"):
        if config.get(key):
            raise ConfigError(f"{key}=true is not supported in a {config['model_type']} config")
    has_blocks = config["model_type"] == "bd3lm" and config.get("cross_attn", True)
    if has_blocks and config.get("block_size") is None:
        raise ConfigError("the config lacks 'block_size'")
    hf_config = {_KEYS.get(key, key): value for key, value in config.items()}
    hf_config |= {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    hf_config |= {"tie_word_embeddings": False}
    if isinstance(hf_config.get("hidden_size"), int):
        hf_config["intermediate_size"] = 4 * hf_config["hidden_size"]
    if not config.get("cross_attn", True):
        hf_config["block_size"] = None
    source = _SourceTensors(readers)
    hf_readers: dict[str, Reader] = {
        "model.embed_tokens.weight": partial(source.centred, "vocab_embed.embedding", 1),
        "model.norm.weight": partial(source.norm, "output_layer.", "norm_final", 1),
        "lm_head.weight": partial(source.get, "output_layer.linear.weight"),
        "lm_head.bias": partial(source.bias, "output_layer.", "linear", 0),
    }
    layers = [match[1] for match in map(_LAYER.fullmatch, readers) if match is not None]
    for index in layers:
        hf_readers |= _layer_readers(source, f"backbone.blocks.{index}.", f"model.layers.{index}.")
    return hf_config, hf_readers


def _layer_readers(source: _SourceTensors, prefix: str, hf_prefix: str) -> dict[str, Reader]:
    prefix = prefix.removeprefix("backbone.")
    parts: dict[str, Callable[[], np.ndarray]] = {
        "input_layernorm.weight": partial(source.norm, prefix, "norm1", 1),
        "self_attn.qkv_proj.weight": partial(source.get, f"{prefix}attn_qkv.weight"),
        "self_attn.qkv_proj.bias": partial(source.bias, prefix, "attn_qkv", 0),
        "self_attn.o_proj.weight": partial(source.output, prefix, "attn_out.weight", 2),
        "post_attention_layernorm.weight": partial(source.norm, prefix, "norm2", 4),
        "mlp.gate_proj.weight": partial(source.get, f"{prefix}mlp.0.weight"),
        "mlp.gate_proj.bias": partial(source.bias, prefix, "mlp.0", 3),
        "mlp.up_proj.weight": lambda: np.zeros_like(source.get(f"{prefix}mlp.0.weight")),
        "mlp.up_proj.bias": lambda: np.ones_like(source.get(f"{prefix}mlp.0.bias")),
        "mlp.down_proj.weight": partial(source.output, prefix, "mlp.2.weight", 5),
        "mlp.down_proj.bias": partial(source.output, prefix, "mlp.2.bias", 5),
    }
    return {f"{hf_prefix}{name}": reader for name, reader in parts.items()}


class _SourceTensors:
    """The stored tensors in float32, by name without the common prefix."""

    def __init__(self, readers: dict[str, Reader]) -> None:
        self._readers = readers

    def get(self, name: str) -> np.ndarray:
        reader = self._readers.get(f"backbone.{name}")
        if reader is None:
            raise MissingTensorError(f"the checkpoint has no tensor 'backbone.{name}'")
        tensor = reader()
        assert not isinstance(tensor, Weight)
        return tensor.astype(np.float32)

    def centred(self, name: str, axis: int) -> np.ndarray:
        """A tensor minus its mean along `axis`, the dimension of the hidden states."""
        tensor = self.get(name)
        return tensor - tensor.mean(axis, keepdims=True)

    def norm(self, prefix: str, name: str, scale: int) -> np.ndarray:
        """A norm's weight, scaled by chunk `scale` of the modulation."""
        weight = self.get(f"{prefix}{name}.weight")
        return weight * (1 + self._modulation(prefix, scale, len(weight)))

    def bias(self, prefix: str, name: str, shift: int) -> np.ndarray:
        """A matrix times chunk `shift` of the modulation, plus the matrix's bias, if any."""
        matrix = self.get(f"{prefix}{name}.weight")
        shifted = matrix @ self._modulation(prefix, shift, matrix.shape[1])
        return (
            shifted + self.get(f"{prefix}{name}.bias")
            if self._has(f"{prefix}{name}.bias")
            else shifted
        )

    def output(self, prefix: str, name: str, gate: int) -> np.ndarray:
        """The output matrix or bias of a sublayer, times its gate, minus the mean over outputs."""
        tensor = self.get(f"{prefix}{name}")
        if self._has(f"{prefix}adaLN_modulation.weight"):
            factors = self._modulation(prefix, gate, len(tensor))
            tensor = tensor * (factors if tensor.ndim == 1 else factors[:, None])
        return tensor - tensor.mean(0, keepdims=True)

    def _has(self, name: str) -> bool:
        return f"backbone.{name}" in self._readers

    def _modulation(self, prefix: str, chunk: int, size: int) -> np.ndarray:
        """Chunk number `chunk`, of `size`, of a layer's modulation; zeros if there is none."""
        if not self._has(f"{prefix}adaLN_modulation.weight"):
            return np.zeros(size, np.float32)
        modulation = self.get(f"{prefix}adaLN_modulation.weight") @ self._condition()
        modulation = modulation + self.get(f"{prefix}adaLN_modulation.bias")
        return modulation[chunk * size : (chunk + 1) * size]

    def _condition(self) -> np.ndarray:
        """The conditioning vector of time 0, which is always used."""
        first = self.get("sigma_map.mlp.0.weight")
        half = first.shape[1] // 2
        embedding = np.zeros(first.shape[1], np.float32)
        embedding[:half] = 1  # the cosines of 0; the sines are 0
        x = _silu(first @ embedding + self.get("sigma_map.mlp.0.bias"))
        x = self.get("sigma_map.mlp.2.weight") @ x + self.get("sigma_map.mlp.2.bias")
        return _silu(x)


def _silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result
