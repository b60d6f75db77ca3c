"""RND1 in its published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from diffusion_checkpoints import (
    MASK,
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    softmax_router,
    write,
)

PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["RND1LM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_rnd.RND1Config",
        "AutoModel": "modeling_rnd.RND1LM",
    },
    "decoder_sparse_step": 1,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "mlp_only_layers": [],
    "model_type": "rnd1",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_diffusion_steps": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 60,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
TINY = Tiny(PUBLISHED, shift=1, qk_norm=True, experts=8, router=softmax_router(2, normalise=True))


@pytest.mark.parametrize("change", [{}, {"norm_topk_prob": None}, {"architectures": ["RND1"]}])
def test_every_pass_equals_the_reference(change: dict[str, Any], tmp_path: Path) -> None:
    assert_decodes_as_published(replace(TINY, config={**PUBLISHED, **change}), tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: logits in place, weights that are not normalised, causal rows."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    for wrong in ({"shift": 0}, {"router": softmax_router(2, normalise=False)}, {"block": 1}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2
