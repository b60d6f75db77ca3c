"""S2D2 (Han et al., "S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation",
arXiv:2603.25702).

A block-diffusion model drafts the tokens of a block in one pass. If a router expects it to
save passes, a second pass with block size 1 verifies them from the left by speculative sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Confidence
from anydecode.decoders.diffusion.sdar import BlockSchedule
from anydecode.decoders.diffusion.sub_blocks import SeededCache, is_first_of_block, shift_of_rows
from anydecode.decoders.diffusion.unmasking import ThresholdOrSchedule
from anydecode.decoders.framework.canvas_spans import CausalSpan, causal_span, score_canvas
from anydecode.decoders.framework.rejection import rejection_steps
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import Rows
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.span import ChainSpan, Span

ROUTERS = ("score", "always", "never", "span", "hysteresis", "bandit")
#: The margin above which the "hard" estimate counts a draft as accepted.
MARGIN = 0.05
#: In `Canvas.policy_state`: whether hysteresis is on; of the bandit, per action and context, the
#: number of decisions and the sum of their rewards.
_IS_ON, _BANDIT = "s2d2", "s2d2 bandit"
#: Parts into which the bandit divides the length of the run, the progress of the block and the mean
#: entropy.
_BINS = 2


class VerifiedBlocks(FixedBlocks):
    """`FixedBlocks`; with shifted logits, and behind a context that predicts next tokens, the first
    position of a block is a block of its own, as the row before the block predicts it."""

    def window_end(self, canvas: Canvas) -> int:
        first = canvas.frontier
        return first + 1 if is_first_of_block(canvas, first) else super().window_end(canvas)

    def logit_shift(self, canvas: Canvas) -> int:
        return shift_of_rows(canvas)


@dataclass(eq=False)
class TwoStreamSpan(CausalSpan):
    """Two streams over a drafted block: first the drafted tokens, then masks.

    Each row of the first stream sees the cache and the rows up to itself. The second stream has
    masks at the last positions of the block; each sees the cache, the drafted tokens before its
    position, and itself.

    Attributes:
        masks: The number of masks in the second stream.
    """

    masks: int = 0

    def write_rows(self, rows: Rows, at: int, count: int) -> None:
        assert self._slots is not None
        super().write_rows(rows, at, count)
        num_drafted = count - self.masks
        offset = len(rows.tails)
        tails: list[np.ndarray] = [rows.tails]
        for number in range(self.masks):
            row = num_drafted + number
            tail = np.append(self._slots[: num_drafted - self.masks + number], self._slots[row])
            rows.tail_start[at + row], rows.tail_length[at + row] = offset, len(tail)
            offset += len(tail)
            tails.append(tail)
        rows.tails = np.concatenate(tails)


class CausalBlockCache(SeededCache):
    """`SeededCache` that keeps finished blocks as causal rows, as the verification does."""

    def leading_spans(
        self, canvas: Canvas, kv_cache: SequenceCache, region: tuple[int, int], opens_block: bool
    ) -> list[Span]:
        stop = canvas.block_start(region[0])
        new_tokens = canvas.tokens[kv_cache.length : stop].tolist()
        num_layers = kv_cache.pool.model.spec.num_layers
        return [ChainSpan(kv_cache, new_tokens, 0, num_layers)] if new_tokens else []


class SelfVerified(Denoiser):
    """Drafts the block in one pass; if the router decides so, a second pass verifies the first
    contiguous run of masks from the left, by speculative sampling."""

    router = "score"
    cost = 1.0
    min_score = 0.0
    complete = True
    estimate = "soft"
    is_dynamic = False
    threshold = 0.85

    def step(self, sequence: Sequence, canvas: Canvas) -> Decoding:
        [predictions] = yield from self.forward(sequence, canvas)
        if sequence.sampler.is_stateful:
            self.unmask_step(sequence, canvas, predictions)
            return
        block = canvas.block or (canvas.frontier, self.blocks.block_end(canvas, predictions))
        if is_first_of_block(canvas, block[0]):
            self.unmask_step(sequence, canvas, predictions)
            return
        masks = canvas.masked(*block)
        run = masks[masks - masks[0] == np.arange(len(masks))]
        num_committed = canvas.meter.committed
        context = self._context(canvas, predictions, run, block)
        verifies = self.verifies(canvas, predictions, run, masks, context)
        if not verifies:
            self.unmask_step(sequence, canvas, predictions)
            self._record(canvas, context, False, canvas.meter.committed - num_committed)
            return
        predictions.keep()
        tokens = predictions.tokens(run)
        kv_cache = sequence.kv_cache()
        start, stop = canvas.block_start(int(run[0])), int(run[-1]) + 1
        drafted_tokens = canvas.copy_tokens(run, tokens)[start:stop]
        span: CausalSpan
        if canvas.logit_shift:  # rows of drafted tokens predict what follows them
            span = causal_span(kv_cache, np.arange(start, stop - 1), drafted_tokens[:-1])
        else:
            inputs = np.concatenate([drafted_tokens, np.full(len(run), canvas.mask, np.int32)])
            span = TwoStreamSpan(
                kv_cache,
                inputs.tolist(),
                0,
                kv_cache.pool.model.spec.num_layers,
                positions=np.concatenate([np.arange(start, stop), run]).astype(np.int32),
                masks=len(run),
            )
        scores = yield score_canvas(sequence, TARGET, [span], 1, run, canvas.logit_shift)
        self._record_pass(canvas, [span], "verify")
        verification = Predictions(
            sequence,
            scores,
            predictions.sampler,
            canvas.step,
            canvas.mask,
            banned=self.banned(sequence, canvas),
        )
        accepted = self.verified(sequence, predictions, verification, run, tokens)
        if canvas.block is None:
            canvas.open(*block)
            self.unmask.on_block_opened(canvas)
        done = run[: len(accepted)]
        self.write(sequence, canvas, verification, done, accepted, canvas.commit)
        assert isinstance(self.unmask, ThresholdOrSchedule)
        num_missing = self.unmask.schedule.quota(canvas) - len(accepted)
        remaining = canvas.masked(*block)
        if self.complete and num_missing > 0 and len(remaining):
            order = np.argsort(-self.ranking.rank(canvas, predictions, remaining), kind="stable")
            more = np.sort(remaining[order[:num_missing]])
            chosen = predictions.tokens(more).tolist()
            self.write(sequence, canvas, predictions, more, chosen, canvas.commit)
            done = np.union1d(done, more)
        self._record(canvas, context, True, canvas.meter.committed - num_committed)
        self.finish_step(sequence, canvas, predictions, done, verified=len(accepted))

    def verifies(
        self,
        canvas: Canvas,
        predictions: Predictions,
        run: np.ndarray,
        masks: np.ndarray,
        context: int,
    ) -> bool:
        """The router: whether verifying `run` is expected to be worth a pass.

        Args:
            canvas: The canvas.
            predictions: The predictions of the block.
            run: The positions of the first contiguous run of masks, ascending.
            masks: All masks of the block.
            context: The bandit's context.
        """
        if self.router in ("always", "never"):
            return self.router == "always"
        if self.router == "span":
            return len(run) >= self.min_score
        if self.router == "bandit":
            return self._bandit_verifies(canvas, context)
        cost = self.cost
        if self.is_dynamic:
            cost *= int((predictions.confidence(masks) > self.threshold).sum())
        score = float(np.cumprod(self.acceptance(predictions, run)).sum()) - cost
        if self.router == "score":
            return score >= self.min_score
        return score >= 1.0 or (score > -5.0 and canvas.policy_state.get(_IS_ON, False))

    def acceptance(self, predictions: Predictions, run: np.ndarray) -> np.ndarray:
        """The estimated probability that each draft of `run` is accepted, float64 `[run]`."""
        if self.estimate == "hard":
            return (predictions.margins(run) > MARGIN).astype(np.float64)
        normalized = predictions.entropies(run) / math.log(len(predictions.logits(run[0])))
        result: np.ndarray = np.exp(-normalized)
        return result

    def _context(
        self, canvas: Canvas, predictions: Predictions, run: np.ndarray, block: tuple[int, int]
    ) -> int:
        """The bandit's context: bins of the run's length, the block's progress, the entropy."""
        if self.router != "bandit":
            return 0
        size = block[1] - block[0]
        entropy = predictions.entropies(run).mean() / math.log(len(predictions.logits(run[0])))
        shares = (
            (len(run) - 1) / max(1, size - 1),
            1 - len(canvas.masked(*block)) / size,
            float(entropy),
        )
        context = 0
        for share in shares:
            context = context * _BINS + min(_BINS - 1, int(share * _BINS))
        return context

    def _bandit_verifies(self, canvas: Canvas, context: int) -> bool:
        """Upper confidence bounds (UCB1) of the tokens per pass of both actions in this context."""
        counts, rewards = canvas.policy_state.get(_BANDIT, _no_decisions())
        decision = 1 + int(counts.sum())
        bounds = [math.inf, math.inf]
        for action in (0, 1):
            count = counts[action, context]
            if count:
                mean = rewards[action, context] / count
                bounds[action] = mean + math.sqrt(math.log(decision) / count)
        return bounds[1] >= bounds[0]

    def _record(self, canvas: Canvas, context: int, verified: bool, num_tokens: int) -> None:
        """Keep what the router learns from a step, which has changed the canvas."""
        canvas.policy_state[_IS_ON] = verified
        if self.router == "bandit":
            counts, rewards = (
                one.copy() for one in canvas.policy_state.get(_BANDIT, _no_decisions())
            )
            counts[int(verified), context] += 1
            rewards[int(verified), context] += num_tokens / (1 + verified)
            canvas.policy_state[_BANDIT] = counts, rewards

    @staticmethod
    def verified(
        sequence: Sequence,
        predictions: Predictions,
        verification: Predictions,
        run: np.ndarray,
        drafts: np.ndarray,
    ) -> list[int]:
        """The accepted draft tokens, then the token sampled in place of the first rejected one."""
        coins = sequence.noise.with_purpose("coin")
        residual = sequence.noise.with_purpose("residual")
        tokens: list[int] = []
        for position, draft in zip(run.tolist(), drafts.tolist(), strict=True):
            rows = [predictions.logits(position), verification.logits(position)]
            draft_distribution, target_distribution = (
                predictions.sampler.distribution(row).dense(len(row)) for row in rows
            )
            acceptance_probability, residual_distribution = next(
                rejection_steps(target_distribution, draft_distribution, "iid", [draft])
            )
            if coins.coin(position, predictions.step) < acceptance_probability:
                tokens.append(draft)
                continue
            support = np.flatnonzero(residual_distribution)
            keys = np.log(residual_distribution[support]) + residual.gumbel(
                support, position, predictions.step
            )
            tokens.append(int(support[keys.argmax()]))
            break
        return tokens


