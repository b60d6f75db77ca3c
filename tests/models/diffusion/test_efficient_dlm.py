"""Efficient-DLM, whose configs have the model type of a causal model, against a forward pass in
plain torch."""

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

CONFIG: dict[str, Any] = {
    **SIZES,
    "architectures": ["EfficientDLM"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "modeling_efficient_dlm.EfficientDLM"},
    "eos_token_id": 60,
    "hidden_act": "silu",
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
NAMES_OF_CLASSES: dict[str, dict[str, Any]] = {
    "both": {},
    "architectures alone": {"auto_map": None},
    "auto_map alone": {"architectures": None},
    "the causal class kept": {"architectures": ["Qwen3ForCausalLM"]},
}
TINY = Tiny(CONFIG, block=8, qk_norm=True, mask_text="<odd>", decoder="sdar:threshold=0.9")


@pytest.mark.parametrize("names", NAMES_OF_CLASSES)
def test_every_pass_equals_the_reference(names: str, tmp_path: Path) -> None:
    config = {**CONFIG, **NAMES_OF_CLASSES[names], "mask_token_id": MASK}
    assert_decodes_as_published(replace(TINY, config=config), tmp_path, block=8)


def test_a_model_that_was_qwen2_equals_the_reference(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "qwen2", "block_size": 16}
    tiny = replace(TINY, config=config, block=16, qk_norm=False, biases=True)
    assert_decodes_as_published(tiny, tmp_path, mask=MASK)


def test_a_block_size_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    with pytest.raises(CheckpointError, match="lacks 'block_size'.* give block= .--block. when"):
        LLM(str(tmp_path))


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: every row sees the whole canvas, causal rows, shifted logits."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(12)), block=8, mask=MASK)[:1]
    for wrong in ({"block": None}, {"block": 1}, {"shift": 1}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2
