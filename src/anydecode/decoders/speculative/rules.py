"""Draft-model decoding under acceptance rules other than token-exact: rejection, lenient, typical
and top-m."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.framework.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter

_WORKS_WITH = ("constraints", "samplers", "guidance", "batches", "adapters")


@register(
    Card(
        "rejection-sampling",
        "speculative",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv:2211.17192)",
        exactness="distribution-exact",
        summary=(
            "Drafts of a smaller model are accepted with min(1, p/q); a rejected"
            " one is resampled from p - q."
        ),
        needs=("draft model",),
        works_with=_WORKS_WITH,
    )
)
def rejection_sampling(size: int = 4) -> Speculative:
    """Speculative decoding with the rejection rule (Leviathan et al., arXiv:2211.17192).

    Args:
        size: Number of drafts per round.
    """
    return Speculative(ModelDrafter(with_probabilities=True), size, RejectionSampling())


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
        works_with=_WORKS_WITH,
    )
)
def lenient_sampling(size: int = 4, lenience: float = 0.5) -> Speculative:
    """Speculative decoding that accepts with min(1, p / (lenience q)).

    Args:
        size: Number of drafts per round.
        lenience: Factor on the draft's probability, above 0 and at most 1.
    """
    return Speculative(ModelDrafter(with_probabilities=True), size, RejectionSampling(lenience))


@register(
    Card(
        "typical-acceptance",
        "speculative",
        paper="Medusa (arXiv:2401.10774), its acceptance rule",
        exactness="lossy",
        summary=(
            "Drafts are accepted if their probability is above a threshold set by"
            " the target's entropy."
        ),
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=("drafts come from a smaller model, not from trained heads",),
    )
)
def typical_acceptance(size: int = 4, epsilon: float = 0.3, delta: float = 0.09) -> Speculative:
    """Speculative decoding with typical acceptance (Cai et al., Medusa, arXiv:2401.10774).

    Args:
        size: Number of drafts per round.
        epsilon: Upper bound of the threshold.
        delta: The threshold is min(epsilon, delta exp(-entropy)).
    """
    return Speculative(ModelDrafter(), size, TypicalAcceptance(epsilon, delta))


@register(
    Card(
        "top-m-acceptance",
        "speculative",
        paper="Blockwise Parallel Decoding (arXiv:1811.03115), its relaxed rules; GAD++"
        " (arXiv:2203.16487), its gap",
        exactness="lossy",
        summary="Drafts are accepted if they are among the target's most probable tokens.",
        needs=("draft model",),
        works_with=_WORKS_WITH,
        deviations=(
            "drafts come from a smaller model, not from trained heads",
            "the distance rule for ordered outputs is not included, since tokens have no order",
        ),
    )
)
def top_m_acceptance(
    size: int = 4, count: int = 2, gap: float | None = None, block: int = 1
) -> Speculative:
    """Speculative decoding with top-m acceptance (Stern et al., arXiv:1811.03115).

    Args:
        size: Number of drafts per round.
        count: Drafts among so many most probable tokens are accepted.
        gap: Maximum distance from the most probable token, in nats; None: any.
        block: Minimum number of tokens emitted per pass.
    """
    return Speculative(ModelDrafter(), size, TopMAcceptance(count, gap, block))
