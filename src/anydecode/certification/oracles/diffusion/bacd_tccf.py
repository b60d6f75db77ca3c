"""Oracle test of bacd-tccf (arXiv:2602.09555): a threshold that follows the block's mean
confidence, blocks that are smaller after the marker, and the critic in its place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    DigestCache,
    Logits,
    StepState,
    UnmaskingRule,
    bidirectional,
    dense,
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
        decoder = catalogue.build("bacd-tccf", coarse=8, fine=2, marker="#", critic="")
        filled = steps(llm, decoder, 14)[1]
    yield Check("blocks are smaller after the marker", [len(f) for f in filled] == [8, 2, 2, 2])
    for offset in (3, 12, 18):
        script = thinking(offset)
        with bidirectional(script) as llm:
            actual = steps(llm, "bacd-tccf", 120)
        expected = two_phases(script, 120)
        yield Check(
            f"the defaults equal the oracle, with the marker at {offset}", actual == expected
        )
        is_critic = bytes(actual[0][offset : offset + len(CRITIC)]) == CRITIC
        yield Check(f"the critic takes the place of the marker at {offset}", is_critic)
    yield from _block_cache()


#: The sentence of the released code, and the default end of the thinking.
CRITIC, MARKER = b"Let's check if there are any mistakes and give the final answer.", b"</think>"


def thinking(offset: int) -> Logits:
    """Low and high confidences, in turns, and the marker at an offset of the answer."""
    inner = dense(seed=11, spread=6.0)

    def logits(path: tuple[int, ...]) -> np.ndarray:
        index = path[-1] - len(PROMPT) - offset
        row = inner(path) * (0.6 if index // 8 % 2 else 1.5)
        row[128:] = row[ord("<")] = -30.0
        if 0 <= index < len(MARKER):
            row[MARKER[index]] = 40.0
        result: np.ndarray = row
        return result

    return logits


def two_phases(script: Logits, length: int) -> tuple[list[int], list[list[int]]]:
    """Blocks of 16 with thresholds from 0.6 to 0.9 until the text before the first mask contains
    the marker; then the critic in its place, and blocks of 4."""
    start, size, filled = len(PROMPT), 16, []
    canvas = [*PROMPT, *[MASK] * length]
    while MASK in canvas:
        first = canvas.index(MASK)
        held: list[float] = []
        while masks := [
            i for i in range(first, min(first + size, len(canvas))) if canvas[i] == MASK
        ]:
            filled.append(_fill(canvas, {i: script((*canvas, i)) for i in masks}, held))
            text = bytes(canvas[start : canvas.index(MASK) if MASK in canvas else None])
            if size == 16 and MARKER in text:
                begin = start + text.index(MARKER)
                canvas = [*canvas[:begin], *CRITIC, *[MASK] * length][: start + length]
                size = 4
                break
    return canvas[start:], filled


def _fill(canvas: list[int], rows: dict[int, np.ndarray], held: list[float]) -> list[int]:
    """Fill the masks that are as sure as those of the block so far, `held`, from 0.6 to 0.9, or the
    surest one; `rows` are the logits of all masks. Returns the positions, and extends `held`."""
    p = {i: softmax(row) for i, row in rows.items()}
    level = float(np.mean(held)) if held else max(float(one.max()) for one in p.values())
    best = max(p, key=lambda i: (p[i].max(), -i))
    chosen = [i for i in p if p[i].max() >= min(max(level, 0.6), 0.9)] or [best]
    for i in chosen:
        canvas[i] = int(p[i].argmax())
    held += [float(p[i].max()) for i in chosen]
    return chosen


def _block_cache() -> Iterator[Check]:
    """With cache=block, rows see whole blocks of both phases, and finished blocks stay cached."""

    def script(path: tuple[int, ...]) -> np.ndarray:
        row = CONFIDENT(path).copy()
        row[ord("#")] = 60.0 if path[-1] == 9 else -30.0
        return row

    for prompt in ((5, 6, 7), tuple(range(40, 48))):
        yield _same_as_cached(script, prompt, critic="")
        yield _same_as_cached(script, prompt, critic="so: ")


def _same_as_cached(script: Logits, prompt: tuple[int, ...], critic: str) -> Check:
    """Compares with a cache by hand; the marker is at position 9, in the second block."""
    begin = 16 if not critic else 9 + len(critic)  # of the second phase
    ends = [8, *([16] if begin >= 16 else []), *range(begin, 42, 2)]

    def num_visible(position: int, is_fine: bool) -> int:
        return next(end for end in (ends if is_fine else [8, 16, 24]) if end > position)

    cache, canvas, stop = DigestCache(script), [*prompt], len(prompt) + 20
    filled: list[list[int]] = []
    is_fine = False
    while len(canvas) < stop:
        end = num_visible(len(canvas), is_fine)
        block = range(max([0, *(one for one in ends if one <= len(canvas))]), end)
        visible = partial(num_visible, is_fine=is_fine)
        for first in [0, *ends]:  # the finished blocks, each once more without masks
            if len(cache.tokens) == first < block.start:
                cache.forward(canvas, range(first, visible(first)), True, num_visible=visible)
        canvas += [MASK] * (end - len(canvas))
        held: list[float] = []
        while masks := [i for i in block if canvas[i] == MASK]:
            rows = cache.forward(canvas, block, False, num_visible=visible)
            filled.append(_fill(canvas, {i: rows[i] for i in masks}, held))
            is_ended = ord("#") in canvas and MASK not in canvas[: canvas.index(ord("#"))]
            if not is_fine and is_ended and (critic or MASK not in canvas):
                is_fine = True
                if critic:
                    canvas = [*canvas[: canvas.index(ord("#"))], *critic.encode()]
                    break
    with digests(script) as llm:
        decoder = catalogue.build(
            "bacd-tccf", coarse=8, fine=2, marker="#", critic=critic, cache="block"
        )
        tokens, actual = steps(llm, decoder, 20, prompt=prompt)
    same = tokens == canvas[len(prompt) : stop] and actual == filled[: len(actual)]
    return Check(f"the cache of blocks equals the oracle's, {len(prompt)} tokens, {critic!r}", same)


register_losses("bacd-tccf", "bacd-tccf:low=0.9,high=0.95", accuracy=0.05, passes=0.5)
