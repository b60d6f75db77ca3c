"""Oracle test of adablock (AdaBlock-dLLM, arXiv:2509.26432): a block ends at the most confident
delimiter, else after a fixed number of positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import PROMPT, bidirectional, dense, softmax, steps
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import MASK


@oracle_test("adablock")
def adablock() -> Iterator[Check]:
    """A block ends at the most confident delimiter if it is confident enough, else after a fixed
    number."""
    inner = dense(seed=9, spread=9.0)

    def script(path: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = inner(path).copy()
        if path[-1] % 5 == 3:
            row[ord("\n")] = 27.0
        return row

    def oracle(threshold: float) -> tuple[list[int], list[list[int]], list[int]]:
        canvas, filled, ends = [*PROMPT, *[MASK] * 24], [], []
        start = len(PROMPT)
        while start < len(canvas):
            stop = 0
            while not stop or any(canvas[i] == MASK for i in range(start, stop)):
                probabilities = {
                    i: softmax(script((*canvas, i)))
                    for i in range(start, len(canvas))
                    if canvas[i] == MASK
                }
                if not stop:
                    window = range(start, min(start + 6, len(canvas)))
                    delimiters = [i for i in window if probabilities[i].argmax() == ord("\n")]
                    best = max(delimiters, key=lambda i: probabilities[i].max(), default=-1)
                    is_confident = best >= 0 and probabilities[best].max() >= threshold
                    stop = best + 1 if is_confident else min(start + 4, len(canvas))
                    ends.append(stop)
                block = {i: p for i, p in probabilities.items() if i < stop}
                chosen = [i for i, p in block.items() if p.max() >= 0.8]
                chosen = chosen or [max(block, key=lambda i: block[i].max())]
                for i in chosen:
                    canvas[i] = int(probabilities[i].argmax())
                filled.append(chosen)
            start = next((i for i, t in enumerate(canvas) if t == MASK), len(canvas))
        return canvas[len(PROMPT) :], filled, ends

    with bidirectional(script) as llm:
        for threshold in (0.2, 0.6, 1.1):
            decoder = catalogue.build(
                "adablock", block=4, threshold=0.8, delimiter_threshold=threshold
            )
            text, filled, ends = oracle(threshold)
            yield Check(f"blocks end at {ends}", steps(llm, decoder, 24) == (text, filled))
    fixed = oracle(1.1)[2]
    yield Check("delimiters move the block ends", oracle(0.2)[2] != fixed)


register_losses("adablock", "adablock", accuracy=0.05, passes=0.5)
