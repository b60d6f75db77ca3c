"""Latent refinement decoding (Zhu et al., "Latent Refinement Decoding: Enhancing Diffusion-Based
Language Models by Refining Belief States", arXiv:2510.11052).

The input of a mask is its embedding mixed with the embeddings of its likeliest tokens. Passes first
refine these mixtures until the predictions are stable; then masks are unmasked, lowest entropy
first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.named_caches import EMBEDDED_CACHES, EMBEDDED_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.rankings import Entropy
from anydecode.decoders.diffusion.unmasking import ThresholdUnmasking
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence

#: The largest number of refinement passes per block.
MAX_REFINEMENTS = 20
#: The smallest probability in the denominator of a divergence.
_MIN_PROBABILITY = 1e-12


class LatentDenoiser(Denoiser):
    """Refines predicted distributions without unmasking, then unmasks the mask of lowest entropy in
    each step.

    The distributions are in `canvas.policy_state["beliefs"]`: float64 `[vocab_size]` by position.
    """

    mixture = 0.15
    nucleus = 0.9
    settled = 0.1

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
            canvas.policy_state["beliefs"], canvas.policy_state["refined"] = {}, 0
        assert canvas.block is not None
        positions = canvas.masked(*canvas.block)
        previous = canvas.policy_state["beliefs"]
        current = {int(position): predictions.probabilities(position) for position in positions}
        canvas.policy_state["beliefs"] = current
        mean_divergence = math.inf
        if previous:
            mean_divergence = float(
                np.mean([divergence(previous[int(p)], current[int(p)]) for p in positions])
            )
        num_refined = canvas.policy_state["refined"]
        if num_refined is not None:
            if mean_divergence >= self.settled and num_refined < MAX_REFINEMENTS:
                canvas.policy_state["refined"] = num_refined + 1
                canvas.step += 1
                self.emit_prefix(sequence, canvas, ())
                return
            canvas.policy_state["refined"] = None
            chosen = self.choose(canvas, predictions, positions)
        else:
            chosen = (
                positions
                if mean_divergence < self.settled
                else self.choose(canvas, predictions, positions)
            )
        self.commit(sequence, canvas, predictions, chosen)

    def embeddings(
        self, sequence: Sequence, canvas: Canvas, positions: np.ndarray
    ) -> np.ndarray | None:
        beliefs = canvas.policy_state.get("beliefs") if canvas.block is not None else None
        if not beliefs:
            return None
        model: Any = sequence.model()
        inputs: np.ndarray = model.embed(canvas.tokens[positions])
        for row, position in enumerate(positions.tolist()):
            if position in beliefs and canvas.tokens[position] == canvas.mask:
                tokens, weights, mix = self.soft(beliefs[position])
                mean_embedding = weights.astype(np.float32) @ model.embed(tokens.astype(np.int32))
                inputs[row] = (1 - mix) * inputs[row] + mix * mean_embedding
        return inputs

    def soft(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The mixture that is fed to a mask with the distribution `p`, float64 `[vocab_size]`.

        Returns:
            The tokens of the nucleus, their renormalized probabilities, and the weight of the
            mixture: `mixture * (1 - entropy / log(vocab_size))`.
        """
        order = np.argsort(-p, kind="stable")
        count = int(np.searchsorted(np.cumsum(p[order]), self.nucleus)) + 1
        tokens = order[:count]
        positive = p[p > 0]
        entropy = -float((positive * np.log(positive)).sum())
        weight = self.mixture * (1 - entropy / math.log(len(p)))
        return tokens, p[tokens] / p[tokens].sum(), weight


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) in nats."""
    support = p > 0
    return float((p[support] * np.log(p[support] / np.maximum(q[support], _MIN_PROBABILITY))).sum())


@register(
    Card(
        "lrd",
        "diffusion",
        paper="Latent Refinement Decoding (arXiv:2510.11052)",
        exactness="lossy",
        summary="Feeds masks a mixture of likely tokens; refines it before masks are unmasked.",
        needs=("diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "embeddings are mixed without normalization",
            "only masks of the current block are mixed; those of other blocks stay plain masks",
            "tokens are sampled by the request's sampler; the paper's decoding is greedy",
        ),
        remote={
            "mixture": Range(0, 1),
            "nucleus": Range(0, 1),
            "settled": Range(0, 100),
            "block": Range(0, 4096),
            "cache": EMBEDDED_WORDS,
        },
    )
)
def lrd(
    mixture: float = 0.15,
    nucleus: float = 0.9,
    settled: float = 0.1,
    block: int | None = None,
    cache: str = "none",
    mask: int | None = None,
) -> Denoiser:
    """Denoises with refined inputs of masks.

    The input of a mask is (1 - a) times the mask's embedding plus a times the mean embedding of its
    nucleus, where a is `mixture * (1 - normalized entropy)`.

    Args:
        mixture: The largest weight a of the nucleus, below 1.
        nucleus: The probability mass of the nucleus.
        settled: If the mean divergence between two passes is below this, in nats, refinement ends;
            later, the whole block is unmasked.
        block: Positions per block (0: the whole canvas; default: up to 32).
        cache: "none", "prefix", "dual", "vicinity", "window" or, with a model that has blocks,
            "block".
        mask: The mask token (default: the tokenizer's).
    """
    if not 0 <= mixture < 1 or not 0 < nucleus <= 1:
        raise InvalidRequestError(
            f"lrd needs 0 <= mixture < 1 and 0 < nucleus <= 1, not mixture={mixture},"
            f" nucleus={nucleus}"
        )
    decoder = LatentDenoiser(
        FixedBlocks(block),
        Entropy(),
        ThresholdUnmasking(math.inf),
        cache_named(cache, EMBEDDED_CACHES),
        mask=mask,
    )
    decoder.mixture, decoder.nucleus, decoder.settled = mixture, nucleus, settled
    return decoder
