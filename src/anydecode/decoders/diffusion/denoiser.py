"""The denoising loop of every diffusion decoder.

    Denoiser = BlockPolicy x Ranking x UnmaskPolicy x CachePolicy x StopRule

Each denoising step runs one forward pass that predicts the masks of a block. The ranking orders
these masks, and the unmask policy selects those that are unmasked in this step. Tokens before the
first remaining mask are emitted at once, unless the method may still change them. A method is a
choice of these five parts, or a subclass that changes one step of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.diffusion.blocks import BlockPolicy, WholeCanvas
from anydecode.decoders.diffusion.caches import CachePolicy, NoCache
from anydecode.decoders.diffusion.canvas import FIXED, MASKED, Canvas
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence, Ranking, best_first
from anydecode.decoders.diffusion.stops import StopRule
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy
from anydecode.decoders.framework.canvas_spans import CanvasSpan, canvas_span, score_canvas
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import AtTime
from anydecode.memory.pool import KVPool
from anydecode.sampling.sampler import Sampler, constraint_of
from anydecode.scoring.score import Decoding, ScoreRequest, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import Span
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import TokenTree

PredictionGenerator = Generator[ScoreRequest, Scores, list[Predictions]]

#: The tokens of the prompt from its first mask on: the canvas to fill.
TEMPLATE: StateKey[list[int]] = StateKey("denoiser", "template")
_CANVAS: StateKey[Canvas] = StateKey("denoiser", "canvas")


class Denoiser(Decoder):
    """Unmasks a canvas of masks after the prompt, or the masks within the prompt (infilling).

    A stateful sampler (a constraint, a penalty) depends on the text before a position, so it is
    applied from left to right: a step then unmasks positions from the left only, and ends at the
    first token that the stateful parts of the sampler changed.

    Args:
        blocks: Which part of the canvas is unmasked at a time (default: the whole canvas).
        ranking: The order in which masks are unmasked (default: by confidence).
        unmask: How many masks a step unmasks (default: one).
        cache: Which rows a forward pass computes again (default: all).
        stop: When decoding ends early (default: never).
        mask: The mask token (default: the tokenizer's).
        length: The number of masks of a canvas (default: max_tokens). When a canvas is full,
            further masks are appended until the answer ends.
        tempered: Take confidences from the distribution after temperature and truncation instead
            of the model's own.
    """

    requirements = Requirements(causal=False, attention_only=(TARGET,))
    plain = "llada:block=0"  # one token per pass over the whole canvas, without a cache
    #: Whether the model must have a mask token.
    needs_mask = True

    def __init__(
        self,
        blocks: BlockPolicy | None = None,
        ranking: Ranking | None = None,
        unmask: UnmaskPolicy | None = None,
        cache: CachePolicy | None = None,
        stop: StopRule | None = None,
        *,
        mask: int | None = None,
        length: int | None = None,
        tempered: bool = False,
    ) -> None:
        if length is not None and length < 1:
            raise InvalidRequestError(f"a canvas needs at least one position, not {length}")
        self.blocks = blocks or WholeCanvas()
        self.ranking = ranking or Confidence()
        self.unmask = unmask or TopKUnmasking()
        self.cache = cache or NoCache()
        self.stop = stop or StopRule()
        self.mask = mask
        self.length = length
        self.tempered = tempered
        self.requirements = replace(
            self.requirements,
            causal=self.cache.causal,
            reads_weights=self.requirements.reads_weights or self.cache.reads_weights,
        )

    def prepare(self, sequence: Sequence) -> None:
        mask = self.mask_token(sequence)
        if mask is None:
            raise InvalidRequestError(
                "this model's files name no mask token: open it with mask=TOKEN_ID (--mask)"
            )
        vocab_size = sequence.model().spec.vocab_size
        has_none = mask == -1 and not self.needs_mask
        if not has_none and not 0 <= mask < vocab_size:
            raise InvalidRequestError(
                f"the mask token {mask} is not in the vocabulary of {vocab_size} tokens"
            )
        sampler = sequence.sampler
        if sampler.companions or sampler.capture_layers or sampler.observes_hidden:
            raise UnsupportedCombinationError(
                "guidance, DoLa and samplers that read hidden states work with causal models only"
            )
        remaining = sequence.remaining
        if self.length is not None and self.length > remaining:
            raise InvalidRequestError(
                f"a canvas of {self.length} is longer than the answer may be;"
                f" max_tokens={remaining} must be at least that"
            )
        if mask in sequence.prompt:
            first = sequence.prompt.index(mask)
            template = sequence.prompt[first:]
            if len(template) > remaining:
                raise InvalidRequestError(
                    f"the prompt has {len(template)} tokens from the first mask on;"
                    f" max_tokens={remaining} must be at least that"
                )
            sequence.state[TEMPLATE] = template
            if first < sequence.model().spec.logit_shift:
                raise InvalidRequestError(
                    "this model cannot predict the first position of a text;"
                    " put a token before the mask"
                )
            sequence.prompt = sequence.prompt[:first]
            remaining = len(template)
        self.blocks.check_length(min(remaining, self.length or remaining))
        self._check_model(sequence.pool())

    def _check_model(self, pool: KVPool) -> None:
        """Raise `InvalidRequestError` if the model or its memory does not fit the parameters."""
        spec = pool.model.spec
        if spec.has_canvas and (self.needs_mask or not self.cache.is_exact_blocks):
            raise UnsupportedCombinationError(
                "this model denoises random tokens behind finished blocks: use"
                " decoder=diffusion-gemma:cache=block or duo:cache=block"
            )
        if spec.time is not None and not spec.has_canvas and not isinstance(self.cache, NoCache):
            raise UnsupportedCombinationError(
                "the layers of this model depend on the time of the diffusion, so that every pass"
                " computes all rows: use cache=none"
            )
        block_size = self.cache.block_size(spec)
        self.blocks.check_model(block_size)
        if block_size and self.stop.needs_all_masks:
            raise UnsupportedCombinationError(
                "this decoder's stop rule needs predictions of all masks, but this model predicts"
                " one block at a time; use a diffusion model without blocks"
            )
        self.cache.check(pool)

    def mask_token(self, sequence: Sequence) -> int | None:
        """The mask token; None if none is known."""
        return sequence.mask_token if self.mask is None else self.mask

    def decode(self, sequence: Sequence) -> Decoding:
        canvas = self.canvas_of(sequence)
        kv_cache = sequence.kv_cache()
        self.cache.begin(canvas, kv_cache)
        for positions, tokens, visible in canvas.cached_rows:
            span = canvas_span(kv_cache, positions, tokens, visible, keep=True)
            yield score_canvas(
                sequence, TARGET, [span], 1, np.empty(0, np.int64), canvas.logit_shift
            )
        if kv_cache.length > len(canvas):
            kv_cache.truncate(len(canvas))
        while not sequence.finished:
            if self.is_complete(canvas):
                if canvas.is_fixed_length or not sequence.remaining:
                    return
                canvas.extend(self._num_new_masks(sequence, canvas))
            yield from self.step(sequence, canvas)

    def is_complete(self, canvas: Canvas) -> bool:
        """Whether the canvas as it is needs no further step."""
        return not len(canvas.masks)

    def emitted_stop(self, canvas: Canvas) -> int:
        """The end of the tokens that cannot change any more."""
        return canvas.frontier

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        """One denoising step.

        A restart may close this generator at any yield and begin the step again, so the canvas must
        change only after the last yield.
        """
        [predictions] = yield from self.forward(sequence, canvas)
        self.unmask_step(sequence, canvas, predictions)

    def forward(
        self,
        sequence: Sequence,
        canvas: Canvas,
        canvases: list[np.ndarray] | None = None,
        region: tuple[int, int] | None = None,
    ) -> PredictionGenerator:
        """One forward pass: predictions for the masks of the block, or of the block to be opened.

        Args:
            sequence: The sequence of the canvas.
            canvas: The canvas.
            canvases: The tokens of several canvases that are scored in the same pass (default: the
                canvas itself).
            region: The positions `first..stop` to predict, masked or not (default: the masks of
                the block).

        Returns:
            One `Predictions` per canvas.
        """
        opens_block = canvas.block is None and canvases is None
        block = canvas.block or (canvas.frontier, self.blocks.window_end(canvas))
        if region is None:
            positions = np.union1d(canvas.masked(*block), self.stop.extra_positions(canvas))
        else:
            positions = np.arange(*region)
            block = min(block[0], region[0]), max(block[1], region[1])
        passes = self.cache.run(sequence, canvas, positions)
        if passes is not None:
            return [self.predictions(sequence, canvas, (yield from passes))]
        spans = self.cache.spans(
            canvas,
            sequence.kv_cache(),
            block,
            opens_block,
            lambda span_positions: self.embeddings(sequence, canvas, span_positions),
            canvases,
        )
        num_canvases = 1 if canvases is None else len(canvases)
        self.set_time(sequence, canvas, spans, num_canvases)
        for span in spans[len(spans) - num_canvases :]:
            span.capture_layers = self.captured_layers(sequence)
        scores = yield score_canvas(
            sequence, TARGET, spans, num_canvases, positions, self.blocks.logit_shift(canvas)
        )
        self._record_pass(canvas, spans, "verify" if canvases is not None else "")
        self.cache.on_pass(canvas, block)
        count = len(positions)
        parts = [range(number * count, (number + 1) * count) for number in range(num_canvases)]
        return [self.predictions(sequence, canvas, scores, rows) for rows in parts]

    def predictions(
        self, sequence: Sequence, canvas: Canvas, scores: Scores, rows: range | None = None
    ) -> Predictions:
        """The predictions for one canvas, from `rows` of the scores (default: all)."""
        sampler = _without_stateful_parts(sequence.sampler)
        banned = self.banned(sequence, canvas)
        return Predictions(
            sequence, scores, sampler, canvas.step, canvas.mask, self.tempered, rows, banned
        )

    def banned(self, sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
        """Tokens that are never predicted, beside the mask token: those that edit a canvas, which
        are no text."""
        spec = sequence.model().spec
        tokens = (*(spec.edit_tokens or ()), spec.expand_token)
        return tuple(token for token in tokens if token is not None)

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        """Open a block if none is open, choose masks, and commit their tokens."""
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
            self.unmask.on_block_opened(canvas)
        assert canvas.block is not None
        if self.stop.fills_all(canvas, predictions):
            chosen = canvas.masks[[position in predictions for position in canvas.masks]]
        else:
            chosen = self.choose(canvas, predictions, canvas.masked(*canvas.block))
        self.commit(sequence, canvas, predictions, chosen)

    def choose(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """The masks among `positions` to unmask in this step, ascending; at least one."""
        ranks = self.ranking.rank(canvas, predictions, positions)
        chosen = self.unmask.select(canvas, predictions, positions, ranks)
        if not chosen.any():
            chosen[best_first(ranks)[0]] = True
        result: np.ndarray = positions[chosen]
        return result

    def commit(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: np.ndarray,
        tokens: list[int] | None = None,
        **trace_fields: Any,
    ) -> None:
        """Unmask the positions `chosen`, then finish the step.

        `tokens` are their tokens (default: the sampled ones). `trace_fields` are added to the trace
        record.
        """
        if tokens is None and sequence.sampler.is_stateful:
            chosen, tokens = self._sample_in_order(sequence, canvas, predictions, chosen)
            canvas.commit(chosen, tokens, predictions.probabilities_drawn(chosen, tokens))
        else:
            tokens = predictions.tokens(chosen).tolist() if tokens is None else tokens
            self.write(sequence, canvas, predictions, chosen, tokens, canvas.commit)
        self.finish_step(sequence, canvas, predictions, chosen, **trace_fields)

    def write(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: Seq[int] | np.ndarray,
        tokens: list[int],
        change: Callable[[Any, list[int], np.ndarray], None],
    ) -> None:
        """Unmask positions (`change` is `canvas.commit`) or replace their tokens (`canvas.edit`),
        with the probabilities and the log-probabilities of the tokens."""
        self._compute_logprobs(
            sequence, canvas, predictions, positions, tokens, predictions.sampler
        )
        change(positions, tokens, predictions.probabilities_drawn(positions, tokens))

    def finish_step(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: Iterable[int],
        **trace_fields: Any,
    ) -> None:
        """After a commit: shorten the canvas, close a full block, and emit the prefix."""
        length = self.stop.truncated_length(canvas, predictions)
        if length is not None:
            canvas.truncate(length)
            kv_cache = sequence.kv_cache()
            if kv_cache.length > length:
                kv_cache.truncate(length)
        canvas.step += 1
        canvas.block_step += 1
        if canvas.block is not None and self.blocks.should_close(canvas):
            canvas.block = None
        self.emit_prefix(sequence, canvas, chosen, **trace_fields)

    def emit_prefix(
        self, sequence: Sequence, canvas: Canvas, chosen: Iterable[int], **trace_fields: Any
    ) -> None:
        """Emit the tokens that cannot change any more, and record the step in the trace."""
        first, stop = sequence.length, self.emitted_stop(canvas)
        tokens = canvas.tokens[first:stop].tolist()
        sequence.record(
            TokenTree(),
            (),
            tokens,
            method="diffusion",
            canvas=[-1 if token == canvas.mask else token for token in self._canvas_tokens(canvas)],
            start=canvas.policy_state["start"],
            filled=[int(position) for position in chosen],
            meter=canvas.meter.to_dict(),
            **self.cache.trace_fields(canvas),
            **trace_fields,
        )
        logprobs = [canvas.logprobs.pop(position, None) for position in range(first, stop)]
        sequence.emit(tokens, logprobs=logprobs if sequence.compute_logprobs is not None else None)

    def captured_layers(self, sequence: Sequence) -> tuple[int, ...]:
        """The layers before which `Predictions.scores.hidden` has the hidden states of predicted
        rows."""
        return ()

    def time(self, canvas: Canvas) -> float:
        """The time of the diffusion in the next pass, from 1 (noise) to 0 (text), for models that
        read it: the share of masks."""
        return len(canvas.masks) / max(1, len(canvas) - canvas.policy_state["start"])

    def set_time(
        self, sequence: Sequence, canvas: Canvas, spans: Seq[Span], num_canvases: int = 1
    ) -> None:
        """Give the spans of a pass its time, for models that read it; the last `num_canvases` are
        those of the canvas. Finished blocks and a causal context are at time 0."""
        reads = sequence.model().spec.time
        if reads is not None:
            first = len(spans) - num_canvases if canvas.has_causal_context else 0
            for span in spans[first:]:
                span.variant = AtTime(reads.value(self.time(canvas)))

    def embeddings(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> np.ndarray | None:
        """Embeddings to feed instead of the tokens at `positions`; None: the tokens.

        float32 `[len(positions), hidden_size]`.
        """
        return None

    def canvas_of(self, sequence: Sequence) -> Canvas:
        """The sequence's canvas; created on the first call."""
        canvas = sequence.state.get(_CANVAS)
        if canvas is None:
            mask = self.mask_token(sequence)
            assert mask is not None
            pool = sequence.pool()
            spec = pool.model.spec
            starts_at_prompt_end = spec.has_causal_context or spec.has_prompt_block
            canvas = Canvas(
                np.array(sequence.all_tokens, np.int32),
                mask,
                logit_shift=spec.logit_shift,
                block_size=self.cache.block_size(spec),
                origin=len(sequence.prompt) if starts_at_prompt_end else 0,
                has_causal_context=spec.has_causal_context,
                context_predicts_next=spec.context_predicts_next,
                has_prompt_block=spec.has_prompt_block,
                max_length=min(pool.num_slots, spec.max_positions),
            )
            canvas.policy_state["start"] = len(sequence.prompt)
            self.begin(sequence, canvas)
            sequence.state[_CANVAS] = canvas
        return canvas

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        """Put the first masks on a new canvas. Subclasses add prior tokens here."""
        template = sequence.root.state.get(TEMPLATE)
        if template is None:
            canvas.extend(self._num_new_masks(sequence, canvas))
            return
        remaining = template[len(sequence.tokens) :]
        canvas.extend(len(remaining))
        first = len(canvas) - len(remaining)
        for position, token in enumerate(remaining, first):
            if token != canvas.mask:
                canvas.fix(position, token)
        canvas.is_fixed_length = True

    def _num_new_masks(self, sequence: Sequence, canvas: Canvas) -> int:
        """How many masks to append: whole blocks, if the model has blocks."""
        remaining = sequence.remaining
        stop = len(canvas) + min(remaining, self.length or remaining)
        if canvas.block_size:
            stop = min(canvas.block_end(stop - 1), max(stop, canvas.max_length))
        return stop - len(canvas)

    def _record_pass(self, canvas: Canvas, spans: Seq[Any], kind: str) -> None:
        """Count a forward pass that has run, and record the rows it cached."""
        computed = sum(len(span) for span in spans)
        canvas.meter.record_pass(kind or ("full" if computed >= len(canvas) else "slice"), computed)
        if not self.cache.needs_replay:
            return
        for span in spans:
            if isinstance(span, CanvasSpan) and span.keep:
                if len(span.positions) == span.kv_cache.length:  # the pass replaced all cached rows
                    canvas.cached_rows = []
                tokens = np.array(span.tokens, np.int32)
                canvas.cached_rows.append((span.positions, tokens, span.visible))

    def _sample_in_order(
        self, sequence: Sequence, canvas: Canvas, predictions: Predictions, chosen: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Sample with a stateful sampler from the left, as far as positions were chosen."""
        state = sequence.sampler.fork()
        chosen_positions = {int(position) for position in chosen}
        positions: list[int] = []
        tokens: list[int] = []
        has_changed = False
        for position in range(sequence.length, len(canvas)):
            token = int(canvas.tokens[position])
            if canvas.committed[position] != MASKED:
                if canvas.committed[position] == FIXED:
                    _check_fixed_token(state, position, token)
            elif (
                has_changed
                or position not in predictions
                or (positions and position not in chosen_positions)
            ):
                break
            else:
                token = predictions.draw(state, position)
                self._compute_logprobs(sequence, canvas, predictions, [position], [token], state)
                positions.append(position)
                tokens.append(token)
                has_changed = token != predictions.token(position)
            state.advance(token)
        return np.array(positions, np.int64), tokens

    @staticmethod
    def _compute_logprobs(
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: Iterable[int],
        tokens: Iterable[int],
        sampler: Sampler,
    ) -> None:
        if sequence.compute_logprobs is not None:
            for position, token in zip(positions, tokens, strict=True):
                canvas.logprobs[int(position)] = sequence.compute_logprobs(
                    predictions.logits(position), token, sampler
                )

    @staticmethod
    def _canvas_tokens(canvas: Canvas) -> list[int]:
        tokens: list[int] = canvas.tokens[canvas.policy_state["start"] :].tolist()
        return tokens


def _without_stateful_parts(sampler: Sampler) -> Sampler:
    """The sampler without the parts that depend on the text before a position."""
    if not sampler.is_stateful:
        return sampler
    before = [part for part in sampler.pre_temperature if not part.is_stateful]
    after = [part for part in sampler.post_temperature if not part.is_stateful]
    return Sampler(sampler.temperature, before, after)


def _check_fixed_token(sampler: Sampler, position: int, token: int) -> None:
    """Raise `ConstraintError` if the constraint forbids a token that is fixed on the canvas."""
    part = constraint_of(sampler)
    if part is None:
        return
    # A forced completion gives way to a token that is there already.
    mask = (getattr(part.state, "unforced", None) or part.state).mask()
    if mask is None:
        return
    allowed = token < len(mask) and mask[token] if mask.dtype == np.bool_ else token in mask
    if not allowed:
        raise ConstraintError(
            f"the canvas cannot satisfy the constraint any more: token {token} is fixed at"
            f" position {position}"
        )
