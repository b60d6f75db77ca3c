"""Stable-DiffCoder in its published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import LLM
from diffusion_checkpoints import (
    MASK,
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

#: The model type is that of Llama. There is neither a block size nor a mask token.
PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["StableDiffcoderForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "auto_map": {
        "AutoModel": "modeling_stable_diffcoder.StableDiffcoderForCausalLM",
        "AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.009882118,
    "layer_norm_eps": None,
    "mlp_bias": False,
    "model_type": "llama",
    "resid_pdrop": 0.1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
TINY = Tiny(PUBLISHED, block=4, decoder="sdar:remasking=static")


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: causal rows, as in Llama, the whole canvas, shifted logits."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    for wrong in ({"block": 1}, {"block": None}, {"shift": 1}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


def test_the_mask_token_is_that_of_the_published_code(tmp_path: Path) -> None:
    write(replace(TINY, mask_text="w61"), tmp_path)
    with LLM(str(tmp_path), cache_positions=256) as llm:
        assert llm.model.spec.mask_token == 5 != MASK
