"""Dream-Reasoner in its published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import LLM
from anydecode.errors import CheckpointError
from diffusion_checkpoints import (
    MASK,
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["DreamForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModelForCausalLM": "modeling_dream.DreamForCausalLM",
    },
    "block_size": 8,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "model_type": "Dream",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
TINY = Tiny(PUBLISHED, block=8, qk_norm=True, decoder="sdar:threshold=0.9")


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls, as in Dream: every row sees the whole canvas, shifted logits."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(12)))[:1]
    for wrong in ({"block": None}, {"shift": 1}, {"block": 4}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


def test_a_missing_block_size_is_asked_for(tmp_path: Path) -> None:
    write(replace(TINY, config={**PUBLISHED, "block_size": None}), tmp_path)
    with pytest.raises(CheckpointError, match="lacks 'block_size'.* give block= .--block. when"):
        LLM(str(tmp_path))
