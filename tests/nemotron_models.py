"""Tiny random models of Nemotron-NAS, and the same as a Llama of `transformers`.

A layer without attention or without an MLP is one of Llama whose output matrix is zero; fewer heads
of keys are the same heads several times; a smaller MLP is one with rows of zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint

HEADS, HEAD, HIDDEN, LAYERS, VOCAB = 4, 12, 48, 4, 131
#: Query heads per key head (None: no attention), and the factor of the MLP's size (None: no MLP).
Blocks = list[tuple[int | None, float | None]]
BLOCKS: Blocks = [(2, 8.0), (None, 16.0), (4, None), (1, 7.9)]
#: Two thirds of a factor times the hidden size, up to a multiple of 256.
INNER = {8.0: 256, 16.0: 512, 7.9: 256, None: 0}


def nemotron_config(
    vocab_size: int = VOCAB, layers: Blocks = BLOCKS, **changes: Any
) -> dict[str, Any]:
    """A config with the keys of the published ones."""
    blocks = [
        {
            "attention": {
                "n_heads_in_group": group,
                "no_op": group is None,
                "replace_with_linear": False,
            },
            "ffn": {"ffn_mult": factor, "no_op": factor is None, "replace_with_linear": False},
        }
        for group, factor in layers
    ]
    return {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"},
        "block_configs": blocks,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **changes,
    }


def nemotron_checkpoint(
    seed: int = 0, vocab_size: int = VOCAB, layers: Blocks = BLOCKS
) -> Checkpoint:
    """A random model."""
    random, tensors = np.random.default_rng(seed), {}

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), np.float32)
        tensors[f"{name}.weight"] = values * np.float32(0.25)

    def norm(name: str) -> None:
        values = random.standard_normal(HIDDEN, np.float32)
        tensors[f"{name}.weight"] = 1 + values * np.float32(0.2)

    matrix("model.embed_tokens", vocab_size, HIDDEN)
    matrix("lm_head", vocab_size, HIDDEN)
    norm("model.norm")
    for layer, (group, factor) in enumerate(layers):
        name, inner = f"model.layers.{layer}", INNER[factor]
        if group is not None:
            norm(f"{name}.input_layernorm")
            for part, heads in (("q", HEADS), ("k", HEADS // group), ("v", HEADS // group)):
                matrix(f"{name}.self_attn.{part}_proj", heads * HEAD, HIDDEN)
            matrix(f"{name}.self_attn.o_proj", HIDDEN, HEADS * HEAD)
        if inner:
            norm(f"{name}.post_attention_layernorm")
            for part in ("gate", "up"):
                matrix(f"{name}.mlp.{part}_proj", inner, HIDDEN)
            matrix(f"{name}.mlp.down_proj", HIDDEN, inner)
    return Checkpoint("tiny", Path("tiny"), nemotron_config(vocab_size, layers), tensors)


def as_llama(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The tensors of a Llama with as many key heads as query heads and MLPs of the largest size."""
    largest, found = max(INNER.values()), dict(checkpoint.tensors)
    for layer, (group, factor) in enumerate(BLOCKS):
        name, inner = f"model.layers.{layer}", INNER[factor]
        for part in "kv":
            key = f"{name}.self_attn.{part}_proj.weight"
            heads = found.get(key, np.zeros((HEADS * HEAD, HIDDEN), np.float32))
            heads = heads.reshape(-1, HEAD, HIDDEN)
            found[key] = np.repeat(heads, HEADS // len(heads), 0).reshape(-1, HIDDEN)
        for key in ("q_proj", "o_proj"):
            square = np.zeros((HEADS * HEAD, HIDDEN), np.float32)
            found.setdefault(f"{name}.self_attn.{key}.weight", square)
        for key in ("input_layernorm", "post_attention_layernorm"):
            found.setdefault(f"{name}.{key}.weight", np.ones(HIDDEN, np.float32))
        rows, empty = [(0, largest - inner), (0, 0)], np.zeros((0, HIDDEN), np.float32)
        for key in ("gate", "up"):
            full = f"{name}.mlp.{key}_proj.weight"
            found[full] = np.pad(found.get(full, empty), rows)
        full = f"{name}.mlp.down_proj.weight"
        found[full] = np.pad(found.get(full, empty.T), rows[::-1])
        assert group is None or found[f"{name}.self_attn.q_proj.weight"].any()
    return found
