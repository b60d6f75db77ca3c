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

#: The published keys but the block size and the mask token.
CONFIG: dict[str, Any] = {
    **SIZES,
    "adaptive_mask_rate": False,
    "architectures": ["EfficientDLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "sdpa",
    "auto_map": {
        "AutoConfig": "configuration_edlm.EfficientDLMConfig",
        "AutoModel": "modeling_edlm.EfficientDLM",
    },
    "diff_loss_weight": 1,
    "disable_qk_norm": False,
    "dlm_arch": "encoder",
    "dlm_paradigm": "bidirectional",
    "dlm_type": "llada",
    "enforce_mask": False,
    "hidden_act": "silu",
    "intl_mask": False,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "multi_sampling": None,
    "num_ar_layers": 0,
    "num_diffusion_layers": 0,
    "prefix_ratio": 0.8,
    "random_length_prob": 0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "tok_mask_half_life_ratio": None,
    "use_sliding_window": False,
}
#: The names of its tensors, as in other models with a head of this class.
NAMES = {
    "embed": "encoder.embed_tokens",
    "norm": "encoder.norm",
    "head": "diffusion_head",
    "layer": "encoder.layers.{}.",
}
NAMES_OF_CLASSES: dict[str, dict[str, Any]] = {
    "both": {},
    "architectures alone": {"auto_map": None},
    "auto_map alone": {"architectures": None},
    "the causal class kept": {"architectures": ["Qwen3ForCausalLM"]},
}
TINY = Tiny(
    CONFIG,
    block=8,
    has_prompt_block=True,
    names=NAMES,
    qk_norm=True,
    mask_text="<odd>",
    decoder="sdar:threshold=0.9",
)


@pytest.mark.parametrize("names", NAMES_OF_CLASSES)
def test_every_pass_equals_the_reference(names: str, tmp_path: Path) -> None:
    config = {**CONFIG, **NAMES_OF_CLASSES[names], "mask_token_id": MASK}
    assert_decodes_as_published(replace(TINY, config=config), tmp_path, block=8)


def test_a_model_that_was_qwen2_equals_the_reference(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "qwen2", "block_size": 16}
    tiny = replace(TINY, config=config, block=16, qk_norm=False, biases=True)
    assert_decodes_as_published(tiny, tmp_path, mask=MASK)


def test_the_published_keys_are_enough(tmp_path: Path) -> None:
    """With the names of tensors of Qwen3, which are read too."""
    config = {**CONFIG, "block_size": 32, "mask_token_id": MASK}
    assert_decodes_as_published(replace(TINY, config=config, block=32, names={}), tmp_path)


def test_a_block_size_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    with pytest.raises(CheckpointError, match="lacks 'block_size'.* give block= .--block. when"):
        LLM(str(tmp_path))


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: every row sees the whole canvas, causal rows, shifted logits, blocks of
    the prompt."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(12)), block=8, mask=MASK)[:1]
    for wrong in ({"block": None}, {"block": 1}, {"shift": 1}, {"has_prompt_block": False}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes, 12) > 1e-2
