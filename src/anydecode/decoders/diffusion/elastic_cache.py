"""What is kept of the canvas is computed again only from the layer on in which attention has
drifted (Nguyen-Tri, Ranjan and Shen, "Attention Is All You Need for KV Cache in Diffusion LLMs",
arXiv:2510.14973)."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.canvas_spans import CanvasSpan, canvas_span
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.stops import EndOfText
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.decoders.diffusion.window_diffusion import FirstMasks
from anydecode.decoders.prefill.attention_probe import attention_probe
from anydecode.decoders.prefill.prefilled import check_float
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.score import Decoding, ScoreRequest, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.tree import ROOT


class ElasticDenoiser(Denoiser):
    """The next masks, what was written last and the tracked tokens are computed in every pass; the
    rest only from the layer on behind one where the tracked token's attention has moved.

    What is kept lives in `canvas.memory["elastic"]`: `states`, float32 `[layers + 1, length,
    hidden_size]`, of every position before each layer and behind the last; `tracked`, per layer the
    position whose attention is watched; `attention`, per layer its row, float64 `[length]`;
    `since`, the first layer that the last step computed for every position. Keys and values follow
    from the states, so a restart computes those alone.
    """

    reads_weights = True
    drift: float

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        context = sequence.context()
        model = context.pool.model
        check_float(context)
        if context.pool.cache.keys[0].device.type != "cpu":
            raise UnsupportedCombinationError("elastic-cache reads attention on CPUs only")
        if any(layer.attention.window for layer in model.spec.layers):
            raise UnsupportedCombinationError("elastic-cache knows no layers with sliding windows")
        attention_probe(model)
        super().begin(sequence, canvas)

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        context = sequence.context()
        depth = context.pool.model.spec.num_layers
        every = np.arange(len(canvas), dtype=np.int32)
        masks = canvas.masked(canvas.frontier, self.blocks.window(canvas))
        held = canvas.memory.get("elastic")
        known: list[np.ndarray] = []
        if held is None or len(canvas) != held["states"].shape[1]:
            positions, since = every, 0
            states = yield from self._run(sequence, canvas, every)
        else:
            if context.length != len(canvas):
                yield self._rebuild(sequence, canvas, held["states"])
            last = np.flatnonzero(canvas.committed == canvas.step - 1)
            positions = np.unique(
                np.concatenate([masks, masks - canvas.shift, last, held["tracked"]])
            )
            fresh = yield from self._run(sequence, canvas, positions)
            since, known = self._drifted(sequence, canvas, positions, fresh)
            states = held["states"]
            if since < depth:
                inputs = states[since].clone()
                inputs[positions] = fresh[since]
                later = yield from self._run(sequence, canvas, every, since, inputs)
                states[since:] = later
            states[: since + 1, positions] = fresh[: since + 1]
            canvas.meter.note("slice", len(positions))
        if since < depth:
            canvas.meter.note("full", len(every))
        tracked, attention = self._track(sequence, canvas, masks, states, known)
        canvas.memory["elastic"] = {
            "states": states,
            "tracked": tracked,
            "attention": attention,
            "since": since,
        }
        scores = self._predicted(sequence, canvas, masks, states[depth])
        self.fill(sequence, canvas, self.predictions(sequence, canvas, scores))

    def commit(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: np.ndarray,
        **facts: object,
    ) -> None:
        """The trace tells the first layer that was computed for every position."""
        since = canvas.memory["elastic"]["since"]
        super().commit(sequence, canvas, predictions, chosen, since=since, **facts)

    def _run(
        self,
        sequence: Sequence,
        canvas: Canvas,
        positions: np.ndarray,
        start: int = 0,
        inputs: torch.Tensor | None = None,
    ) -> Generator[ScoreRequest, Scores, torch.Tensor]:
        """Compute and keep rows at `positions` from layer `start` on; their states there and behind
        each further layer, float32 `[layers, len(positions), hidden_size]`."""
        span = self._rows(sequence, canvas, positions, inputs)
        span.start, span.logits = start, False
        span.capture_layers = tuple(range(start, span.stop + 1))
        span.output_rows = range(len(positions))
        roots = [ROOT] * len(positions)
        scores = yield ScoreRequest(sequence, TARGET, [[span]], positions, roots, list(span.tokens))
        return torch.stack([scores.hidden[layer] for layer in span.capture_layers])

    @staticmethod
    def _rows(
        sequence: Sequence, canvas: Canvas, positions: np.ndarray, inputs: torch.Tensor | None
    ) -> CanvasSpan:
        tokens, visible = canvas.tokens[positions], canvas.visible(positions)
        context = sequence.context()
        return canvas_span(context, positions, tokens, visible, keep=True, embeddings=inputs)

    def _rebuild(self, sequence: Sequence, canvas: Canvas, states: torch.Tensor) -> ScoreRequest:
        """Every layer once more from the states before it, for the keys and values alone."""
        every = np.arange(len(canvas), dtype=np.int32)
        spans: list[Span] = []
        for layer, inputs in enumerate(states[:-1]):
            span = self._rows(sequence, canvas, every, inputs)
            span.start, span.stop = layer, layer + 1
            spans.append(span)
        return ScoreRequest(sequence, TARGET, [spans], np.empty(0, np.int64), [], [])

    def _drifted(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray, fresh: torch.Tensor
    ) -> tuple[int, list[np.ndarray]]:
        """The layer behind the first one in which the tracked token looks elsewhere than before,
        and what the tracked tokens of all layers before it look at now."""
        held = canvas.memory["elastic"]
        known: list[np.ndarray] = []
        for position, before in zip(held["tracked"], held["attention"], strict=True):
            layer = len(known)
            state = fresh[layer, np.searchsorted(positions, position)][None]
            now = self._attention(sequence, canvas, layer, np.array([position]), state)[0]
            known.append(now)
            if now @ before < self.drift * np.linalg.norm(now) * np.linalg.norm(before):
                break
        return len(known), known

    def _track(
        self,
        sequence: Sequence,
        canvas: Canvas,
        masks: np.ndarray,
        states: torch.Tensor,
        known: list[np.ndarray],
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Per layer the token that the masks look at most, and what that token looks at: `known`,
        in the first layers, of the token tracked before."""
        told = canvas.tokens != canvas.mask
        before = canvas.memory["elastic"]["tracked"] if known else ()
        tracked, attention = [], []
        for layer, state in enumerate(states[:-1]):
            seen = self._attention(sequence, canvas, layer, masks, state[masks]).sum(0)
            position = int(np.where(told, seen, -1.0).argmax())
            tracked.append(position)
            if layer < len(known) and position == before[layer]:
                attention.append(known[layer])
                continue
            at = np.array([position])
            attention.append(self._attention(sequence, canvas, layer, at, state[at])[0])
        return np.array(tracked), attention

    @staticmethod
    def _attention(
        sequence: Sequence, canvas: Canvas, layer: int, positions: np.ndarray, state: torch.Tensor
    ) -> np.ndarray:
        """float64 `[len(positions), length]`: the mean of a layer's heads."""
        context = sequence.context()
        share = attention_probe(context.pool.model).share(
            layer,
            state,
            positions,
            context.pool.cache,
            context.table,
            np.arange(len(canvas)),
            canvas.visible(positions),
        )
        mean: np.ndarray = share.double().mean(0).numpy()
        return mean

    @staticmethod
    def _predicted(
        sequence: Sequence, canvas: Canvas, masks: np.ndarray, states: torch.Tensor
    ) -> Scores:
        """The masks' logits, from the last layer's states."""
        held = masks - canvas.shift
        logits = sequence.context().pool.model.head(states[held]).numpy()
        tokens = canvas.tokens[held].tolist()
        score = ScoreRequest(sequence, TARGET, [], masks, [ROOT] * len(masks), tokens)
        return Scores(score, logits, {}, [])


