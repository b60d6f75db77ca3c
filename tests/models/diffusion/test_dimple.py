"""The language model of Dimple in its published layout, with a vision tower that is not read,
against a forward pass in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

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
    "architectures": ["DimpleModel"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_dimple.DimpleConfig",
        "AutoModel": "modeling_dimple.DimpleModel",
    },
    "bos_token_id": 59,
    "eos_token_id": 60,
    "full_attn_mask": True,
    "hidden_act": "silu",
    "image_token_id": 55,
    "mask_token_id": MASK,
    "max_window_layers": 28,
    "model_type": "dimple",
    "mrope_section": [2, 3, 3],
    "pad_token_id": 60,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "video_token_id": 56,
    "vision_config": {"depth": 32, "hidden_size": 1280, "model_type": "dimple"},
    "vision_end_token_id": 53,
    "vision_start_token_id": 52,
    "vision_token_id": 54,
}
TINY = Tiny(PUBLISHED, shift=1, biases=True, decoder="dimple")


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_the_vision_tower_is_not_read(tmp_path: Path) -> None:
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    weights = load_file(tmp_path / "model.safetensors")
    weights["visual.blocks.0.attn.qkv.weight"] = torch.ones(4, 4)
    save_file(weights, tmp_path / "model.safetensors")
    assert largest_difference(TINY, tensors, recorded(tmp_path, list(range(6)))[:1]) < 2e-4
    for wrong in ({"shift": 0}, {"block": 1}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2


def test_causal_rows_are_refused(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED, "full_attn_mask": False}))
    with pytest.raises(CheckpointError, match="full_attn_mask is False"):
        LLM(str(tmp_path))
