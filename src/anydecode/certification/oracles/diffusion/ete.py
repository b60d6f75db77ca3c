"""Oracle test of ete (From Bits to Rounds, arXiv:2511.21103): the confident positions across
blocks, else the token that makes most other positions confident."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    CONFIDENT,
    PROMPT,
    Logits,
    bidirectional,
    dense,
    entropy_nats,
    random_model,
    softmax,
    steps,
)
from anydecode.certification.oracles.diffusion.block_caches import cache_loss
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import MASK


@oracle_test("ete")
def ete() -> Iterator[Check]:
    """The confident positions across blocks; otherwise the pivot token that makes most other
    positions confident."""

    def oracle(
        candidates: int,
        reward: float,
        block: int = 8,
        length: int = 24,
        script: Logits = CONFIDENT,
    ) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * length], []
        while MASK in canvas:
            first = canvas.index(MASK)
            edge = 3 + ((first - 3) // block + 1) * block
            probabilities = {
                i: softmax(script((*canvas, i)))
                for i in range(first, min(edge + block, len(canvas)))
                if canvas[i] == MASK
            }
            confident = [i for i, p in probabilities.items() if p.max() >= 0.9]
            if len(confident) >= 2 or len(confident) == len(probabilities):
                for i in confident:
                    canvas[i] = int(probabilities[i].argmax())
                filled.append(confident)
                continue
            open_ = [i for i in probabilities if i < edge and i not in confident]
            open_ = open_ or [i for i in probabilities if i not in confident]
            pivot = max(open_, key=lambda i: (entropy_nats(probabilities[i]), -i))
            options = []
            for token in np.argsort(-probabilities[pivot], kind="stable")[:candidates]:
                trial = list(canvas)
                for i in confident:
                    trial[i] = int(probabilities[i].argmax())
                trial[pivot] = int(token)
                after = {i: softmax(script((*trial, i))) for i in probabilities if trial[i] == MASK}
                more = {i: int(p.argmax()) for i, p in after.items() if p.max() >= 0.9}
                value = math.log(probabilities[pivot][token]) + reward * len(more)
                options.append((value, trial, more))
            _, canvas, more = max(options, key=lambda one: one[0])
            for i, token in more.items():
                canvas[i] = token
            filled.append(sorted([*confident, pivot, *more]))
        return canvas[len(PROMPT) :], filled

    with bidirectional(CONFIDENT) as llm:
        for candidates, reward in ((3, 1.0), (2, 5.0), (8, 50.0), (1, 1.0)):
            decoder = f"ete:candidates={candidates},reward={reward},block=8"
            probabilities = steps(llm, decoder, 24)
            yield Check(
                decoder,
                probabilities == oracle(candidates, reward),
                f"{len(probabilities[1])} steps",
            )
    for spread in (4.5, 6.0):
        script = dense(spread=spread)
        expected = oracle(candidates=3, reward=1.0, block=32, length=80, script=script)
        with bidirectional(script) as llm:
            yield Check(
                "by default three candidates, a reward of 1, and the next block of 32;"
                f" logits of spread {spread:g}",
                steps(llm, "ete", 80) == expected,
                f"{len(expected[1])} steps",
            )


@measure("ete", "tokens that change with a block cache", samples=24, margin=0)
def ete_cache_loss(samples: int) -> float:
    """The cache of finished blocks is exact: sampled, on a transformer with random weights."""
    uncached = catalogue.build("ete", threshold=0.2)
    return cache_loss("ete:threshold=0.2,cache=block", uncached, samples)


@measure("ete", "rows of the block cache, relative to full passes", samples=24, margin=0.7)
def ete_cache_rows(samples: int) -> float:
    """On a model with blocks, which answers the same with both."""
    rows = []
    for decoder in ("ete:threshold=0.2,cache=block", "ete:threshold=0.2"):
        with random_model(block_size=4) as llm:
            answers = llm.generate(
                [list(PROMPT)] * (samples // 8), decoder=decoder, max_tokens=48, ignore_eos=True
            )
            rows.append(sum(answer.stats.rows for answer in answers))
    return rows[0] / rows[1]


register_losses("ete", "ete", accuracy=0.05, passes=0.5)
