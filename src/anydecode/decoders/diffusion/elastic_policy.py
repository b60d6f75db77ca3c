"""Elastic-Cache (Nguyen-Tri, Ranjan and Shen, arXiv:2510.14973) as a cache policy: in every layer
the attention of one tracked token is compared with its attention in the pass before; if it has
drifted, all later layers are computed again for every position.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from anydecode.decoders.diffusion.caches import CachePolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.framework.attention_probe import attention_probe, check_float
from anydecode.decoders.framework.canvas_spans import CanvasSpan, canvas_span
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.memory.pool import KVPool
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import ScoreRequest, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT


class ElasticCachePolicy(CachePolicy):
    """Computes the positions to predict, the last unmasked tokens and the tracked tokens in every
    pass.

    Other positions are computed only in the layers after one in which the attention of the tracked
    token has drifted.

    The state is in `canvas.policy_state["elastic"]`:
    `states`: float32 `[layers + 1, length, hidden_size]`, the hidden states of every position
    before each layer and after the last;
    `tracked`: per layer, the position of the tracked token;
    `attention`: per layer, the attention weights of the tracked token, float64 `[length]`;
    `since`: the first layer that the last step computed for every position.
    Keys and values follow from the states, so a restart computes only them.

    Args:
        drift: If the cosine of the tracked token's attention with that of the pass before is below
            this, all later layers are computed for every position.
    """

    reads_weights = True

    def __init__(self, drift: float = 0.9) -> None:
        if drift < 0:
            raise InvalidRequestError(f"drift must be 0 or more, not {drift}")
        self.drift = drift

    def check(self, pool: KVPool) -> None:
        check_float(pool)
        if not isinstance(pool.cache.keys[0], np.ndarray):
            raise UnsupportedCombinationError(
                "an elastic cache needs a key-value cache in CPU memory, as it reads attention"
                " weights"
            )
        if any(layer.attention and layer.attention.window for layer in pool.model.spec.layers):
            raise UnsupportedCombinationError(
                "an elastic cache does not support layers with sliding window attention"
            )
        attention_probe(pool.model)

    def span(
        self, canvas: Canvas, kv_cache: SequenceCache, tokens: np.ndarray, region: tuple[int, int]
    ) -> Span:
        raise NotImplementedError("an elastic cache runs its own passes")

    def on_replaced(self, canvas: Canvas) -> None:
        canvas.policy_state.pop("elastic", None)

    def trace_fields(self, canvas: Canvas) -> dict[str, Any]:
        """The first layer that was computed for every position."""
        return {"since": canvas.policy_state["elastic"]["since"]}

    def run(
        self, sequence: Sequence, canvas: Canvas, masks: np.ndarray
    ) -> Generator[ScoreRequest, Scores, Scores]:
        kv_cache = sequence.kv_cache()
        num_layers = kv_cache.pool.model.spec.num_layers
        all_positions = np.arange(len(canvas), dtype=np.int32)
        cached = canvas.policy_state.get("elastic")
        current_rows: list[np.ndarray] = []
        if cached is None or len(canvas) != cached["states"].shape[1]:
            positions, since = all_positions, 0
            states = yield from self._run(sequence, canvas, all_positions)
        else:
            if kv_cache.length != len(canvas):
                yield self._rebuild(sequence, canvas, cached["states"])
            last = np.flatnonzero(canvas.committed == canvas.step - 1)
            positions = np.unique(
                np.concatenate([masks, masks - canvas.logit_shift, last, cached["tracked"]])
            )
            new_states = yield from self._run(sequence, canvas, positions)
            since, current_rows = self._drifted(sequence, canvas, positions, new_states)
            states = cached["states"]
            if since < num_layers:
                inputs = states[since].copy()
                inputs[positions] = new_states[since]
                later = yield from self._run(sequence, canvas, all_positions, since, inputs)
                states[since:] = later
            states[: since + 1, positions] = new_states[: since + 1]
            canvas.meter.record_pass("slice", len(positions))
        if since < num_layers:
            canvas.meter.record_pass("full", len(all_positions))
        tracked, attention = self._track(sequence, canvas, masks, states, current_rows)
        canvas.policy_state["elastic"] = {
            "states": states,
            "tracked": tracked,
            "attention": attention,
            "since": since,
        }
        return self._predicted(sequence, canvas, masks, states[num_layers])

    def _run(
        self,
        sequence: Sequence,
        canvas: Canvas,
        positions: np.ndarray,
        start: int = 0,
        inputs: np.ndarray | None = None,
    ) -> Generator[ScoreRequest, Scores, np.ndarray]:
        """Compute and keep rows at `positions` from layer `start` on.

        Returns their hidden states before that layer and after each layer, float32
        `[layers + 1, len(positions), hidden_size]`.
        """
        span = self._rows(sequence, canvas, positions, inputs)
        span.start, span.logits = start, False
        span.capture_layers = tuple(range(start, span.stop + 1))
        span.output_rows = range(len(positions))
        roots = [ROOT] * len(positions)
        scores = yield ScoreRequest(sequence, TARGET, [[span]], positions, roots, list(span.tokens))
        return np.stack([scores.hidden[layer] for layer in span.capture_layers])

    @staticmethod
    def _rows(
        sequence: Sequence, canvas: Canvas, positions: np.ndarray, inputs: np.ndarray | None
    ) -> CanvasSpan:
        tokens, visible = canvas.tokens[positions], canvas.visible(positions)
        kv_cache = sequence.kv_cache()
        return canvas_span(kv_cache, positions, tokens, visible, keep=True, embeddings=inputs)

    def _rebuild(self, sequence: Sequence, canvas: Canvas, states: np.ndarray) -> ScoreRequest:
        """A score request that computes the keys and values of every layer from its states."""
        all_positions = np.arange(len(canvas), dtype=np.int32)
        spans: list[Span] = []
        for layer, inputs in enumerate(states[:-1]):
            span = self._rows(sequence, canvas, all_positions, inputs)
            span.start, span.stop = layer, layer + 1
            spans.append(span)
        return ScoreRequest(sequence, TARGET, [spans], np.empty(0, np.int64), [], [])

    def _drifted(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray, new_states: np.ndarray
    ) -> tuple[int, list[np.ndarray]]:
        """The layer after the first one in which the tracked token's attention has drifted, and the
        current attention weights of the tracked tokens of all layers before it."""
        cached = canvas.policy_state["elastic"]
        current_rows: list[np.ndarray] = []
        for position, previous in zip(cached["tracked"], cached["attention"], strict=True):
            layer = len(current_rows)
            state = new_states[layer, np.searchsorted(positions, position)][None]
            current = self._attention(sequence, canvas, layer, np.array([position]), state)[0]
            current_rows.append(current)
            if current @ previous < self.drift * np.linalg.norm(current) * np.linalg.norm(previous):
                break
        return len(current_rows), current_rows

    def _track(
        self,
        sequence: Sequence,
        canvas: Canvas,
        masks: np.ndarray,
        states: np.ndarray,
        current_rows: list[np.ndarray],
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Per layer the token with the most attention from the masks, and its attention weights.

        `current_rows` are the weights of the tokens tracked before, in the first layers.
        """
        is_token = canvas.tokens != canvas.mask
        previous = canvas.policy_state["elastic"]["tracked"] if current_rows else ()
        tracked, attention = [], []
        for layer, state in enumerate(states[:-1]):
            received = self._attention(sequence, canvas, layer, masks, state[masks]).sum(0)
            position = int(np.where(is_token, received, -1.0).argmax())
            tracked.append(position)
            if layer < len(current_rows) and position == previous[layer]:
                attention.append(current_rows[layer])
                continue
            row = np.array([position])
            attention.append(self._attention(sequence, canvas, layer, row, state[row])[0])
        return np.array(tracked), attention

    @staticmethod
    def _attention(
        sequence: Sequence, canvas: Canvas, layer: int, positions: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        """Attention weights averaged over a layer's heads, float64 `[len(positions), length]`."""
        kv_cache = sequence.kv_cache()
        weights = attention_probe(kv_cache.pool.model).attention(
            layer,
            state,
            positions,
            kv_cache.pool.cache,
            kv_cache.table,
            np.arange(len(canvas)),
            canvas.visible(positions),
        )
        mean: np.ndarray = weights.astype(np.float64).mean(0)
        return mean

    @staticmethod
    def _predicted(
        sequence: Sequence, canvas: Canvas, masks: np.ndarray, states: np.ndarray
    ) -> Scores:
        """The logits of the masks, from the states after the last layer."""
        rows = masks - canvas.logit_shift
        logits = sequence.model().head(states[rows])
        tokens = canvas.tokens[rows].tolist()
        score = ScoreRequest(sequence, TARGET, [], masks, [ROOT] * len(masks), tokens)
        return Scores(score, logits, {}, [])
