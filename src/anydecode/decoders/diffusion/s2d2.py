"""A block-diffusion model verifies its own drafts in its autoregressive mode (Han et al., "S2D2:
Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation", arXiv:2603.25702)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import BlockCausalCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.canvas_spans import CausalSpan, score_of
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.sdar import BlockSchedule
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule
from anydecode.decoders.speculative.rejection import ladder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import ChainSpan, Span

ROUTERS = ("score", "always", "never", "span", "hysteresis")


@dataclass(eq=False)
class TwoStreamSpan(CausalSpan):
    """The block as drafted, each row seeing the context and the rows up to itself; then masks at
    the last `masks` of those places, each seeing the drafted rows strictly before it, and itself.
    """

    masks: int = 0

    def fill(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        super().fill(rows, at, count)
        drafted = count - self.masks
        offset = len(rows.tails)
        tails: list[np.ndarray] = [rows.tails]
        for number in range(self.masks):
            row = drafted + number
            tail = np.append(self._slots[: drafted - self.masks + number], self._slots[row])
            rows.tail_start[at + row], rows.tail_length[at + row] = offset, len(tail)
            offset += len(tail)
            tails.append(tail)
        rows.tails = np.concatenate(tails)


class CausalBlocks(BlockCausalCache):
    """The same, but finished blocks are kept as causal rows: those of the verification."""

    def before(
        self, canvas: Canvas, context: SequenceCache, region: tuple[int, int], opening: bool
    ) -> list[Span]:
        assert canvas.size is not None
        stop = region[0] // canvas.size * canvas.size
        fresh = canvas.tokens[context.length : stop].tolist()
        return [ChainSpan(context, fresh, 0, context.pool.model.spec.num_layers)] if fresh else []


class SelfVerified(Denoiser):
    """One pass drafts the block; where the router says so, a second one verifies its first stretch
    of masks from the left, as speculative sampling does."""

    router = "score"
    cost = 1.0
    least = 0.0
    complete = True

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.stateful:
            self.fill(sequence, canvas, predictions)
            return
        block = canvas.block or (canvas.frontier, self.blocks.end(canvas, predictions))
        masks = canvas.masked(*block)
        stretch = masks[masks - masks[0] == np.arange(len(masks))]
        if not self.verifies(canvas, predictions, stretch):
            self.fill(sequence, canvas, predictions)
            return
        predictions.keep()
        tokens = predictions.tokens(stretch)
        context = sequence.context()
        assert canvas.size is not None
        start, stop = int(stretch[0]) // canvas.size * canvas.size, int(stretch[-1]) + 1
        positions = np.concatenate([np.arange(start, stop), stretch]).astype(np.int32)
        drafted = canvas.copy_tokens(stretch, tokens)[start:stop]
        inputs = np.concatenate([drafted, np.full(len(stretch), canvas.mask, np.int32)])
        span = TwoStreamSpan(
            context,
            inputs.tolist(),
            0,
            context.pool.model.spec.num_layers,
            positions=positions,
            masks=len(stretch),
        )
        scores = yield score_of(sequence, TARGET, [span], 1, stretch, 0)
        self._note(canvas, [span], "verify")
        verdict = Predictions(sequence, scores, predictions.sampler, canvas.step, canvas.mask)
        said = self.verified(sequence, predictions, verdict, stretch, tokens)
        if canvas.block is None:
            canvas.open(*block)
            self.unmask.opened(canvas)
        done = stretch[: len(said)]
        if sequence.annotate is not None:
            self._annotate(sequence, canvas, verdict, done, said, predictions.sampler)
        sure = [verdict.probability_drawn(*one) for one in zip(done, said, strict=True)]
        canvas.commit(done, said, sure)
        assert isinstance(self.unmask, ThresholdOrSchedule)
        missing = self.unmask.schedule.quota(canvas) - len(said)
        left = canvas.masked(*block)
        if self.complete and missing > 0 and len(left):
            order = np.argsort(-self.ranking.rank(canvas, predictions, left), kind="stable")
            more = np.sort(left[order[:missing]])
            if sequence.annotate is not None:
                chosen = predictions.tokens(more).tolist()
                self._annotate(sequence, canvas, predictions, more, chosen, predictions.sampler)
            canvas.commit(more, predictions.tokens(more), predictions.confidence(more))
            done = np.union1d(done, more)
        self.settle(sequence, canvas, predictions, done, verified=len(said))

    def verifies(self, canvas: Canvas, predictions: Predictions, stretch: np.ndarray) -> bool:
        """The router: whether verifying `stretch` is worth a pass."""
        if self.router in ("always", "never"):
            return self.router == "always"
        if self.router == "span":
            return len(stretch) >= self.least
        kept = 1.0
        expected = 0.0
        for entropy in predictions.entropies(stretch):
            kept *= math.exp(-entropy / math.log(len(predictions.logits(stretch[0]))))
            expected += kept
        score = expected - self.cost
        if self.router == "score":
            return score >= self.least
        on = score >= 1.0 or (score > -5.0 and canvas.memory.get("s2d2", False))
        canvas.memory["s2d2"] = on
        return on

    @staticmethod
    def verified(
        sequence: Sequence,
        predictions: Predictions,
        verdict: Predictions,
        stretch: np.ndarray,
        drafts: np.ndarray,
    ) -> list[int]:
        """The accepted drafts, and behind a rejected one the token drawn in its place."""
        coins = sequence.noise.with_purpose("coin")
        residual = sequence.noise.with_purpose("residual")
        said: list[int] = []
        for position, draft in zip(stretch.tolist(), drafts.tolist(), strict=True):
            rows = [predictions.logits(position), verdict.logits(position)]
            drawn, wanted = (predictions.sampler.distribution(row).dense(len(row)) for row in rows)
            chance, rest = next(ladder(wanted, drawn, "iid", [draft]))
            if coins.coin(position, predictions.step) < chance:
                said.append(draft)
                continue
            support = np.flatnonzero(rest)
            keys = np.log(rest[support]) + residual.gumbel(support, position, predictions.step)
            said.append(int(support[keys.argmax()]))
            break
        return said

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        if sequence.context().pool.model.spec.logit_shift:
            raise UnsupportedCombinationError(
                "s2d2 needs a block-diffusion model whose rows predict their own positions"
            )


@register(
    Card(
        "s2d2",
        "diffusion",
        paper="S2D2 (arXiv:2603.25702)",
        exactness="lossy",
        summary="Diffusion drafts a block, the same model read one token at a time verifies it.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "router=always, complete=false and caching=causal say what the model's autoregressive"
            " mode does: greedily the same text, at a temperature the same distribution",
            "no bandit router; the cost of a verification is the static one",
            "models whose rows predict the next position are refused",
            "constraints and other policies with a memory are not verified",
        ),
    )
)
def s2d2(
    router: str = "score",
    cost: float = 1.0,
    least: float | None = None,
    complete: bool = True,
    caching: str = "block",
    block: int | None = None,
    steps: int | None = None,
    threshold: float = 0.85,
    mask: int | None = None,
) -> Denoiser:
    """Denoises as `sdar` does. `router`: "score" verifies where the tokens expected to stand, less
    `cost`, are `least` (0) or more; "span", stretches of `least` (8) masks; "hysteresis" begins at
    1 and ends at -5; "always"; "never". `complete` adds sure tokens where fewer than the schedule's
    were accepted. `caching` "causal" keeps finished blocks as the verification sees them."""
    if router not in ROUTERS:
        raise InvalidRequestError(f"router is {', '.join(ROUTERS)}; not {router!r}")
    if caching not in ("block", "causal"):
        raise InvalidRequestError(f"caching is block or causal; {caching!r} is neither")
    made = SelfVerified(
        FixedBlocks(block),
        Confidence(),
        ThresholdOrSchedule(threshold, BlockSchedule(steps)),
        BlockCausalCache(block) if caching == "block" else CausalBlocks(block),
        mask=mask,
        tempered=True,
    )
    made.router, made.cost, made.complete = router, cost, complete
    made.least = (8.0 if router == "span" else 0.0) if least is None else least
    return made
