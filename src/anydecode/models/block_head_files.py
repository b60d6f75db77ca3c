"""Reads the heads of a block drafter (DSpark, Domino, DFlash2), in the layouts of DeepSpec,
SpecForge and speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
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
    PrefixHead,
    SelectorHead,
)
from anydecode.models.spec import LayerSpec, ModelSpec

_MARKOV = "markov_head.markov_w1"
_CONFIDENCE = "confidence_head.proj"
#: Keys of the size of Domino's second matrix, in SpecForge and in speculators.
_RANK_KEYS = ("emb_dim", "logits_correction_emb_dim")


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
    recurrent = _read_prefix(reader, options, spec)
    selector = _read_selector(reader, options, spec)
    if markov is None and confidence is None and recurrent is None and selector is None:
        return None
    return BlockHeads(markov, confidence, recurrent, selector)


def _read_selector(
    reader: TensorReader, options: Mapping[str, Any], spec: ModelSpec
) -> SelectorHead | None:
    rank = int_value(options, "selector_rank", 0, low=0)
    if not rank:
        return None
    if spec.head_size:
        raise refusal("draft_vocab_size", spec.head_size, "all of the target's tokens in DFlash2")
    module, shape = "candidate_selector", (spec.vocab_size, rank)
    hidden = reader.matrix(f"{module}.hidden_projection", (rank, spec.hidden_size), is_outer=True)
    return SelectorHead(
        reader.matrix(module, shape, is_outer=True, part="predecessor_codebook"),
        reader.matrix(module, shape, is_outer=True, part="successor_codebook"),
        dequantize(hidden),
        int_value(options, "selector_top_k", high=spec.vocab_size),
    )


def _read_prefix(
    reader: TensorReader, options: Mapping[str, Any], spec: ModelSpec
) -> PrefixHead | None:
    """The head of Domino; speculators have it in a module of its own."""
    module = "logits_correction." if reader.has_module("logits_correction") else ""
    unit = f"{module}prefix_gru"
    if not reader.has_module(unit):
        return None
    key = next((key for key in _RANK_KEYS if options.get(key) is not None), _RANK_KEYS[0])
    width, rank = int_value(options, "gru_hidden_dim"), int_value(options, key)
    second = reader.matrix(f"{module}embed_proj.2", (spec.num_logits, rank), is_outer=True)
    corrections = _without_layers(spec, "Domino", spec.num_logits, rank)
    return PrefixHead(
        Network(corrections, ModelWeights(second, [LayerWeights()], None, second)),
        reader.tensor(f"{unit}.weight_ih_l0", (3 * width, spec.hidden_size)),
        reader.tensor(f"{unit}.weight_hh_l0", (3 * width, width)),
        reader.tensor(f"{module}embed_proj.0.weight", (rank, spec.hidden_size + width)),
        int_value(options, "pure_draft_prefix_len", 0, low=0),
    )


def _without_layers(
    spec: ModelSpec, architecture: str, vocab_size: int, rank: int, head_size: int = 0
) -> ModelSpec:
    """The spec of a table of `rank` numbers per token with a head, beside a drafter with `spec`."""
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=rank,
        max_positions=spec.max_positions,
        norm_eps=spec.norm_eps,
        layers=(LayerSpec(None, None, mlp="none"),),
        has_final_norm=False,
        head_size=head_size,
    )


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
    bigrams = _without_layers(spec, "Markov", spec.vocab_size, rank, spec.head_size)
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
