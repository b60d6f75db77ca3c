"""The loop of every diffusion decoder: look at the canvas, fill some masks, say what is certain.

    Denoiser = BlockPolicy x Ranking x UnmaskPolicy x CachePolicy x StopRule

A pass predicts the masks of a block; the ranking orders them, the unmask policy chooses which get
their tokens now; what stands before the first mask is said at once. A method is a choice of these
parts, or a subclass that changes one step of the loop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from anydecode.decoders.decoder import Decoder
from anydecode.decoders.diffusion.blocks import BlockPolicy, WholeCanvas
from anydecode.decoders.diffusion.caches import CachePolicy, NoCache
from anydecode.decoders.diffusion.canvas import MASKED, Canvas
from anydecode.decoders.diffusion.canvas_spans import CanvasSpan, canvas_span, score_of
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence, Ranking, best_first
from anydecode.decoders.diffusion.stops import StopRule
from anydecode.decoders.diffusion.unmasking import TopKUnmasking, UnmaskPolicy
from anydecode.errors import ConstraintError, InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.constrained import constraint_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding, ScoreRequest, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import TokenTree

Looking = Generator[ScoreRequest, Scores, list[Predictions]]


class Denoiser(Decoder):
    """Fills a canvas of masks behind the prompt, or the masks within the prompt.

    `length` is how many masks a canvas has (default: max_tokens); further ones follow until the
    answer ends. `mask` is the mask token where the tokenizer names none. `tempered` takes
    confidences from the tempered and truncated distribution instead of the raw one.

    A policy that depends on the text said so far (a constraint, a penalty) is asked in the order of
    the text: then a pass fills positions from the left only, and ends at the first token that the
    policy changed.
    """

    causal: bool | None = False
    plain = "llada:block=0"  # one token per pass over the whole canvas, nothing cached
    #: The layers whose states `Predictions.scores.hidden` has of the predicted rows.
    hidden: tuple[int, ...] = ()

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
            raise InvalidRequestError("a canvas needs at least one position")
        self.blocks = blocks or WholeCanvas()
        self.ranking = ranking or Confidence()
        self.unmask = unmask or TopKUnmasking()
        self.cache = cache or NoCache()
        self.stop = stop or StopRule()
        self.mask = mask
        self.length = length
        self.tempered = tempered
        self.causal = self.cache.causal

    def prepare(self, sequence: Sequence) -> None:
        mask = sequence.mask_token if self.mask is None else self.mask
        if mask is None:
            raise InvalidRequestError("this model's tokenizer has no mask token; give mask=")
        sampler = sequence.sampler
        if sampler.companions or sampler.capture_layers or sampler.observes_hidden:
            raise UnsupportedCombinationError(
                "guidance, DoLa and policies that read hidden states work with causal models only"
            )
        room = sequence.remaining
        if self.length is not None and self.length > room:
            raise InvalidRequestError(
                f"a canvas of {self.length} is longer than the answer may be ({room}: max_tokens)"
            )
        if mask in sequence.prompt:
            at = sequence.prompt.index(mask)
            behind = sequence.prompt[at:]
            if len(behind) > room:
                raise InvalidRequestError(
                    f"{len(behind)} tokens stand from the first mask on, but the answer may have"
                    f" {room} (max_tokens)"
                )
            sequence.state["template"] = behind
            sequence.prompt = sequence.prompt[:at]
            room = len(behind)
        self.blocks.check(min(room, self.length or room))

    def decode(self, sequence: Sequence) -> Decoding:
        canvas = self.canvas(sequence)
        context = sequence.context()
        self.cache.begin(canvas, context)
        for positions, tokens, visible in canvas.kept:
            span = canvas_span(context, positions, tokens, visible, keep=True)
            yield score_of(sequence, TARGET, [span], 1, np.empty(0, np.int64), canvas.shift)
        if context.length > len(canvas):
            context.truncate(len(canvas))
        while not sequence.finished:
            if not len(canvas.masks):
                if canvas.whole or not sequence.remaining:
                    return
                canvas.extend(self._masks(sequence, canvas))
            yield from self.step(sequence, canvas)

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        """One round of the loop. It may be abandoned at any yield and begun again, so the canvas
        changes only behind the last one."""
        [predictions] = yield from self.forward(sequence, canvas)
        self.fill(sequence, canvas, predictions)

    def forward(
        self,
        sequence: Sequence,
        canvas: Canvas,
        canvases: list[np.ndarray] | None = None,
        region: tuple[int, int] | None = None,
    ) -> Looking:
        """One pass: predictions for the masks of the block, or of the block about to be opened.
        With `canvases` (the tokens of each), they are all looked at in the same pass, and one
        `Predictions` comes back for each; `region` is then what is predicted, masked or not."""
        opening = canvas.block is None and canvases is None
        block = canvas.block or (canvas.frontier, self.blocks.window(canvas))
        if region is None:
            wanted = np.union1d(canvas.masked(*block), self.stop.wants(canvas))
        else:
            wanted = np.arange(*region)
            block = min(block[0], region[0]), max(block[1], region[1])
        spans = self.cache.spans(
            canvas,
            sequence.context(),
            block,
            opening,
            lambda positions: self.embeddings(sequence, canvas, positions),
            canvases,
        )
        num_canvases = 1 if canvases is None else len(canvases)
        for span in spans[len(spans) - num_canvases :]:
            span.capture_layers = self.hidden
        scores = yield score_of(sequence, TARGET, spans, num_canvases, wanted, canvas.shift)
        self._note(canvas, spans, "verify" if canvases is not None else "")
        count = len(wanted)
        parts = [range(number * count, (number + 1) * count) for number in range(num_canvases)]
        return [self.predictions(sequence, canvas, scores, rows) for rows in parts]

    def predictions(
        self, sequence: Sequence, canvas: Canvas, scores: Scores, rows: range | None = None
    ) -> Predictions:
        """What `rows` of scores (default: all) say of one canvas."""
        sampler = _free(sequence.sampler)
        return Predictions(sequence, scores, sampler, canvas.step, canvas.mask, self.tempered, rows)

    def fill(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        """Choose, commit, cut, say."""
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.end(canvas, predictions))
            self.unmask.opened(canvas)
        assert canvas.block is not None
        if self.stop.fills(canvas, predictions):
            chosen = canvas.masks[[position in predictions for position in canvas.masks]]
        else:
            chosen = self.choose(canvas, predictions, canvas.masked(*canvas.block))
        self.commit(sequence, canvas, predictions, chosen)

    def choose(self, canvas: Canvas, predictions: Predictions, positions: np.ndarray) -> np.ndarray:
        """The masks among `positions` that get their tokens now, ascending; at least one."""
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
        **facts: Any,
    ) -> None:
        """Write the tokens of `chosen`, close the block where it is full, and say what is certain.
        `facts` go into the trace."""
        if sequence.sampler.stateful:
            chosen, tokens = self._in_order(sequence, canvas, predictions, chosen)
        else:
            tokens = predictions.tokens(chosen).tolist()
            self._annotate(sequence, canvas, predictions, chosen, tokens, predictions.sampler)
        sure = [
            predictions.probability_drawn(position, token)
            for position, token in zip(chosen, tokens, strict=True)
        ]
        canvas.commit(chosen, tokens, sure)
        self.settle(sequence, canvas, predictions, chosen, **facts)

    def settle(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        chosen: Iterable[int],
        **facts: Any,
    ) -> None:
        """What follows a commit."""
        cut = self.stop.cut(canvas, predictions)
        if cut is not None:
            canvas.truncate(cut)
            context = sequence.context()
            if context.length > cut:
                context.truncate(cut)
        canvas.step += 1
        canvas.block_step += 1
        if canvas.block is not None and self.blocks.closes(canvas):
            canvas.block = None
        self.say(sequence, canvas, chosen, **facts)

    def say(self, sequence: Sequence, canvas: Canvas, chosen: Iterable[int], **facts: Any) -> None:
        """Emit what stands before the first mask."""
        first, stop = sequence.length, canvas.frontier
        said = canvas.tokens[first:stop].tolist()
        sequence.record(
            TokenTree(),
            (),
            said,
            method="diffusion",
            canvas=[-1 if token == canvas.mask else token for token in self._shown(canvas)],
            start=canvas.memory["start"],
            filled=[int(position) for position in chosen],
            meter=canvas.meter.to_dict(),
            **facts,
        )
        notes = [canvas.notes.pop(position, None) for position in range(first, stop)]
        sequence.emit(said, notes=notes if sequence.annotate is not None else None)

    def embeddings(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> torch.Tensor | None:
        """float32 `[len(positions), hidden_size]` in place of the tokens there, or None."""
        return None

    def canvas(self, sequence: Sequence) -> Canvas:
        """The canvas of this text: where it was left, or a new one."""
        canvas: Canvas | None = sequence.state.get("canvas")
        if canvas is None:
            mask = sequence.mask_token if self.mask is None else self.mask
            pool = sequence.context().pool
            spec = pool.model.spec
            assert mask is not None
            if not 0 <= mask < spec.vocab_size:
                raise InvalidRequestError(
                    f"the mask token {mask} is not in the vocabulary of {spec.vocab_size}"
                )
            canvas = Canvas(
                np.array(sequence.all_tokens, np.int32),
                mask,
                shift=spec.logit_shift,
                size=self.cache.size(spec),
                limit=min(pool.num_slots, spec.max_positions),
            )
            self.blocks.fits(canvas)
            canvas.memory["start"] = len(sequence.prompt)
            self.begin(sequence, canvas)
            sequence.state["canvas"] = canvas
        return canvas

    def begin(self, sequence: Sequence, canvas: Canvas) -> None:
        """Put the first masks on a new canvas; the place for priors."""
        template = sequence.root.state.get("template")
        if template is None:
            canvas.extend(self._masks(sequence, canvas))
            return
        behind = template[len(sequence.tokens) :]
        canvas.extend(len(behind))
        first = len(canvas) - len(behind)
        for position, token in enumerate(behind, first):
            if token != canvas.mask:
                canvas.fix(position, token)
        canvas.whole = True
        if canvas.shift and canvas.frontier < canvas.shift:
            raise InvalidRequestError("this model cannot fill the first position of a text")

    def _masks(self, sequence: Sequence, canvas: Canvas) -> int:
        """How many masks come next: whole blocks, where the model has blocks."""
        room = sequence.remaining
        stop = len(canvas) + min(room, self.length or room)
        if canvas.size:
            stop = min(-(-stop // canvas.size) * canvas.size, max(stop, canvas.limit))
        return stop - len(canvas)

    def _note(self, canvas: Canvas, spans: Seq[Any], kind: str) -> None:
        """Keep account of a pass that has run."""
        computed = sum(len(span) for span in spans)
        canvas.meter.note(kind or ("full" if computed >= len(canvas) else "slice"), computed)
        if not self.cache.replays:
            return
        for span in spans:
            if isinstance(span, CanvasSpan) and span.keep:
                if len(span.positions) == span.context.length:  # everything that is kept
                    canvas.kept = []
                tokens = np.array(span.tokens, np.int32)
                canvas.kept.append((span.positions, tokens, span.visible))

    def _in_order(
        self, sequence: Sequence, canvas: Canvas, predictions: Predictions, chosen: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """The tokens of a policy with a memory, from the left, as far as they were chosen."""
        state = sequence.sampler.fork()
        wanted = {int(position) for position in chosen}
        positions: list[int] = []
        tokens: list[int] = []
        ended = False
        for position in range(sequence.length, len(canvas)):
            token = int(canvas.tokens[position])
            if canvas.committed[position] != MASKED:
                _check(state, position, token)
            elif ended or position not in predictions or (positions and position not in wanted):
                break
            else:
                token = predictions.draw(state, position)
                self._annotate(sequence, canvas, predictions, [position], [token], state)
                positions.append(position)
                tokens.append(token)
                ended = token != predictions.token(position)
            state.advance(token)
        return np.array(positions, np.int64), tokens

    @staticmethod
    def _annotate(
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: Iterable[int],
        tokens: Iterable[int],
        sampler: Sampler,
    ) -> None:
        if sequence.annotate is not None:
            for position, token in zip(positions, tokens, strict=True):
                canvas.notes[int(position)] = sequence.annotate(
                    predictions.logits(position), token, sampler
                )

    @staticmethod
    def _shown(canvas: Canvas) -> list[int]:
        shown: list[int] = canvas.tokens[canvas.memory["start"] :].tolist()
        return shown


def _free(sampler: Sampler) -> Sampler:
    """`policy` without what depends on the text said so far."""
    if not sampler.stateful:
        return sampler
    before = [part for part in sampler.pre_temperature if not part.stateful]
    after = [part for part in sampler.post_temperature if not part.stateful]
    return Sampler(sampler.temperature, before, after)


def _check(sampler: Sampler, position: int, token: int) -> None:
    """Refuse a canvas whose fixed tokens the constraint forbids."""
    part = constraint_of(sampler)
    mask = None if part is None else part.state.mask()
    if mask is None:
        return
    allowed = token < len(mask) and mask[token] if mask.dtype == np.bool_ else token in mask
    if not allowed:
        raise ConstraintError(
            f"the canvas cannot satisfy the constraint any more: token {token} is fixed at"
            f" position {position}"
        )
