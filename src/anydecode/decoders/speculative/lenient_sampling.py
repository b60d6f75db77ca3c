"""Drafts of a smaller model under the rejection rule with lenience (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", arXiv:2211.17192, A.5)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter


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
        remote={"size": Range(1, 64), "lenience": Range(0, 1)},
    )
)
def lenient_sampling(size: int = 4, lenience: float = 0.5) -> Speculative:
    """Speculative decoding that accepts with min(1, p / (lenience q)).

    Args:
        size: Number of drafts per round.
        lenience: Factor on the draft's probability, above 0 and at most 1.
    """
    rule = RejectionSampling(lenience)
    return Speculative(ModelDrafter(rule), size, rule)
