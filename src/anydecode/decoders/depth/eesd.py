"""EESD: drafts of a trained early exit, whose length follows from Thompson sampling (Liu et al.,
"Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control
Mechanism", arXiv:2406.03853)."""

from __future__ import annotations

from anydecode.catalogue import Card, Range, Words, register
from anydecode.decoders.depth.exit_drafts import ExitDrafting, ExitSession
from anydecode.decoders.depth.self_speculation import DepthSession
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES
from anydecode.decoders.framework.thompson import CONTROLS, Posterior
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence


class _Session(ExitSession):
    def __init__(self, sequence: Sequence, method: Eesd) -> None:
        super().__init__(sequence, method.max_drafts)
        self.posterior = Posterior(sequence, method.memory)
        self.is_calibrated = method.control == "calibration"

    def size(self) -> int:
        self.posterior.begin(self.sequence.length)
        return super().size()

    def continues(self, token_share: float, top_share: float) -> bool:
        return self.posterior.continues(token_share if self.is_calibrated else None)

    def observe(self, drafts: list[int], num_accepted: int, scores: Scores) -> None:
        super().observe(drafts, num_accepted, scores)
        self.posterior.observe(num_accepted, len(drafts))


@register(
    Card(
        "eesd",
        "depth",
        paper="Liu et al. 2024, EESD (arXiv:2406.03853)",
        exactness="token-exact",
        summary="The first layers and a trained one draft as long as Thompson sampling says, the"
        " remaining layers verify.",
        needs=("early-exit drafter",),
        works_with=("constraints", "samplers", "batches"),
        measured=(
            "0.70 times the speed of plain decoding on SmolLM2-135M-Instruct (Q4_1), with 4.1% of"
            " drafts accepted after 6 minutes of training (AMD EPYC, 2 cores;"
            " `anydecode bench depth`, docs/performance.md)",
        ),
        deviations=(
            "a round has one failure if a draft was rejected, and the counts decay; the paper's"
            " constants are not known, nor the weight of the confidence in Calibration-TS, here 5"
            " drafts",
            "verification samples with the target's own noise instead of comparing argmax tokens;"
            " the rejection rule is acceptance='rejection'",
            CHAIN_NOISE,
            "Calibration-TS has no online factor",
            "the first draft of a round is made in any case; the counts are those of one request",
            "an adapter of Kangaroo, without an MLP, is taken too",
            "chains: the paper's trees are left out",
            "drafts end at a token that would end the text, and at the limit of tokens",
            "`anydecode train drafter --recipe early-exit` learns with the loss of the other"
            " recipes; its exit is behind a sixth of the layers",
            "positions from the prefix cache are left out of the trained layer's cache",
        ),
        remote={
            "size": Range(1, 64),
            "memory": Range(0, 1),
            "control": Words(CONTROLS),
            "acceptance": LOGIT_RULES,
        },
    )
)
class Eesd(ExitDrafting):
    """Drafts with the first layers of the target and a trained layer behind them.

    Args:
        size: Maximum number of draft tokens per round.
        memory: Decay of the counts per round, above 0 and at most 1.
        control: "beta" (Beta-TS), or "calibration" (Calibration-TS), which also reads the
            probability of each draft.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
    """

    def __init__(
        self,
        size: int = 8,
        memory: float = 0.95,
        control: str = "beta",
        acceptance: str | Acceptance = "token-exact",
    ) -> None:
        super().__init__(acceptance)
        if size < 1 or not 0 < memory <= 1:
            raise InvalidRequestError("eesd needs size >= 1 and 0 < memory <= 1")
        if control not in CONTROLS:
            raise InvalidRequestError(f"control is {control!r}; choose from {', '.join(CONTROLS)}")
        self.max_drafts, self.memory, self.control = size, memory, control

    def open(self, sequence: Sequence) -> DepthSession:
        return _Session(sequence, self)
