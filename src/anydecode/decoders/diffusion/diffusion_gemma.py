"""DiffusionGemma's decoding (Google DeepMind, "DiffusionGemma", 2026): entropy-bounded renoising.

The canvas holds random tokens. Each step samples every position at a temperature that falls with
the steps, accepts the positions of lowest entropy as long as the entropies before them sum up to at
most a bound, and draws all others anew at random. Acceptance is decided afresh in every step.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.diffusion.blocks import LargestBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.named_caches import REVISING_CACHES, REVISING_WORDS
from anydecode.decoders.diffusion.named_caches import cache as cache_named
from anydecode.decoders.diffusion.predictions import Predictions, RowStatistics
from anydecode.decoders.diffusion.uniform import STATEFUL, UniformDenoiser
from anydecode.decoders.diffusion.unmasking import check_steps
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.sequence import Sequence

#: In `Canvas.policy_state`: the likeliest tokens of the last steps, by position.
_HISTORY = "diffusion-gemma history"


class EntropyBoundedRenoising(UniformDenoiser):
    """Renoises all positions but those accepted within `bound` nats."""

    bound = 0.1
    first_temperature, last_temperature = 0.8, 0.4
    stable = 1
    settled = 0.005

    def on_opened(self, canvas: Canvas) -> None:
        canvas.policy_state[_HISTORY] = []

    def denoise(
        self,
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        is_last: bool,
    ) -> tuple[np.ndarray, bool]:
        sampler = Sampler(self._temperature(canvas), predictions.sampler.pre_temperature)
        rows = [sampler.distribution(predictions.logits(position)) for position in positions]
        statistics = [RowStatistics(row.scores, row.tokens) for row in rows]
        entropies = np.array([row.entropy for row in statistics])
        best = np.array([row.best for row in statistics])
        size = len(predictions.logits(positions[0]))
        self.predicted(sequence, canvas, positions, (row.dense(size) for row in rows))
        history: list[list[int]] = canvas.policy_state[_HISTORY]
        is_stable = len(history) >= self.stable and all(
            past == best.tolist() for past in history[len(history) - self.stable :]
        )
        if is_last or (is_stable and entropies.mean() < self.settled):
            return best, True
        canvas.policy_state[_HISTORY] = [*history, best.tolist()][-max(1, self.stable) :]
        order = np.argsort(entropies, kind="stable")
        is_accepted = np.zeros(len(positions), bool)
        is_accepted[order] = np.cumsum(entropies[order]) - entropies[order] <= self.bound
        tokens = [
            predictions.draw(sampler, position)
            if accepted
            else self.noise(sequence, canvas, int(position))
            for position, accepted in zip(positions, is_accepted, strict=True)
        ]
        return np.array(tokens), False

    def _temperature(self, canvas: Canvas) -> float:
        remaining = self.num_steps(canvas) - canvas.block_step
        share = remaining / self.num_steps(canvas)
        return self.last_temperature + (self.first_temperature - self.last_temperature) * share


@register(
    Card(
        "diffusion-gemma",
        "diffusion",
        paper="DiffusionGemma (Google DeepMind, 2026)",
        exactness="lossy",
        summary="Accepts positions within an entropy bound in every step; draws the others anew.",
        needs=("uniform-state diffusion model",),
        works_with=("batches", "samplers", "constraints", "streaming", "infilling"),
        deviations=(
            "the temperature of the request has no effect: the method has its own schedule",
            "noise is any token but the mask token",
            "the input of the model's last distribution (self-conditioning) is computed where the"
            " model has the weights for it; it is left out with constraints and other stateful"
            " samplers",
            STATEFUL,
        ),
        bounds={"first_temperature": Range(0, 10), "last_temperature": Range(0, 10)},
        remote={
            "steps": Range(1, 4096),
            "bound": Range(0, 1000),
            "first_temperature": Range(0, 10),
            "last_temperature": Range(0, 10),
            "stable": Range(0, 64),
            "settled": Range(0, 1000),
            "block": Range(0, 4096),
            "cache": REVISING_WORDS,
        },
    )
)
def diffusion_gemma(
    steps: int = 48,
    bound: float = 0.1,
    first_temperature: float = 0.8,
    last_temperature: float = 0.4,
    stable: int = 1,
    settled: float = 0.005,
    block: int = 256,
    cache: str = "none",
    mask: int | None = None,
) -> EntropyBoundedRenoising:
    """Denoises random tokens, and draws those anew of which the model is not sure.

    The default decoder of a model has the settings of its files (`generation_config.json`, or
    `diffusion.eb_*` in a GGUF file).

    Args:
        steps: The largest number of steps per block.
        bound: Positions are accepted from the lowest entropy on, as long as the entropies before
            them sum up to at most this, in nats; the first one always.
        first_temperature: The temperature before the first step.
        last_temperature: The temperature after the last step; it falls evenly.
        stable: A block is finished early if its likeliest tokens are those of so many steps before,
            and their mean entropy is below `settled`.
        settled: This entropy, in nats.
        block: Positions per block (0: the whole canvas); the model's own blocks take its place, and
            a canvas may be shorter.
        cache: "none", "prefix", "dual", "vicinity" or, with a model that has blocks, "block".
        mask: A token that is neither noise nor predicted (default: the tokenizer's mask token).
    """
    check_steps(steps)
    if min(bound, first_temperature, last_temperature, stable, settled) < 0:
        raise InvalidRequestError(
            "bound, first_temperature, last_temperature, stable and settled must be 0 or more, not"
            f" {bound}, {first_temperature}, {last_temperature}, {stable} and {settled}"
        )
    policy = cache_named(cache, REVISING_CACHES)
    decoder = EntropyBoundedRenoising(LargestBlocks(block), cache=policy, mask=mask)
    decoder.steps, decoder.bound, decoder.stable = steps, bound, stable
    decoder.first_temperature, decoder.last_temperature = first_temperature, last_temperature
    decoder.settled = settled
    return decoder
