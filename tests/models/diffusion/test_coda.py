"""CoDA in its published layout, against a forward pass in plain torch."""

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
    write,
)

#: Its config says nothing of tied embeddings, and the head is stored.
PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["CoDALanguageModel"],
    "auto_map": {
        "AutoConfig": "model_config.CoDAConfig",
        "AutoModel": "modeling_coda.CoDALanguageModel",
    },
    "attention_bias": False,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "model_type": "CoDA",
    "pad_token_id": 60,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
}
TINY = Tiny(PUBLISHED, shift=1, qk_norm=True)


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: logits in place, causal rows, tied embeddings."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    tied = {**PUBLISHED, "tie_word_embeddings": True}
    for wrong in ({"shift": 0}, {"block": 1}, {"config": tied}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2
