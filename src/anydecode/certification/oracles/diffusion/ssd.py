"""Oracle test of ssd (Self Speculative Decoding, arXiv:2510.04147): the text of one token per pass
over the whole canvas, in the number of passes of the tree's rule."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import PROMPT, bidirectional, steady
from anydecode.certification.oracles.diffusion.stepwise_chains import equals_stepwise
from anydecode.certification.oracles.diffusion.task_losses import register_losses


@oracle_test("ssd")
def ssd() -> Iterator[Check]:
    """The same over the whole canvas, over blocks, and over a model's own blocks."""
    yield from equals_stepwise("ssd", block=0, width=2)
    yield from equals_stepwise("ssd", block=12, extra=",width=4", width=4)
    yield from equals_stepwise("ssd", block=0, extra=",cache=block", width=2, model_block=6)


@measure("ssd", "passes of trees relative to those of chains of equal depth", samples=8, margin=0.9)
def ssd_tree(samples: int) -> float:
    """On scripted models, whose order of confidences changes from step to step."""
    passes = {"ssd:drafts=13,width=3": 0, "ssd:drafts=5,width=1": 0}
    for seed in range(samples):
        with bidirectional(steady(spread=3.0 + 0.1 * seed)) as llm:
            for decoder in passes:
                passes[decoder] += llm.generate(
                    list(PROMPT), decoder=decoder, max_tokens=24, ignore_eos=True
                ).stats.passes
    tree, chain = passes.values()
    return tree / chain


register_losses("ssd", "ssd:drafts=8", accuracy=0.0, passes=0.7)
