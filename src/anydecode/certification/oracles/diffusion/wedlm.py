"""Oracle test of wedlm (WeDLM, arXiv:2512.22737): committed text, then the window's filled tokens,
then its masks; entropy adjusted by distance; and an exact cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, Restarts, measure, oracle_test
from anydecode.certification.denoising import PROMPT, dense, entropy_nats, softmax, steps
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel


@oracle_test("wedlm")
def wedlm() -> Iterator[Check]:
    """Committed text, then the window's filled tokens, then its masks; distance-adjusted
    entropy."""

    inner = dense(spread=6.0)

    def oracle(
        entropy: float, window: int = 6, length: int = 20
    ) -> tuple[list[int], list[list[int]]]:
        canvas, filled = [*PROMPT, *[MASK] * length], []
        while MASK in canvas:
            first = canvas.index(MASK)
            positions = range(first, min(first + window, len(canvas)))
            filled_before = [i for i in positions if canvas[i] != MASK]
            masks = [i for i in positions if canvas[i] == MASK]
            probabilities = {}
            for number, i in enumerate(masks, 1):
                seen = [*canvas[:first], *[canvas[w] for w in filled_before], *[MASK] * number]
                probabilities[i] = softmax(np.roll(inner(tuple(seen)), i - len(seen) + 1))
            cost = {i: entropy_nats(p) + 0.02 * (i - first) for i, p in probabilities.items()}
            chosen = [i for i in masks if cost[i] < entropy] or [min(masks, key=lambda i: cost[i])]
            for i in chosen:
                canvas[i] = int(probabilities[i].argmax())
            filled.append(chosen)
        return canvas[len(PROMPT) :], filled

    model = ScriptedModel(inner, vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        for entropy in (0.1, 0.8, 2.0):
            expected = oracle(entropy)
            actual = steps(llm, f"wedlm:window=6,entropy={entropy}", 20)
            yield Check(
                f"entropy below {entropy} nats, {len(expected[1])} passes", actual == expected
            )
        expected = oracle(entropy=0.4, window=16, length=80)
        yield Check(
            "by default a window of 16 and entropy below 0.4 nats",
            steps(llm, "wedlm", 80) == expected,
        )


@measure("wedlm", "tokens that change when the cache is recomputed", samples=64, margin=0.0)
def wedlm_loss(samples: int) -> float:
    """With a restart before one pass in four: the cache is exact."""
    cached, recomputed = (
        _causal_steps("wedlm:entropy=2", samples, restarts=r)[0] for r in (False, True)
    )
    return sum(a != b for a, b in zip(cached, recomputed, strict=True)) / samples


@measure("wedlm", "passes per token of a confident model", samples=64, margin=0.2)
def wedlm_passes(samples: int) -> float:
    """With a window of 16 positions per pass."""
    return len(_causal_steps("wedlm", samples, spread=60.0)[1]) / samples


def _causal_steps(
    decoder: str, count: int, *, spread: float = 6.0, restarts: bool = False
) -> tuple[list[int], list[list[int]]]:

    model = ScriptedModel(dense(spread=spread), vocab_size=259)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        if not restarts:
            return steps(llm, decoder, count)
        with Restarts(llm.engine, seed=4):
            return steps(llm, decoder, count)
