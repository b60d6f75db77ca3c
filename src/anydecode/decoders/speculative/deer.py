"""A block of drafts in one denoising pass, each token drawn for itself (Cheng et al., "DEER: Draft
with Diffusion, Verify with Autoregressive Models", arXiv:2512.15176)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.acceptance import Acceptance
from anydecode.decoders.speculative.core import DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.diffusion_draft import DiffusionDrafter, DiffusionSession
from anydecode.decoders.speculative.rejection import RejectionSampling, rule
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class BlockDrafter(DiffusionDrafter):
    """A chain of tokens drawn from the masks' distributions."""

    def __init__(self, with_probabilities: bool = False) -> None:
        self.with_probabilities = with_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.with_probabilities)


class _Session(DiffusionSession):
    def __init__(self, sequence: Sequence, with_probabilities: bool) -> None:
        super().__init__(sequence)
        self.with_probabilities = with_probabilities

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        rows = yield from self.marginals(size)
        sampler, drafts, drawn = sequence.sampler.fork(), [], {}
        for ahead, row in enumerate(rows):
            token = sequence.sample(sampler, row, sequence.length + ahead)
            if self.with_probabilities:
                drawn[ahead - 1] = sampler.distribution(row).dense(len(row))
            sampler.advance(token)
            drafts.append(token)
        kind = "wor" if self.with_probabilities else "point"
        return TokenTree.chain(drafts, probabilities=drawn, kind=kind)


@register(
    Card(
        "deer",
        "speculative",
        paper="DEER (arXiv:2512.15176)",
        exactness="token-exact",
        summary="A diffusion model drafts a block in one pass.",
        needs=("diffusion draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly with shared noise; acceptance='rejection' is the paper's rule",
            "verification ends at the first reject; the printed algorithm goes on behind it",
            "16 drafts by default (the paper: up to 32)",
            "any diffusion model drafts; the paper's figures need its two-stage alignment",
        ),
    )
)
def deer(size: int = 16, acceptance: str | Acceptance = "token-exact") -> Speculative:
    """Blocks of `size` drafts (the paper: up to 32)."""
    chosen = rule(acceptance)
    return Speculative(BlockDrafter(isinstance(chosen, RejectionSampling)), size, chosen)
