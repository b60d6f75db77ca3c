"""A tiny random DiffusionGemma of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from diffusion_checkpoints import MASK, write_tokenizer

#: Published fields of the text model with small sizes: windows of 6, blocks of 8.
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
}
BLOCK = 8


def reference(folder: Path) -> Any:
    """A random model of `transformers`, saved to `folder`; no weight has its initial value."""
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config=TEXT,
        vision_config=VISION,
        canvas_length=BLOCK,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or "norm" in name:
                weight.add_(torch.rand_like(weight) * 0.5)
        for name, buffer in model.named_buffers():
            if "layer_scalar" in name:
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, f"w{MASK}")  # a tokenizer without a mask token
    return model
