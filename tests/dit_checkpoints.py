"""Random checkpoints of diffusion transformers in the published layouts, and their forward pass in
plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

V, D, HEADS, HEAD, LAYERS = 64, 32, 4, 8, 2

BD3LM = {
    "model_type": "bd3lm",
    "architectures": ["BD3LM"],
    "attn_backend": "sdpa",
    "block_size": 4,
    "cond_dim": 12,
    "cross_attn": True,
    "hidden_dim": D,
    "model_length": 128,
    "n_blocks": LAYERS,
    "n_heads": HEADS,
    "time_conditioning": False,
    "vocab_size": V,
}

GIDD: dict[str, Any] = {
    "model_type": "dit",
    "architectures": ["DIT"],
    "attention_dropout": 0.0,
    "hidden_size": D,
    "max_seq_len": 128,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "p_uniform": 0.2,
    "t_eps": 1e-4,
    "timestep_cond_dim": 12,
    "vocab_size": V,
}
DUO: dict[str, Any] = {
    "model_type": "DUO",
    "architectures": ["DUO"],
    "causal": False,
    "cond_dim": 12,
    "dropout": 0.1,
    "hidden_dim": D,
    "model_length": 128,
    "n_blocks": LAYERS,
    "n_heads": HEADS,
    "var_min": True,
    "vocab_size": V,
}


def write_dit(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a random checkpoint in BD3-LM's layout, with a modulation far from zero; without the
    prefix of its names for GIDD's model type."""
    generator = torch.Generator().manual_seed(7)
    modulated, waves = config.get("adaln", True), 256
    cond = config.get("cond_dim") or config["timestep_cond_dim"]
    prefix = "" if config["model_type"] == "dit" else "backbone."

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    shapes: dict[str, tuple[int, ...]] = {"vocab_embed.embedding": (V, D)}
    shapes |= {"output_layer.linear.weight": (V, D), "output_layer.linear.bias": (V,)}
    shapes["output_layer.norm_final.weight"] = (D,)
    for layer in (f"blocks.{index}" for index in range(LAYERS)):
        shapes |= {f"{layer}.norm1.weight": (D,), f"{layer}.norm2.weight": (D,)}
        shapes |= {f"{layer}.attn_qkv.weight": (3 * D, D), f"{layer}.attn_out.weight": (D, D)}
        shapes |= {f"{layer}.mlp.0.weight": (4 * D, D), f"{layer}.mlp.0.bias": (4 * D,)}
        shapes |= {f"{layer}.mlp.2.weight": (D, 4 * D), f"{layer}.mlp.2.bias": (D,)}
        if modulated:
            shapes[f"{layer}.adaLN_modulation.weight"] = (6 * D, cond)
            shapes[f"{layer}.adaLN_modulation.bias"] = (6 * D,)
    if modulated:
        shapes |= {"output_layer.adaLN_modulation.weight": (2 * D, cond)}
        shapes |= {"output_layer.adaLN_modulation.bias": (2 * D,)}
        shapes |= {"sigma_map.mlp.0.weight": (cond, waves), "sigma_map.mlp.0.bias": (cond,)}
        shapes |= {"sigma_map.mlp.2.weight": (cond, cond), "sigma_map.mlp.2.bias": (cond,)}
    tensors = {f"{prefix}{name}": random(*shape) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def reference_dit(
    tensors: dict[str, torch.Tensor],
    tokens: Any,
    size: int | None,
    time: float = 0.0,
    normed: Callable[..., torch.Tensor] = torch.nn.functional.layer_norm,
) -> np.ndarray:
    """The logits of a reference implementation of the published network, in float64."""
    get = {name.removeprefix("backbone."): tensor.double() for name, tensor in tensors.items()}
    functional = torch.nn.functional
    positions = torch.arange(len(tokens))
    c = None
    if "sigma_map.mlp.0.weight" in get:
        half = get["sigma_map.mlp.0.weight"].shape[1] // 2
        angles = time * torch.exp(-np.log(10000) * torch.arange(half).double() / half)
        c = functional.silu(
            functional.linear(
                torch.cat([angles.cos(), angles.sin()]),
                get["sigma_map.mlp.0.weight"],
                get["sigma_map.mlp.0.bias"],
            )
        )
        c = functional.linear(c, get["sigma_map.mlp.2.weight"], get["sigma_map.mlp.2.bias"])
        c = functional.silu(c)

    def modulation(layer: str, count: int) -> list[Any]:
        if c is None:
            return [0.0, 0.0, 1.0, 0.0, 0.0, 1.0][:count]
        name = f"{layer}.adaLN_modulation"
        return [*functional.linear(c, get[f"{name}.weight"], get[f"{name}.bias"]).chunk(count)]

    def norm(x: torch.Tensor, name: str, shift: Any, scale: Any) -> torch.Tensor:
        return normed(x, [D], eps=1e-5) * get[f"{name}.weight"] * (1 + scale) + shift

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD)
        cos, sin = (torch.cat([f, f], 1)[:, None] for f in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    block = positions // (size or len(tokens))
    hidden = block[:, None] < block[None, :]
    x = get["vocab_embed.embedding"][torch.tensor([int(token) for token in tokens])]
    for layer in (f"blocks.{index}" for index in range(LAYERS)):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(layer, 6)
        y = norm(x, f"{layer}.norm1", shift1, scale1) @ get[f"{layer}.attn_qkv.weight"].T
        q, k, v = y.view(len(tokens), 3, HEADS, D // HEADS).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / (D // HEADS) ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        y = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = x + gate1 * (y @ get[f"{layer}.attn_out.weight"].T)
        y = norm(x, f"{layer}.norm2", shift2, scale2)
        y = functional.linear(y, get[f"{layer}.mlp.0.weight"], get[f"{layer}.mlp.0.bias"])
        y = functional.gelu(y, approximate="tanh")
        y = functional.linear(y, get[f"{layer}.mlp.2.weight"], get[f"{layer}.mlp.2.bias"])
        x = x + gate2 * y
    shift, scale = modulation("output_layer", 2)
    y = norm(x, "output_layer.norm_final", shift, scale)
    head = get["output_layer.linear.weight"], get["output_layer.linear.bias"]
    return functional.linear(y, *head).numpy()
