"""Kangaroo: drafts of an adapter behind the first layers, which end where it is not sure (Liu et
al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", arXiv:2404.18911)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.depth.exit_drafts import ExitDrafting, ExitSession
from anydecode.decoders.depth.self_speculation import DepthSession
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


class _Session(ExitSession):
    def __init__(self, sequence: Sequence, max_drafts: int, threshold: float) -> None:
        super().__init__(sequence, max_drafts)
        self.threshold = threshold

    def continues(self, token_share: float, top_share: float) -> bool:
        return top_share >= self.threshold


@register(
    Card(
        "kangaroo",
        "depth",
        paper="Liu et al. 2024, Kangaroo (arXiv:2404.18911)",
        exactness="token-exact",
        summary="The first layers and a trained adapter draft while the adapter is sure, the"
        " remaining layers verify.",
        needs=("early-exit drafter",),
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "0.77 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 10.3% of"
            " drafts accepted after 6 minutes of training (AMD EPYC, 2 cores;"
            " `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " acceptance='rejection' has the rejection rule",
            CHAIN_NOISE,
            "drafts end at a token that would end the text, and at the limit of tokens",
            "the adapter may have a head for the most frequent tokens only",
            "an early exit of EESD, whose layer has an MLP, is taken too",
            "`anydecode train drafter --recipe kangaroo` learns with the loss of the other recipes,"
            " not the cross-entropy alone, from the model's own answers",
            "positions from the prefix cache, and those before a restart, are left out of the"
            " adapter's cache",
            "the first round drafts the first token too, which the authors' code takes from the"
            " pass over the prompt",
        ),
        remote={"size": Range(1, 64), "threshold": Range(0, 1), "acceptance": LOGIT_RULES},
    )
)
class Kangaroo(ExitDrafting):
    """Drafts with the first layers of the target and the adapter behind them.

    Args:
        size: Maximum number of draft tokens per round.
        threshold: A draft ends behind a token where the adapter's largest probability is less.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        size: int = 6,
        threshold: float = 0.6,
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        if size < 1 or not 0 <= threshold <= 1:
            raise InvalidRequestError("kangaroo needs size >= 1 and 0 <= threshold <= 1")
        self.max_drafts, self.threshold = size, threshold

    def open(self, sequence: Sequence) -> DepthSession:
        return _Session(sequence, self.max_drafts, self.threshold)
