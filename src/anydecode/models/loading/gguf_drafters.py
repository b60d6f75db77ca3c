"""What drafters in GGUF files, in the layouts of llama.cpp, have in common.

Such a file has the tensors of the drafter, the tokenizer of its target, and the numbers of the
target's layers that it reads. A drafter without an embedding or a head uses those of the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.kernels.interface import Weight
from anydecode.models.limits import MAX_LAYERS
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.gguf_rope import rope_scaling

#: The token of each row of the head.
TOKENS = "d2t"
#: The key of the layers that are read, by their inputs.
TAPS = "target_layers"
#: The divisors of rotary frequencies, which `rope_scaling` reads.
ROPE_FREQS = "rope_freqs.weight"
#: Keys of the metadata by those of the config.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def config_of(keys: Keys) -> dict[str, Any]:
    """The config of a drafter's layers, which are dense.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    count, file = keys.count, keys.file
    config: dict[str, Any] = {
        name: count(KEYS[name])
        for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    heads = config["num_attention_heads"]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    config |= {
        "num_hidden_layers": count(KEYS["num_hidden_layers"], high=MAX_LAYERS),
        "num_key_value_heads": count(KEYS["num_key_value_heads"]),
        "head_dim": count(KEYS["head_dim"], max(1, config["hidden_size"] // heads)),
        "max_position_embeddings": count(KEYS["max_position_embeddings"]),
        "rms_norm_eps": keys.number(KEYS["rms_norm_eps"]),
        "rope_theta": keys.number(KEYS["rope_theta"], 10000.0),
        "rope_scaling": rope_scaling(keys),
        "vocab_size": count("vocab_size", num_tokens),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if TOKENS in file.tensors:
        config["draft_vocab_size"] = file.tensors[TOKENS].shape[0]
    return config


def head_offsets(file: GGUFFile) -> np.ndarray:
    """The tokens of the head's rows as drafters of safetensors store them: less the number of the
    row."""
    tokens = file.read(TOKENS)
    assert not isinstance(tokens, Weight)
    return tokens.astype(np.int64).ravel() - np.arange(tokens.size)
