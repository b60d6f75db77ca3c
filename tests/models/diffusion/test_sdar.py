"""SDAR, dense and with experts, in the published layout, against a forward pass in plain torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import LLM
from anydecode.errors import UnsupportedCombinationError
from diffusion_checkpoints import (
    SIZES,
    Tiny,
    assert_decodes_as_published,
    largest_difference,
    recorded,
    softmax_router,
    write,
)

#: The published configs have neither a block size nor a mask token.
DENSE: dict[str, Any] = {
    **SIZES,
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "bos_token_id": 59,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "max_window_layers": 2,
    "model_type": "sdar",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["SDARMoeForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
        "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
    },
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
TINIES = {
    "sdar": Tiny(DENSE, block=4, mask_text="<|MASK|>", qk_norm=True),
    "sdar_moe": Tiny(
        EXPERTS,
        block=4,
        mask_text="<|MASK|>",
        qk_norm=True,
        experts=8,
        router=softmax_router(2, normalise=True),
    ),
}


@pytest.mark.parametrize("family", TINIES)
def test_every_pass_equals_the_reference(family: str, tmp_path: Path) -> None:
    assert_decodes_as_published(TINIES[family], tmp_path)


@pytest.mark.parametrize(
    ("name", "block"),
    [("SDAR-4B-Chat-b8", 8), ("SDAR-30B-A3B-Chat-b16", 16), ("TraDo-8B-Instruct", 4)],
)
def test_the_block_size_is_that_of_the_name(name: str, block: int, tmp_path: Path) -> None:
    tiny = TINIES["sdar_moe" if "A3B" in name else "sdar"]
    assert_decodes_as_published(replace(tiny, block=block), tmp_path / name)


def test_the_user_may_give_the_block_size(tmp_path: Path) -> None:
    tiny = replace(TINIES["sdar"], block=8)
    assert_decodes_as_published(tiny, tmp_path / "SDAR-4B-Chat-b16", block=8)


def test_wrong_references_differ(tmp_path: Path) -> None:
    """Negative controls: every row sees the whole canvas, blocks of 8, shifted logits."""
    tiny = TINIES["sdar"]
    tensors = write(tiny, tmp_path)
    passes = recorded(tmp_path, list(range(6)))[:1]
    for wrong in ({"block": None}, {"block": 8}, {"shift": 1}):
        assert largest_difference(replace(tiny, **wrong), tensors, passes) > 1e-2


def test_a_decoder_for_rows_that_see_the_whole_canvas_is_refused(tmp_path: Path) -> None:
    write(TINIES["sdar"], tmp_path)
    with LLM(str(tmp_path), cache_positions=256) as llm:
        with pytest.raises(UnsupportedCombinationError, match="see blocks of 4"):
            llm.generate([1, 2], max_tokens=4, decoder="window-diffusion")
