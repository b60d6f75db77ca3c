"""Oracle test of window-diffusion (arXiv:2601.20332): rows attend to the window and nothing after
it, refreshes come in cycles, and the rows are counted."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import CONFIDENT, PROMPT, bidirectional, softmax
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED, register_losses
from anydecode.models.scripted import MASK


@oracle_test("window-diffusion")
def window_diffusion() -> Iterator[Check]:
    """Rows attend to the window and nothing after it; refreshes come in cycles; rows are
    counted."""

    def oracle(window: int, active: int, cycle: int) -> tuple[list[int], list[list[int]], int]:
        canvas, filled, rows = [*PROMPT, *[MASK] * 24], [], 0
        filled_at: dict[int, int] = {}
        since = end = -1
        step = 0
        while MASK in canvas:
            masks = [i for i, token in enumerate(canvas) if token == MASK]
            stop = masks[:active][-1] + 1
            if since < 0 or step >= since + cycle or stop > end:
                since, end = step, masks[:window][-1] + 1
                rows += end
            else:
                fresh = {i for i, at in filled_at.items() if at >= since}
                rows += len(fresh | set(range(masks[0], stop)))
            probabilities = {i: softmax(CONFIDENT((*canvas[:end], i))) for i in masks[:active]}
            chosen = [i for i, p in probabilities.items() if p.max() >= 0.8]
            chosen = chosen or [max(probabilities, key=lambda i: probabilities[i].max())]
            for i in chosen:
                canvas[i], filled_at[i] = int(probabilities[i].argmax()), step
            filled.append(chosen)
            step += 1
        return canvas[len(PROMPT) :], filled, rows

    with bidirectional(CONFIDENT) as llm:
        for window, active, cycle in ((12, 4, 3), (8, 8, 100), (24, 2, 5)):
            text, filled, rows = oracle(window, active, cycle)
            decoder = catalogue.build(
                "window-diffusion", window=window, active=active, cycle=cycle, threshold=0.8
            )
            answer = llm.generate(
                list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True, trace=True
            )
            positions = [sorted(record["filled"]) for record in answer.trace or ()]
            name = f"window {window}, active {active}, cycle {cycle}"
            yield Check(f"{name}: text and positions", (answer.tokens, positions) == (text, filled))
            computed = (answer.trace or [])[-1]["meter"]["rows"]
            yield Check(f"{name}: {rows} rows", computed == rows, f"{computed}")


register_losses(
    "window-diffusion",
    "window-diffusion:window=24,active=8,threshold=0.9",
    accuracy=0.08,
    passes=0.5,
    tasks=DETERMINED,
)
