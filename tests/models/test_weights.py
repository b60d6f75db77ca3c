"""Tensors by their names: prefixes of other layouts, and what is missing."""

from __future__ import annotations

import pytest

from anydecode.errors import CheckpointError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from tiny_models import BASE, checkpoint_of, hf_model


def nested() -> Checkpoint:
    """A checkpoint whose head is named as in models with an image encoder."""
    checkpoint = checkpoint_of(hf_model("Llama"))
    head = checkpoint.tensors.pop("lm_head.weight")
    checkpoint.tensors["language_model.lm_head.weight"] = head
    return checkpoint


def test_a_nested_head_is_found() -> None:
    assert load_network(nested()).spec.vocab_size == BASE["vocab_size"]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_missing_tensor_is_named(name: str) -> None:
    checkpoint = nested()
    del checkpoint.tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load_network(checkpoint)
