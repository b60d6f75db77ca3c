"""DEER: a block of drafts from one denoising pass (Cheng et al., "DEER: Draft with Diffusion,
Verify with Autoregressive Models", arXiv:2512.15176).

The draft model fills a block of masks in one pass. Each draft is sampled independently from the
distribution of its mask.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.diffusion_draft import DiffusionDrafter, DiffusionSession
from anydecode.scoring.sequence import Sequence


class BlockDrafter(DiffusionDrafter):
    """Drafts a chain of tokens sampled from the distributions of the masks."""

    def __init__(self, rule: Acceptance | None = None) -> None:
        self.rule = rule

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.rule)


class _Session(DiffusionSession):
    def __init__(self, sequence: Sequence, rule: Acceptance | None) -> None:
        super().__init__(sequence)
        self.rule = rule

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        rows = yield from self.marginals(size)
        sampler, drafts = sequence.sampler.fork(), list[int]()
        distributions = distribution_list(self.rule)
        for offset, row in enumerate(rows):
            token = sequence.sample(sampler, row, sequence.length + offset)
            if distributions is not None:
                distributions.append(sampler.distribution(row).dense(len(row)))
            sampler.advance(token)
            drafts.append(token)
        return sampled_chain(drafts, distributions)


@register(
    Card(
        "deer",
        "speculative",
        paper="DEER (arXiv:2512.15176)",
        exactness="token-exact",
        summary="A diffusion model drafts a block of tokens in one pass.",
        needs=("diffusion draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly with shared noise; acceptance='rejection' is the paper's rule",
            CHAIN_NOISE,
            "verification ends at the first rejection; the paper's printed algorithm continues"
            " after it",
            "16 drafts by default (the paper: up to 32)",
            "any diffusion model can draft; the two-stage training that aligns one with its target,"
            " `anydecode train distil --method deer`, is for those that this package trained, and"
            " has no separator token before the draft and up to 8 masked tokens (the paper: 96)",
        ),
        remote={
            "size": Range(1, 64),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def deer(size: int = 16, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """DEER: block drafts from a diffusion model.

    Args:
        size: Number of drafts per block (the paper: up to 32).
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    return Speculative(BlockDrafter(rule), size, rule)
