"""Masks are fed the mixture of tokens they are likely to become (Zhu et al., "Latent Refinement
Decoding: Enhancing Diffusion-Based Language Models by Refining Belief States", arXiv:2510.11052).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from anydecode.catalogue import Card, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.stops import StopRule
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence

#: Refinement passes per block at most.
MOST_REFINEMENTS = 20
#: Beliefs this close to nothing are held to be this.
_TINY = 1e-12


class LatentDenoiser(Denoiser):
    """First refines without committing until beliefs settle, then fills the mask of least entropy
    per pass. Beliefs are in `canvas.memory["beliefs"]`: float64 `[vocab_size]` by position."""

    mixture = 0.15
    nucleus = 0.9
    settled = 0.1

    def fill(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.end(canvas, predictions))
            canvas.memory["beliefs"], canvas.memory["refined"] = {}, 0
        assert canvas.block is not None
        positions = canvas.masked(*canvas.block)
        before = canvas.memory["beliefs"]
        now = {int(position): predictions.probabilities(position) for position in positions}
        canvas.memory["beliefs"] = now
        moved = math.inf
        if before:
            moved = float(np.mean([divergence(before[int(p)], now[int(p)]) for p in positions]))
        refined = canvas.memory["refined"]
        if refined is not None:
            if moved >= self.settled and refined < MOST_REFINEMENTS:
                canvas.memory["refined"] = refined + 1
                canvas.step += 1
                self.say(sequence, canvas, ())
                return
            canvas.memory["refined"] = None
            chosen = self.choose(canvas, predictions, positions)
        else:
            chosen = (
                positions if moved < self.settled else self.choose(canvas, predictions, positions)
            )
        self.commit(sequence, canvas, predictions, chosen)

    def embeddings(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> torch.Tensor | None:
        beliefs = canvas.memory.get("beliefs") if canvas.block is not None else None
        if not beliefs:
            return None
        model: Any = sequence.context().pool.model
        inputs: torch.Tensor = model.embed(canvas.tokens[positions]).clone()
        for row, position in enumerate(positions.tolist()):
            if position in beliefs and canvas.tokens[position] == canvas.mask:
                tokens, weights, mix = self.soft(beliefs[position])
                words = torch.from_numpy(weights.astype(np.float32)) @ model.embed(
                    tokens.astype(np.int32)
                )
                inputs[row] = (1 - mix) * inputs[row] + mix * words
        return inputs

    def soft(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The tokens of the nucleus, their renormalised probabilities, and the mixture's weight:
        `mixture` (1 - H / log V)."""
        order = np.argsort(-p, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), self.nucleus)) + 1
        tokens = order[:count]
        likely = p[p > 0]
        entropy = -float((likely * np.log(likely)).sum())
        weight = self.mixture * (1 - entropy / math.log(len(p)))
        return tokens, p[tokens] / p[tokens].sum(), weight


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) in nats."""
    kept = p > 0
    return float((p[kept] * np.log(p[kept] / np.maximum(q[kept], _TINY))).sum())


@register(
    Card(
        "lrd",
        "diffusion",
        paper="Latent Refinement Decoding (arXiv:2510.11052)",
        exactness="lossy",
        summary="Masks carry beliefs; passes refine them before words are fixed.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "embeddings are mixed as they are, without bringing norms together",
            "beliefs are those of the block; other blocks stay plain masks",
            "tokens are drawn by the request's policy; the paper is greedy",
        ),
    )
)
def lrd(
    mixture: float = 0.15,
    nucleus: float = 0.9,
    settled: float = 0.1,
    block: int | None = None,
    mask: int | None = None,
) -> Denoiser:
    """A mask's input is (1 - a) [MASK] + a (mean embedding of its `nucleus`), a = `mixture` times
    one less its normalised entropy. Below a mean divergence of `settled` nats between passes,
    refinement ends, and later the whole block is filled."""
    if not 0 <= mixture < 1 or not 0 < nucleus <= 1:
        raise InvalidRequestError("lrd needs 0 <= mixture < 1 and 0 < nucleus <= 1")
    made = LatentDenoiser(
        FixedBlocks(block), Entropy(), ThresholdUnmasking(math.inf), stop=StopRule(), mask=mask
    )
    made.mixture, made.nucleus, made.settled = mixture, nucleus, settled
    return made
