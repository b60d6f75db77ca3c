"""Oracle test of freedave (Free Draft-and-Verification, arXiv:2510.00294): the text of one token
per pass, for any number of drafts, in the number of passes of the published rule; and FreeDave++ by
hand."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.denoising import (
    PROMPT,
    Logits,
    bidirectional,
    dense,
    softmax,
    steady,
    steps,
)
from anydecode.certification.oracles.diffusion.stepwise_chains import equals_stepwise
from anydecode.certification.oracles.diffusion.task_losses import register_losses
from anydecode.models.scripted import MASK

#: Masked positions with their tokens, the most confident first, and their confidences.
Ranked = tuple[list[tuple[int, int]], list[float]]


@oracle_test("freedave")
def freedave() -> Iterator[Check]:
    """The text of one token per pass, for any number of drafts and any cache, in fewer passes."""
    yield from equals_stepwise("freedave", block=12)
    yield from equals_stepwise("freedave", block=6, extra=",ahead=1", ahead=1)
    for extra in (",cache=block", ",cache=block,ahead=2"):
        yield from equals_stepwise("freedave", block=0, extra=extra, model_block=6)
    for name, script in (("steady", steady(6.0)), ("random", dense(spread=9.0))):
        for drafts, threshold in ((1, 0.5), (3, 0.6), (8, 0.95)):
            decoder = f"freedave:drafts={drafts},block=12,threshold={threshold}"
            with bidirectional(script) as llm:
                actual = steps(llm, decoder, 24)
                passes = llm.generate(
                    list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True
                ).stats.passes
            *expected, expected_passes = _plusplus(script, 24, 12, drafts, threshold)
            yield Check(f"{decoder} equals the oracle, {name}", actual == tuple(expected))
            yield Check(f"{decoder}: passes, {name}", passes == expected_passes, f"{passes}")


def _plusplus(
    script: Logits, length: int, block: int, drafts: int, threshold: float
) -> tuple[list[int], list[list[int]], int]:
    """FreeDave++: the tokens, the positions that each step filled, and the passes."""
    first = len(PROMPT)
    canvas, filled, passes = [*PROMPT, *[MASK] * length], [], 0
    for start in range(first, first + length, block):
        cells = range(start, min(start + block, first + length))
        passes += 1
        ranked = _ranked(script, canvas, cells)
        while ranked[0]:
            chain = ranked[0]
            count = _num_unmasked(ranked, threshold)
            limit = min(count + drafts - 1, len(chain))
            passes += count < len(chain)
            reached = 0
            while True:
                step = sorted(i for i, _ in chain[reached:count])
                filled.append(step)
                for i, token in chain[reached:count]:
                    canvas[i] = token
                reached = count
                ranked = _ranked(script, canvas, cells)
                target = ranked[0][: _num_unmasked(ranked, threshold)]
                while count < limit and chain[count] in target:
                    count += 1
                if count == reached:
                    break
    return canvas[first:], filled, passes


def _ranked(script: Logits, canvas: list[int], cells: range) -> Ranked:
    p = {i: softmax(script((*canvas, i))) for i in cells if canvas[i] == MASK}
    order = sorted(p, key=lambda i: (-p[i].max(), i))
    return [(i, int(p[i].argmax())) for i in order], [float(p[i].max()) for i in order]


def _num_unmasked(ranked: Ranked, threshold: float) -> int:
    """How many masks a step unmasks: those above the threshold, at least one."""
    return max(1, sum(confidence >= threshold for confidence in ranked[1])) if ranked[0] else 0


register_losses("freedave", "freedave:block=24", accuracy=0.0, passes=0.7)