def _no_decisions() -> tuple[np.ndarray, np.ndarray]:
    """The bandit's counts and rewards before its first decision, `[2, contexts]` each."""
    return np.zeros((2, _BINS**3), np.int64), np.zeros((2, _BINS**3))


@register(
    Card(
        "s2d2",
        "diffusion",
        paper="S2D2 (arXiv:2603.25702)",
        exactness="lossy",
        summary="Diffusion drafts a block; the same model verifies it autoregressively.",
        needs=("block-diffusion model",),
        works_with=("batches", "samplers", "streaming", "infilling"),
        deviations=(
            "router=always, complete=false and caching=causal reproduce the model's autoregressive"
            " mode: the same text when greedy, the same distribution at other temperatures",
            "with shifted logits, the first token of a block is predicted by the block before and"
            " not verified, as in the released code for Fast-dLLM v2; blocks have no sub-blocks",
            "with constraints and other stateful samplers, drafts are not verified",
        ),
        remote={
            "router": Words(ROUTERS),
            "cost": Range(-100, 100),
            "min_score": Range(-100, 100),
            "estimate": Words(("soft", "hard")),
            "caching": Words(("block", "causal")),
            "block": Range(1, 4096),
            "steps": Range(1, 4096),
            "threshold": Range(0, 1),
        },
    )
)
def s2d2(
    router: str = "score",
    cost: float = 1.0,
    min_score: float | None = None,
    complete: bool = True,
    estimate: str = "soft",
    dynamic: bool = False,
    caching: str = "block",
    block: int | None = None,
    steps: int | None = None,
    threshold: float = 0.85,
    mask: int | None = None,
) -> Denoiser:
    """Denoises as `sdar`, and verifies drafts autoregressively.

    Args:
        router: When to verify. "score": if the expected number of accepted tokens minus `cost` is
            at least `min_score`; "hysteresis": from a score of 1 on, until it falls to -5;
            "span": if at least `min_score` masks are contiguous; "bandit": as upper confidence
            bounds of the tokens per pass say (UCB1, by length of the run, progress and entropy);
            "always"; "never".
        cost: The cost of a verification, in tokens.
        min_score: The bound of "score" (default: 0) or "span" (default: 8).
        complete: If fewer tokens than the schedule's are accepted, also unmask the most confident
            masks.
        estimate: The estimated probability that a draft is accepted: exp(-normalized entropy)
            ("soft"), or 1 if its margin is above 0.05 ("hard").
        dynamic: Multiply `cost` by the number of masks above the threshold.
        caching: "block" keeps finished blocks as diffusion sees them, "causal" as the verification
            does.
        block: Positions per block (default: the model's own block size).
        steps: Denoising steps per block (default: one per position).
        threshold: The confidence threshold of the denoising.
        mask: The mask token (default: the tokenizer's).
    """
    if router not in ROUTERS:
        raise InvalidRequestError(
            f"router={router!r} is unknown; it must be one of {', '.join(ROUTERS)}"
        )
    if caching not in ("block", "causal"):
        raise InvalidRequestError(f"caching={caching!r} is unknown; it must be block or causal")
    if estimate not in ("soft", "hard"):
        raise InvalidRequestError(f"estimate={estimate!r} is unknown; it must be soft or hard")
    decoder = SelfVerified(
        VerifiedBlocks(block),
        Confidence(),
        ThresholdOrSchedule(threshold, BlockSchedule(steps)),
        SeededCache(block) if caching == "block" else CausalBlockCache(block),
        mask=mask,
        tempered=True,
    )
    decoder.router, decoder.cost, decoder.complete = router, cost, complete
    decoder.estimate, decoder.is_dynamic, decoder.threshold = estimate, dynamic, threshold
    decoder.min_score = (8.0 if router == "span" else 0.0) if min_score is None else min_score
    return decoder
