"""A tiny random sentence encoder, and a tiny model with random parts of dglm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.tiny import random_matrices, readable_executor, tiny_model
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.families import load_network
from anydecode.models.scripted import BYTE_VOCABULARY, ByteTokenizer
from anydecode.models.sentence_diffusion import NUM_WAVES, ResidualMlp, SentenceDiffusion
from anydecode.models.transformer import Transformer

#: The size of the encoder's embeddings, and the number of rows of the soft prompt.
EMBEDDING_SIZE, NUM_ROWS = 24, 4


def tiny_encoder(*, seed: int = 0, layers: int = 2, positions: int = 256) -> Transformer:
    """A random BERT over bytes. Its weights can be read whatever the backend."""
    hidden, matrix = EMBEDDING_SIZE, random_matrices(seed)
    tensors = {
        "model.embed_tokens.weight": 5 * matrix(BYTE_VOCABULARY, hidden),
        "model.embed_positions.weight": 2 * matrix(positions, hidden),
        "model.embed_segments.weight": matrix(2, hidden),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.up_proj": (2 * hidden, hidden),
        "mlp.down_proj": (hidden, 2 * hidden),
    }
    norms = ["embed_norm"]
    for layer in range(layers):
        start = f"layers.{layer}"
        for name, (rows, columns) in shapes.items():
            tensors[f"model.{start}.{name}.weight"] = 2 * matrix(rows, columns)
            tensors[f"model.{start}.{name}.bias"] = 0.3 * matrix(1, rows)[0]
        norms += [f"{start}.post_attention_layernorm", f"{start}.post_feedforward_layernorm"]
    for name in norms:
        tensors[f"model.{name}.weight"] = 1 + 0.3 * matrix(1, hidden)[0]
        tensors[f"model.{name}.bias"] = 0.3 * matrix(1, hidden)[0]
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": BYTE_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": positions,
        "layer_norm_eps": 1e-5,
    }
    network = load_network(Checkpoint("encoder", Path("encoder"), config, tensors))
    return Transformer(network, name="encoder", executor=readable_executor())


def random_parts(model: Transformer, *, seed: int = 1) -> SentenceDiffusion:
    """Random parts of dglm for a model, of whose soft prompts the text depends strongly."""
    random, size = np.random.default_rng(seed), EMBEDDING_SIZE

    def network(inputs: int, outputs: int, scale: float) -> ResidualMlp:
        shapes = {
            "first": (40, inputs),
            "blocks.0.up": (64, 40),
            "blocks.0.down": (40, 64),
            "blocks.1.up": (64, 40),
            "blocks.1.down": (40, 64),
            "last": (outputs, 40),
        }
        tensors = {}
        for name, (rows, columns) in shapes.items():
            factor = scale if name == "last" else 1.0
            tensors[f"{name}.weight"] = factor * random.normal(size=(rows, columns)) / columns**0.5
            tensors[f"{name}.bias"] = 0.1 * factor * random.normal(size=rows)
        return ResidualMlp(tensors)

    return SentenceDiffusion(
        network(2 * size + 2 * NUM_WAVES, size, 0.7),
        network(size + 2 * NUM_WAVES, NUM_ROWS * model.spec.hidden_size, 1.0),
        0.1 * random.normal(size=size),
        0.2 * np.exp(0.3 * random.normal(size=size)),
        random.normal(size=size),
        model_fingerprint(model.network),
    )


def sentence_diffusion_model(**options: Any) -> LLM:
    """An engine over a tiny model with random parts of dglm, and a tiny encoder as its draft model;
    `options` are those of `LLM`."""
    model = tiny_model()
    model.sentence_diffusion = random_parts(model)
    return LLM(
        model, tokenizer=ByteTokenizer(), draft=tiny_encoder(), cache_positions=8192, **options
    )
