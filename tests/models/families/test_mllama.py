"""Llama 3.2 Vision without its layers of attention to images."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from tiny_models import BASE, built, checkpoint_of, hf_model

CONFIG = {**BASE, "model_type": "mllama_text_model", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("changes", "num_layers"),
    [
        ({"num_hidden_layers": 40}, 32),  # those of the published models
        ({"num_hidden_layers": 5, "cross_attention_layers": [4, 0]}, 3),
        ({"num_hidden_layers": 5, "cross_attention_layers": []}, 5),
    ],
)
def test_layers_of_images_are_left_out(changes: dict[str, Any], num_layers: int) -> None:
    assert spec_from_config({**CONFIG, **changes}).num_layers == num_layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1, 3], "allowed is layers from 0 to 2"),
        ([-1], "allowed is layers from 0 to 2"),
        (["1"], "a list of int"),
        ([0, 1, 2], "num_hidden_layers is 0"),
    ],
)
def test_other_layers_are_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**CONFIG, "cross_attention_layers": layers})


def test_other_layers_of_images_than_the_checkpoint_has_are_refused() -> None:
    theirs = hf_model("Mllama", num_hidden_layers=5, cross_attention_layers=[1, 3])
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.q_proj\.weight is missing"):
        built(checkpoint_of(theirs, cross_attention_layers=[1, 2]))
