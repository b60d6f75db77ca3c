"""GLM-5.3: the names and the config of the published repository, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from anydecode.models.loading import load_checkpoint
from gguf_models import write_folder
from parity_cases import parity_module
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TOKENS = np.random.default_rng(0).integers(3, 130, 40).tolist()
RENAMED = {
    "self_attn.forget_gate.": "self_attn.",
    **{
        f"{part}_hc.{kind}": f"hc_{part}_{kind}"
        for part in ("attn", "ffn")
        for kind in ("fn", "base", "scale")
    },
}


def model(**changes: Any) -> Any:
    return hf_model("Glm5Next", **{**parity_module("test_parity").GLM_5_NEXT, **changes})


def as_published(theirs: Any) -> dict[str, np.ndarray]:
    """The tensors by the names of the published repository."""
    found = {}
    for name, tensor in checkpoint_of(theirs).tensors.items():
        for usual, own in RENAMED.items():
            name = name.replace(usual, own)
        name = name.replace("model.", "model.language_model.", 1)
        start, _, _ = name.rpartition(".")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, matrix in zip(("gate", "up"), np.split(both, 2), strict=True):
                    found[f"{start}.{expert}.{part}_proj.weight"] = matrix
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                found[f"{start}.{expert}.down_proj.weight"] = matrix
        elif name.endswith("conv1d.weight"):
            for part, kernel in zip("qkv", np.split(tensor, 3), strict=True):
                found[f"{start.removesuffix('conv1d')}{part}_conv1d.weight"] = kernel
        else:
            found[name] = tensor
    return found


def test_the_published_names_and_config(tmp_path: Path) -> None:
    """Wrong twins: fewer positions, other blocks, another limit of the decay."""
    theirs = model(linear_lower_bound=-3.0)
    text = {key: x for key, x in theirs.config.to_dict().items() if not key.startswith("linear_")}
    linear = {
        "num_heads": 3,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -3.0,
    }
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "vision_config": {},
    }
    tensors = as_published(theirs)
    expected = hf_logits(theirs, TOKENS)
    for number, change in enumerate(
        ({}, {"index_topk": 6}, {"index_kpool": 4}, {"gate_lower_bound": -5.0}, {"hc_eps": 0.1})
    ):
        own = {**text, "linear_attn_config": linear, **change}
        if "gate_lower_bound" in change:
            own["linear_attn_config"] = {**linear, **change}
        if "index_kpool" in change:
            own["index_topk"], size = 12, (4, 16)
            stored = {
                name: np.resize(tensor, size) if name.endswith("_ape") else tensor
                for name, tensor in tensors.items()
            }
        else:
            stored = tensors
        folder = tmp_path / str(number)
        folder.mkdir()
        write_folder(folder, stored, **config, text_config=own)
        found = logits(built(load_checkpoint(folder)), chain(TOKENS))
        difference = np.abs(found - expected).max()
        assert difference > 1e-3 if change else difference < 1e-4, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_kpool_always_select_tail": False}, "select_tail is False; allowed is true"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8; allowed is 0"),
        ({"index_topk": 13}, "top_k is 13; allowed is a multiple of the block, 3"),
        ({"indexer_types": ["full", "some"] * 2}, "indexer_types.1. is 'some'"),
        ({"indexer_types": ["shared"] * 4}, "no indexer in this layer"),
        ({"index_kpool": 300, "index_topk": 300}, "index_block is 300"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], message: str) -> None:
    config = checkpoint_of(model()).config
    with pytest.raises(CheckpointError, match=message) as error:
        spec_from_config({**config, **change})
    assert "\n" not in str(error.value)


def test_the_default_layers() -> None:
    """Attention in every fourth layer, experts from the fourth on."""
    sizes = checkpoint_of(model()).config
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        del sizes[key]
    spec = spec_from_config({**sizes, "num_hidden_layers": 8})
    assert [layer.recurrence is None for layer in spec.layers] == [False, False, False, True] * 2
    assert [bool(layer.num_experts) for layer in spec.layers] == [False] * 3 + [True] * 5
