"""Multi-token prediction: a module of the model's own checkpoint drafts the next tokens.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437; Gloeckle et al., "Better & Faster
Large Language Models via Multi-token Prediction", arXiv:2404.19737.

The module is the model of the runner "draft" (`models/mtp.py` opens it from the target's own
files). It reads the embedding of a token and the target's state at the position before, or its own
state where the target has none yet, and drafts a chain. Where there are further modules (MiMo-V2),
each drafts one token: it reads all tokens before, the drafts of the modules before it too, beside
the target's states.
"""

from __future__ import annotations

from dataclasses import replace

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    CHAIN_NOISE,
    acceptance_rule,
)
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import ModelDrafter, draft_chain
from anydecode.scoring.sequence import FURTHER_DRAFTS, Sequence


class _Session(DraftSession):
    """Drafts one token with each of several modules."""

    learns_without_drafts = False

    def __init__(self, sequence: Sequence, rule: Acceptance | None, runners: list[str]) -> None:
        self.sequence, self.rule, self.runners = sequence, rule, runners

    def propose(self, size: int) -> Proposal:
        sequence, drafts = self.sequence, list[int]()
        distributions = distribution_list(self.rule)
        for runner in self.runners[:size]:
            sequence.align(runner)
            found = yield from draft_chain(sequence, drafts, 1, runner, distributions)
            if not found:
                break
            drafts += found
        return sampled_chain(drafts, distributions)


class MtpDrafter(ModelDrafter):
    """Drafts a chain with the module, which may be found in the target's own files, or a token each
    with several."""

    requirements = replace(
        ModelDrafter.requirements, finds_draft=True, optional_runners=FURTHER_DRAFTS
    )

    def open(self, sequence: Sequence) -> DraftSession:
        further = [runner for runner in FURTHER_DRAFTS if runner in sequence.optional_runners]
        if not further:
            return super().open(sequence)
        return _Session(sequence, self.rule, [self.runner, *further])


@register(
    Card(
        "mtp",
        "speculative",
        paper="DeepSeek-V3 (arXiv:2412.19437)",
        exactness="token-exact",
        summary="The model's own module for further tokens, found in its files, drafts a chain.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with shared noise; acceptance='rejection' is the usual rule",
            CHAIN_NOISE,
            "chains of 3 tokens by default (the paper: 1), for which the module is run repeatedly"
            " on its own states after its norm",
            "of several modules the first drafts all tokens, as in vLLM; those of MiMo-V2 draft one"
            " token each, so that there are no more drafts than modules",
            "with a draft model that reads no states, a chain of that model",
            "at most the last 2,048 tokens of a prompt that were not cached are read",
        ),
        remote={"size": Range(1, 64), "acceptance": ACCEPTANCE_WORDS},
    )
)
def mtp(size: int = 3, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """Multi-token prediction.

    Args:
        size: Maximum number of drafts per round.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(MtpDrafter(rule), size, rule)
