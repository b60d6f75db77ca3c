"""PEARL: draft and target model always run in parallel (Liu et al., "PEARL: Parallel Speculative
Decoding with Adaptive Draft Length", arXiv:2408.11850)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.speculative.parallel_draft import ParallelDraft


@register(
    Card(
        "pearl",
        "speculative",
        paper="PEARL (arXiv:2408.11850)",
        exactness="token-exact",
        summary="Draft model and target always run in parallel: pre-verify and post-verify.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly with shared noise, not by the rejection rule",
            "the models run in parallel on threads or devices of one process",
            "the draft length is a parameter, not derived from the ratio of the two pass times",
        ),
        remote={"size": Range(0, 64)},
    )
)
def pearl(size: int = 4) -> ParallelDraft:
    """PEARL: parallel drafting with pre-verify and post-verify.

    Args:
        size: Number of drafts per round; best near the ratio of the target's pass time to the draft
            model's.
    """
    return ParallelDraft(size, pre_verify=True)
