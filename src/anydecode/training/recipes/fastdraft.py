"""A small draft model for a target, from random weights (Zafrir et al., "FastDraft: How to Train
Your Draft", arXiv:2411.11055): pre-training on texts, then sequence-level distillation, the tokens
of answers that the target writes."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.training.recipes.draft_recipe import DraftRecipe


@register(
    Card(
        "fastdraft",
        "speculative",
        paper="FastDraft: How to Train Your Draft (arXiv:2411.11055)",
        exactness="token-exact",
        use="anydecode train draft-model --recipe fastdraft, whose result is used by"
        " --decoder speculative-sampling --draft FOLDER",
        summary="Pre-trains a small draft model of the target's vocabulary, then learns the"
        " target's answers.",
        needs=("draft model",),
        works_with=("every decoder with a draft model",),
        bounds={"layers": Range(1, 1024), "width": Range(1, 65536)},
        deviations=(
            "the texts and the code of two files are learned for as long as the budget lasts; the"
            " paper's pre-training is of ten billion tokens",
            "the shape is given, not chosen by latency: by default 4 layers of width 256 with MLPs"
            " of 688, an embedding that is also the head, and heads of the target's size",
            "with --code, each step of the second half of the pre-training has as many parts of the"
            " code as of the texts; without it, there are texts only",
            "without --texts, the pre-training is on the target's answers with their prompts",
            "the target's answers are sampled at temperature 1",
            "no sparsity; the written model can be opened in any weight format",
        ),
    )
)
def fastdraft(
    layers: int = 4, width: int = 256, pretraining: float = 0.5, mixed: float = 0.5
) -> DraftRecipe:
    """A draft model from random weights.

    Args:
        layers: Number of its layers.
        width: Its hidden size, a multiple of the size of the target's heads. Its MLPs have 8/3 of
            it, rounded up to a multiple of 16.
        pretraining: Part of the budget for the pre-training; the rest is for the target's answers.
        mixed: Last part of the pre-training, in which half of the texts are those of --code.
    """
    return DraftRecipe(
        "fastdraft", layers, width, pretraining=pretraining, whole_texts=True, mixed=mixed
    )
