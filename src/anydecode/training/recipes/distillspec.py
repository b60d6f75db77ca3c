"""Knowledge distillation of a small language model that drafts (Zhou et al., "DistillSpec:
Improving Speculative Decoding via Knowledge Distillation", arXiv:2310.08461).

Each step learns answers that the draft model samples itself (on-policy), or those of a data set:
the target's, or fixed ones. The loss is a divergence of the two models' distributions at each token
of an answer, averaged over its tokens and then over the answers.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.errors import InvalidRequestError
from anydecode.training.recipes.draft_recipe import DIVERGENCES, DraftRecipe


@register(
    Card(
        "distillspec",
        "speculative",
        paper="DistillSpec: Improving Speculative Decoding via Knowledge Distillation"
        " (arXiv:2310.08461)",
        exactness="token-exact",
        use="anydecode train draft-model --recipe distillspec, whose result is used by"
        " --decoder speculative-sampling --draft FOLDER",
        summary="Trains a small draft model on its own answers to match the target's"
        " distributions.",
        needs=("draft model",),
        works_with=("every decoder with a draft model",),
        bounds={"layers": Range(1, 1024)},
        deviations=(
            "without --draft, the draft model begins as the first layers of the target and keeps"
            " its embedding and head; the paper's is a small model of the same family",
            "before the distillation, the tokens of the answers are learned for `warmup` of the"
            " budget, in place of the paper's fine-tuned draft model",
            "a target is distilled from a larger one by a run of its own, with the smaller model as"
            " --draft, and the draft model for it by a second run, whose target is the result",
            "both models' answers are sampled at temperature 1, the target's once, before the"
            " training",
            "the lenience of the paper's lossy mode is the key lenient-sampling, with its linear"
            " form only",
        ),
    )
)
def distillspec(
    layers: int = 4,
    divergence: str = "forward-kl",
    beta: float = 0.5,
    data: str = "target",
    on_policy: float = 1.0,
    warmup: float = 0.5,
) -> DraftRecipe:
    """Distillation of a draft model.

    Args:
        layers: Number of the target's first layers that the draft model begins as, without
            --draft.
        divergence: "forward-kl", "reverse-kl", "jsd" (Jensen-Shannon) or "tv" (total variation,
            which is the probability that a draft is rejected).
        beta: Weight of the target's distribution in the mixture of "jsd".
        data: The answers that are not the draft model's own: "target" for the target's, "fixed"
            for those of the file --texts. The prompts are theirs too.
        on_policy: Probability that the answers of a step are the draft model's own.
        warmup: Part of the budget in which the tokens of the answers are learned first. 0 for a
            draft model that already writes such texts.
    """
    if divergence not in DIVERGENCES:
        raise InvalidRequestError(
            f"distillspec: divergence is {divergence!r}; choose from {', '.join(DIVERGENCES)}"
        )
    return DraftRecipe(
        "distillspec",
        layers,
        objective=divergence,
        beta=beta,
        data=data,
        on_policy=on_policy,
        pretraining=warmup,
    )