@register(
    Card(
        "elastic-cache",
        "diffusion",
        paper="Attention Is All You Need for KV Cache in Diffusion LLMs (arXiv:2510.14973)",
        exactness="lossy",
        summary="Computes the next masks, and the rest only behind a layer where attention drifts.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the rows of a pass run through all layers before the test, and a refresh runs in a"
            " second pass: the numbers are those of a test within the pass, the rows are more",
            "rows that run through some layers only are counted as whole rows",
            "attention is the mean over heads; before the first test of a token its row comes from"
            " the states that are kept of it",
            "a canvas that is cut or grows is computed afresh",
            "of equally sure masks below the threshold only the leftmost is filled",
            "where the kernels have packed the weights, the test's queries are computed from the"
            " file's own, and always without adapters",
        ),
    )
)
def elastic_cache(
    window: int = 16, threshold: float = 0.9, drift: float = 0.9, mask: int | None = None
) -> Denoiser:
    """The first `window` masks are computed in every pass. Layers behind one in which the cosine
    of the tracked token's attention with its last one is below `drift` are computed for every
    position (0: never; above 1: always from the second layer on). Commits what is predicted with
    at least `threshold`."""
    if window < 1 or drift < 0:
        raise InvalidRequestError("elastic-cache needs window >= 1 and drift >= 0")
    made = ElasticDenoiser(
        FirstMasks(window), unmask=ThresholdUnmasking(threshold), stop=EndOfText(), mask=mask
    )
    made.drift = drift
    return made
