"""A valid checkpoint with stacked experts, and what must hold for any change of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode import LLM
from anydecode.errors import AnydecodeError
from gguf_models import HIDDEN, LAYERS, SIZES, make_tensors

EXPERT_CONFIG: dict[str, Any] = {
    **SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "sliding_window": 8,
    "use_sliding_window": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def expert_tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    tensors = {name: x for name, x in make_tensors("qwen3").items() if ".mlp." not in name}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp."
        for name, shape in (
            ("gate.weight", (4, HIDDEN)),
            ("experts.gate_up_proj", (4, 64, HIDDEN)),
            ("experts.down_proj", (4, HIDDEN, 32)),
        ):
            tensors[prefix + name] = generator.standard_normal(shape, np.float32)
    return tensors


def tokenizer_json() -> dict[str, Any]:
    letters = {chr(97 + index): index for index in range(26)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": letters, "merges": []},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    }


def run_if_valid(path: Path) -> bool:
    """Whether a model can be opened, which then also runs; an error must be one line, and name the
    file or the model if it cannot be opened."""
    is_open = False
    try:
        with LLM(path, threads=2) as llm:
            is_open = True
            if llm.model.spec.is_encoder:
                llm.embed([5, 6, 7])
            else:
                assert len(llm.generate([5, 6, 7], max_tokens=2).tokens) <= 2
            assert isinstance(llm.tokenizer.decode(llm.encode("ab")), str)
    except AnydecodeError as error:
        message = str(error)
        assert "\n" not in message and 0 < len(message) <= 1000
        assert is_open or message.startswith((str(path), f"{path.stem}: ")), message
        return False
    return True
