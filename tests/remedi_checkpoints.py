"""A tiny random checkpoint of RemeDi in its published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from diffusion_checkpoints import MASK, V, write_tokenizer

#: The keys of the published class that say something about the layers, with small sizes.
CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "architectures": ["RemeDiUPMModelLM"],
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": V,
    "eos_token_id": 60,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "model_type": "RemeDi",
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 12,
    "pad_token_id": 60,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": V,
    "weight_tying": False,
}
HIDDEN, HEADS, BLOCK = 32, 2, 4
SIDES = (0, 10)  # of four, those after the last layer are not used
LAYER = {
    "attn_norm": (HIDDEN,),
    "ff_norm": (HIDDEN,),
    **{name: (HIDDEN, HIDDEN) for name in ("q_proj", "k_proj", "v_proj", "attn_out")},
    "ff_proj": (48, HIDDEN),
    "up_proj": (48, HIDDEN),
    "ff_out": (HIDDEN, 48),
}


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a random checkpoint with blocks of 4, and return its tensors."""
    generator = torch.Generator().manual_seed(3)

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * 0.25
        return values + 1 if "norm" in name or "ln_f" in name else values

    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (V, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "transformer.ff_out.weight": (V, HIDDEN),
        "ln_f_upm.weight": (HIDDEN,),
        "linear_confidence.weight": (1, HIDDEN),
        "linear_confidence.bias": (1,),
    }
    stacks = [f"transformer.blocks.{n}" for n in range(12)] + [f"blocks_upm.{n}" for n in range(4)]
    shapes |= {f"{stack}.{name}.weight": LAYER[name] for stack in stacks for name in LAYER}
    for number in range(4):
        shapes[f"backprop_linears.{number}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"backprop_linears.{number}.bias"] = (HIDDEN,)
        shapes[f"backprop_norms.{number}.weight"] = (HIDDEN,)
    tensors = {f"model.{name}": random(name, shape) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "block_size": BLOCK}))
    write_tokenizer(folder, "<|mdm_mask|>")
    return tensors
