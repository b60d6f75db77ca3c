"""Fast-dLLM v2 in its published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from diffusion_checkpoints import (
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

PUBLISHED: dict[str, Any] = {
    **SIZES,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
        "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
    },
    "bd_size": 8,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "max_window_layers": 2,
    "model_type": "Fast_dLLM_Qwen",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
TINY = Tiny(PUBLISHED, block=8, shift=1, biases=True, decoder="fast-dllm-v2")


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: logits in place, every row sees the whole canvas, blocks of 4."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(10)))[:1]
    for wrong in ({"shift": 0}, {"block": None}, {"block": 4}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2
