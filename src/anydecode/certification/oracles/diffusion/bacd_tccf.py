"""Oracle test of bacd-tccf (arXiv:2602.09555): a threshold that follows the block's mean
confidence, and blocks that are smaller after the marker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    DigestCache,
    StepState,
    UnmaskingRule,
    bidirectional,
    digests,
    softmax,
    steps,
)
from anydecode.certification.oracles.diffusion.scripted_denoising import same_steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import EOS, MASK


@oracle_test("bacd-tccf")
def bacd_tccf() -> Iterator[Check]:
    """The threshold is the block's mean confidence within bounds; blocks shrink after the
    marker."""

    def rule_within(low: float, high: float) -> UnmaskingRule:
        def rule(state: StepState) -> list[int]:
            confidences: list[float] = state.memory.setdefault("confidences", [])
            if state.block_step == 0:
                confidences.clear()
            level = (
                float(np.mean(confidences))
                if confidences
                else max(state.max_probability(i) for i in state.probabilities)
            )
            chosen = [
                i
                for i in state.probabilities
                if state.max_probability(i) >= min(max(level, low), high)
            ] or state.order()[:1]
            confidences += [state.max_probability(i) for i in chosen]
            return chosen

        return rule

    def growing(path: tuple[int, ...]) -> np.ndarray:
        """Confidences from 0.4 that grow with the number of filled positions."""
        *seen, position = path
        row = np.zeros(259, np.float32)
        filled = sum(token != MASK for token in seen)
        row[97 + position % 20] = 4.5 + 0.2 * filled + 0.01 * (position % 7)
        row[EOS] = -30.0
        return row

    for low, high, script in ((0.3, 0.8, CONFIDENT), (0.1, 0.95, growing)):
        decoder = f"bacd-tccf:low={low},high={high},coarse=12"
        name = f"the threshold follows the block's confidence between {low} and {high}"
        yield same_steps(name, decoder, rule_within(low, high), script=script)

    def marked(path: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(259, np.float32)
        row[(ord("#") if path[-1] == 9 else ord("a"))] = 9.0
        row[EOS] = -30.0
        return row

    with bidirectional(marked) as llm:
        decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#")
        filled = steps(llm, decoder, 14)[1]
    yield Check("blocks are smaller after the marker", [len(f) for f in filled] == [8, 2, 2, 2])
    yield from _block_cache()


def _block_cache() -> Iterator[Check]:
    """With cache=block, rows see whole blocks of both phases, and finished blocks stay cached."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        row = CONFIDENT(path).copy()
        row[ord("#")] = 60.0 if path[-1] == 9 else -30.0
        return row

    for prompt in ((5, 6, 7), tuple(range(30, 38))):
        ends = [8, 16, *range(18, 40, 2)]  # the marker is in the second block

        def num_visible(position: int, ends: list[int] = ends) -> int:
            return next(end for end in ends if end > position)

        cache, canvas = DigestCache(script), [*prompt]
        filled: list[list[int]] = []
        while len(canvas) < len(prompt) + 20:
            stop = num_visible(len(canvas))
            block = range(max([0, *(end for end in ends if end <= len(canvas))]), stop)
            for start in [0, *ends]:  # the finished blocks, each once more without masks
                if len(cache.tokens) == start < block.start:
                    cache.forward(
                        canvas, range(start, num_visible(start)), True, num_visible=num_visible
                    )
            canvas += [MASK] * (stop - len(canvas))
            held: list[float] = []
            while masks := [i for i in block if canvas[i] == MASK]:
                rows = cache.forward(canvas, block, False, num_visible=num_visible)
                p = {i: softmax(rows[i]) for i in masks}
                level = float(np.mean(held)) if held else max(float(p[i].max()) for i in masks)
                best = max(masks, key=lambda i: (p[i].max(), -i))
                chosen = [i for i in masks if p[i].max() >= min(max(level, 0.6), 0.9)] or [best]
                for i in chosen:
                    canvas[i] = int(p[i].argmax())
                held += [float(p[i].max()) for i in chosen]
                filled.append(chosen)
        with digests(script) as llm:
            decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#", cache="block")
            tokens, actual = steps(llm, decoder, 20, prompt=prompt)
        expected = canvas[len(prompt) : len(prompt) + 20]
        same = tokens == expected and actual == filled[: len(actual)]
        yield Check(f"the cache of blocks equals the oracle's, {len(prompt)} tokens", same)


register_losses("bacd-tccf", "bacd-tccf:low=0.9,high=0.95", accuracy=0.05, passes=0.5)
