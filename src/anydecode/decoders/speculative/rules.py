"""Drafting with a smaller model under acceptance rules other than equality with plain decoding."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter
from anydecode.decoders.speculative.rejection import RejectionSampling

_WORKS_WITH = ("constraints", "samplers", "guidance", "batches", "adapters")


@register(
    Card(
        "rejection-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)",
        exactness="distribution-exact",
        summary="A smaller model drafts; drafts are kept with min(1, p/q), else p - q is drawn.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
    )
)
def rejection_sampling(size: int = 4) -> Speculative:
    """Drafts of `size` tokens under the rejection rule."""
    return Speculative(ModelDrafter(with_probabilities=True), size, RejectionSampling())


@register(
    Card(
        "lenient-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192), A.5",
        exactness="lossy",
        summary="The rejection rule against lenience times q: no token gets above p / lenience.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
    )
)
def lenient_sampling(size: int = 4, lenience: float = 0.5) -> Speculative:
    """Drafts of `size` tokens, kept with min(1, p / (lenience q))."""
    return Speculative(ModelDrafter(with_probabilities=True), size, RejectionSampling(lenience))


@register(
    Card(
        "typical-acceptance",
        "speculative",
        paper="Medusa (arXiv:2401.10774), its acceptance rule",
        exactness="lossy",
        summary="Drafts are kept when the target finds them typical.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=("drafts come from a smaller model, not from trained heads",),
    )
)
def typical_acceptance(size: int = 4, epsilon: float = 0.3, delta: float = 0.09) -> Speculative:
    """Drafts of `size` tokens, kept above min(epsilon, delta exp(-entropy))."""
    return Speculative(ModelDrafter(), size, TypicalAcceptance(epsilon, delta))


@register(
    Card(
        "top-m-acceptance",
        "speculative",
        paper="Blockwise Parallel Decoding (arXiv:1811.03115), its relaxed rules; GAD++"
        " (arXiv:2203.16487), its gap",
        exactness="lossy",
        summary="Drafts are kept when they are among the target's likeliest tokens.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=(
            "drafts come from a smaller model, not from trained heads",
            "the distance rule for ordered outputs is left out: text has no order",
        ),
    )
)
def top_m_acceptance(
    size: int = 4, count: int = 2, gap: float | None = None, block: int = 1
) -> Speculative:
    """Drafts of `size` tokens, kept among the `count` likeliest and within `gap` nats of the first;
    at least `block` tokens are said per pass."""
    return Speculative(ModelDrafter(), size, TopMAcceptance(count, gap, block))
