"""Drafts of a smaller model under the rejection rule with lenience (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", arXiv:2211.17192, A.5).

At temperature 0, where target and draft model each have a single token, lenience compares the
probabilities before that: a draft is accepted if the target's probability of it is at least
lenience times that of its most probable token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import log

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import untruncated_distribution
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import TokenTree


class LenientSampling(RejectionSampling):
    """`RejectionSampling` with a lenience that also counts at temperature 0."""

    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        row = scores.after(node)
        sampler = scores.sampler_after(row)
        if not children or not sampler.is_greedy:
            return super().step(tree, scores, node, children)
        target = untruncated_distribution(scores, row)
        bound = float(target.scores.max()) + log(self.lenience)
        for child in children:
            token = tree.tokens[child]
            if target.score(token) >= bound:
                position = int(scores.positions[row]) + 1
                scores.sequence.record_logprobs(scores.row(row), position, token, sampler)
                return child, token
        return None, scores.sample(row)


@register(
    Card(
        "lenient-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192), A.5",
        exactness="lossy",
        summary=(
            "The rejection rule with lenience times q; no token gets a probability"
            " above p / lenience."
        ),
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "at temperature 0 a draft is accepted if the target's probability of it is at least"
            " lenience times the largest one; the paper's example has the inequality the other way"
            " round, by mistake",
            "lenience is 0.5 by default (the paper tries several values)",
        ),
        remote={"size": Range(1, 64), "lenience": Range(0, 1)},
    )
)
def lenient_sampling(size: int = 4, lenience: float = 0.5) -> Speculative:
    """Speculative decoding that accepts with min(1, p / (lenience q)); at temperature 0, if p is at
    least lenience times the largest p.

    Args:
        size: Number of drafts per round.
        lenience: Factor on the draft's probability, above 0 and at most 1.
    """
    rule = LenientSampling(lenience)
    return Speculative(ModelDrafter(rule), size, rule)
