"""A tiny random checkpoint of LFM2.5's diffusion model in its published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from diffusion_checkpoints import write_tokenizer

D, HEADS, KV, HEAD, WIDE, V, COND, BLOCK, KERNEL = 32, 4, 2, 8, 48, 64, 16, 8, 3
LAYERS = ["conv", "full_attention", "conv"]
THETA, EPS, TIME_EPS = 1000.0, 1e-5, 1e-3
#: The published fields with small sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForBlockDiffusion"],
    "model_type": "lfm2_diffusion",
    "adaln_conditioning": True,
    "block_auto_adjust_ff_dim": False,
    "bos_token_id": 1,
    "conv_L_cache": KERNEL,
    "conv_bias": False,
    "diffusion_block_size": BLOCK,
    "eos_token_id": 7,
    "hidden_size": D,
    "intermediate_size": WIDE,
    "layer_types": LAYERS,
    "max_position_embeddings": 256,
    "norm_eps": EPS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": len(LAYERS),
    "num_key_value_heads": KV,
    "pad_token_id": 0,
    "rope_theta": THETA,
    "self_conditioning": True,
    "selfcond_ffn_bias": True,
    "sigma_cond_dim": COND,
    "sigma_freq_embedding_size": 256,
    "tie_embedding": True,
    "vocab_size": V,
}
Tensors = dict[str, torch.Tensor]


def write(folder: Path) -> Tensors:
    """Write a random checkpoint, and return its tensors."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": random(V, D) * 3,
        "model.embedding_norm.weight": 1 + random(D),
        "model.sigma_embed.mlp.0.weight": random(COND, 256),
        "model.sigma_embed.mlp.0.bias": random(COND),
        "model.sigma_embed.mlp.2.weight": random(COND, COND) * 3,
        "model.sigma_embed.mlp.2.bias": random(COND),
        "model.adaln_proj.1.weight": random(3 * D, COND),
        "model.adaln_proj.1.bias": random(3 * D),
        "model.adaln_block_emb": random(len(LAYERS), 3 * D),
        "model.selfcond_norm.weight": 1 + random(D),
        "model.selfcond_ffn.0.weight": random(D, D),
        "model.selfcond_ffn.0.bias": random(D),
        "model.selfcond_ffn.2.weight": random(D, D),
    }
    for index, kind in enumerate(LAYERS):
        prefix = f"model.layers.{index}."
        tensors[f"{prefix}operator_norm.weight"] = 1 + random(D)
        tensors[f"{prefix}ffn_norm.weight"] = 1 + random(D)
        tensors[f"{prefix}feed_forward.w1.weight"] = random(WIDE, D)
        tensors[f"{prefix}feed_forward.w3.weight"] = random(WIDE, D)
        tensors[f"{prefix}feed_forward.w2.weight"] = random(D, WIDE)
        if kind == "conv":
            tensors[f"{prefix}conv.in_proj.weight"] = random(3 * D, D)
            tensors[f"{prefix}conv.conv.weight"] = random(D, 1, KERNEL) * 3
            tensors[f"{prefix}conv.out_proj.weight"] = random(D, D)
            continue
        for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = random(heads * HEAD, D)
        tensors[f"{prefix}self_attn.out_proj.weight"] = random(D, HEADS * HEAD)
        for part in ("q", "k"):
            tensors[f"{prefix}self_attn.{part}_layernorm.weight"] = 1 + random(HEAD)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    write_tokenizer(folder, "w61")  # a tokenizer without a mask token
    return tensors
