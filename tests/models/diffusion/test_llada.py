"""LLaDA-8B and LLaDA-1.5 in their published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from diffusion_checkpoints import (
    LLADA_NAMES,
    MASK,
    SIZES,
    Tiny,
    V,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    write,
)

#: The published vocabulary is smaller than the table of embeddings.
PUBLISHED: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 64,
    "embedding_dropout": 0.0,
    "embedding_size": V,
    "eos_token_id": 60,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_device": "meta",
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 60,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "vocab_size": V - 4,
    "weight_tying": False,
}
TINY = Tiny(PUBLISHED, names=LLADA_NAMES, mask_text="<|mdm_mask|>")


@pytest.fixture(autouse=True)
def published_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many key heads as heads, whose sizes make up the hidden size."""
    monkeypatch.setitem(SIZES, "num_key_value_heads", 4)
    monkeypatch.setitem(SIZES, "hidden_size", 64)


def test_every_pass_equals_the_reference(tmp_path: Path) -> None:
    assert_decodes_as_published(TINY, tmp_path)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: shifted logits, causal rows, blocks."""
    tensors = write(TINY, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    for wrong in ({"shift": 1}, {"block": 1}, {"block": 4}):
        assert largest_difference(replace(TINY, **wrong), tensors, passes) > 1e-2
