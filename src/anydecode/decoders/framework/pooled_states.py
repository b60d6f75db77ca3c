"""The pooled states of a text, of which embeddings are made.

An encoder runs a whole text in one pass, in which every token sees all others. A causal model runs
a text in chunks.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.decoders.framework.canvas_spans import canvas_span
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.encoder_tasks import EncoderTask
from anydecode.models.pooling import Pooling
from anydecode.models.tokenizer import Tokenizer
from anydecode.scoring.score import ActionResult, DecoderAction, ScoreRequest
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT

#: Rows per request of a causal model.
CHUNK = 256


def pooled_state(
    sequence: Sequence,
    runner: str,
    tokens: Seq[int],
    pooling: Pooling,
    *,
    has_final_norm: bool = True,
    types: Seq[int] = (),
    task: EncoderTask | None = None,
) -> Generator[DecoderAction, ActionResult, np.ndarray]:
    """The pooled state of a text after the last layer of a model, float64 `[hidden_size]`.

    Args:
        sequence: The sequence whose cache of `runner` is used; it is emptied first.
        runner: The model.
        tokens: The text, at least one token.
        pooling: How states are pooled.
        has_final_norm: Whether the states are those after the final norm.
        types: The token type of each token; empty for type 0.
        task: Whose updates of embeddings are added, of an encoder; None for none.
    """
    kv_cache = sequence.kv_cache(runner)
    kv_cache.truncate(0)
    model: Any = kv_cache.pool.model
    depth = model.spec.num_layers
    if model.spec.is_encoder:
        scores = yield _whole_text(sequence, runner, kv_cache, tokens, pooling, types, task)
        total = _summed(model, scores.hidden[depth], has_final_norm)
    else:
        total = np.zeros(model.spec.hidden_size)
        pooled = set(pooling.rows(len(tokens)))
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            request = sequence.score(part, runner=runner, rows="all", hidden=(depth,))
            for spans in request.groups:
                for span in spans:
                    span.logits = False
                    span.output_rows = [row for row in span.output_rows if start + row in pooled]
            scores = yield request
            if len(scores.hidden[depth]):
                total += _summed(model, scores.hidden[depth], has_final_norm)
    state: np.ndarray = total / len(pooling.rows(len(tokens)))
    return state


def _summed(model: Any, states: np.ndarray, has_final_norm: bool) -> np.ndarray:
    """The sum of the states of rows, float64 `[hidden_size]`."""
    if (has_final_norm and model.spec.has_final_norm) or model.spec.stream_gate_rank:
        states = model.normed(states)
    # The first of several streams, or without the memory.
    total: np.ndarray = states[:, : model.spec.hidden_size].astype(np.float64).sum(0)
    return total


def _whole_text(
    sequence: Sequence,
    runner: str,
    kv_cache: SequenceCache,
    text: Seq[int],
    pooling: Pooling,
    types: Seq[int],
    task: EncoderTask | None,
) -> ScoreRequest:
    """The request of an encoder: all tokens at once."""
    model: Any = kv_cache.pool.model
    tokens = np.asarray(text, np.int32)
    inputs, count = None, len(tokens)
    segments = model.network.weights.segments
    if segments is not None:
        kinds = np.asarray(types, np.int64) if len(types) else np.zeros(count, np.int64)
        kinds = np.minimum(kinds, len(segments) - 1)
        inputs = model.embed(tokens) + segments[kinds]
        if task is not None:
            inputs = inputs + task.embeddings(tokens, kinds)
    span = canvas_span(
        kv_cache,
        np.arange(count),
        tokens,
        np.full(count, count),
        embeddings=inputs,
        capture_layers=(model.spec.num_layers,),
    )
    span.logits = False
    span.output_rows = rows = pooling.rows(count)
    return ScoreRequest(
        sequence, runner, [[span]], np.asarray(rows), [ROOT] * len(rows), tokens[rows].tolist()
    )


def encoded(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> list[int]:
    """The tokens of a text, cut to `max_tokens`; special tokens at the end are kept."""
    encode_pair = getattr(tokenizer, "encode_pair", None)
    if max_tokens is None or encode_pair is None:
        return tokenizer.encode(text)[:max_tokens]
    tokens: list[int] = encode_pair(text, None, max_tokens)[0]
    return tokens
