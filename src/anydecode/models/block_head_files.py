"""Reads the heads of a block drafter (DSpark), in the layouts of DeepSpec, SpecForge and
speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.models.families.values import bool_value, int_value
from anydecode.models.families.weights import TensorReader
from anydecode.models.limits import refusal
from anydecode.models.network import (
    BlockHeads,
    ConfidenceHead,
    LayerWeights,
    MarkovHead,
    ModelWeights,
    Network,
)
from anydecode.models.spec import LayerSpec, ModelSpec

_MARKOV = "markov_head.markov_w1"
_CONFIDENCE = "confidence_head.proj"


def read_block_heads(
    reader: TensorReader, options: Mapping[str, Any], spec: ModelSpec, tokens: np.ndarray | None
) -> BlockHeads | None:
    """The heads of a block drafter, None if it has none.

    Args:
        reader: The drafter's tensors.
        options: The keys of its config.
        spec: Its architecture.
        tokens: The tokens of its head's rows; None for all.
    """
    # Early checkpoints of SpecForge have them in a module of their own.
    prefix = "logit_head." if reader.has_module("logit_head") else ""
    markov = _read_markov(reader, options, spec, tokens, prefix)
    confidence = _read_confidence(reader, options, spec, markov, prefix)
    if markov is None and confidence is None:
        return None
    return BlockHeads(markov, confidence)


def _read_markov(
    reader: TensorReader,
    options: Mapping[str, Any],
    spec: ModelSpec,
    tokens: np.ndarray | None,
    prefix: str,
) -> MarkovHead | None:
    rank = int_value(options, "markov_rank", 0, low=0)
    name = f"{prefix}{_MARKOV}"
    if not rank and not reader.has(f"{name}.weight"):
        return None
    first = reader.matrix(name, (spec.vocab_size, rank), is_outer=True)
    second = reader.matrix(f"{name[:-1]}2", (spec.num_logits, rank), is_outer=True)
    bigrams = ModelSpec(
        architecture="Markov",
        vocab_size=spec.vocab_size,
        hidden_size=rank,
        max_positions=spec.max_positions,
        norm_eps=spec.norm_eps,
        layers=(LayerSpec(None, None, mlp="none"),),
        has_final_norm=False,
        head_size=spec.head_size,
    )
    weights = ModelWeights(first, [LayerWeights()], None, second, head_tokens=tokens)
    kind = options.get("markov_head_type") or "vanilla"
    head = MarkovHead(kind, Network(bigrams, weights))
    if kind == "gated":
        name, shape = f"{prefix}markov_head.gate_proj", (rank, spec.hidden_size + rank)
    elif kind == "rnn":
        name, shape = f"{prefix}markov_head.joint_proj", (3 * rank, 2 * rank + spec.hidden_size)
    elif kind == "vanilla":
        return head
    else:
        raise refusal("markov_head_type", kind, "vanilla, gated or rnn")
    head.mix = reader.tensor(f"{name}.weight", shape)
    head.mix_bias = reader.vector(f"{name}.bias", shape[0])
    return head


def _read_confidence(
    reader: TensorReader,
    options: Mapping[str, Any],
    spec: ModelSpec,
    markov: MarkovHead | None,
    prefix: str,
) -> ConfidenceHead | None:
    name, width = f"{prefix}{_CONFIDENCE}", spec.hidden_size
    if not reader.has(f"{name}.weight"):
        return None
    if bool_value(options, "confidence_head_with_markov"):
        if markov is None:
            raise CheckpointError(
                "confidence_head_with_markov is True, but there is no Markov head"
            )
        width += markov.rank
    weight = reader.tensor(f"{name}.weight", (1, width))[0]
    return ConfidenceHead(weight, float(reader.vector(f"{name}.bias", 1)[0]))
