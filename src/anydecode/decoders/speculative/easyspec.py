"""Drafts from a draft model that runs several of its layers side by side (Wu et al., "EasySpec:
Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization", arXiv:2502.02493)."""

from __future__ import annotations

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.draft_model import DRAFT, fitted
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import TokenTree


class LayerParallelDrafter(Drafter):
    """Chains from the lane "draft", whose layers run in groups of `group`."""

    runners = (DRAFT,)

    def __init__(self, group: int) -> None:
        if group < 2:
            raise InvalidRequestError("easyspec needs groups of at least two layers")
        self.group = group

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self.group)


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, group: int) -> None:
        self.sequence = sequence
        self.group = group
        self.exact = sequence.context(DRAFT).length

    def propose(self, size: int) -> Proposal:
        """What the last round left in memory is forgotten; an exact pass over all that is new
        (calibration) gives the first draft, approximate passes give the others."""
        sequence = self.sequence
        context = sequence.context(DRAFT)
        if context.length > self.exact:
            context.truncate(self.exact)
        if size < 1:
            return TokenTree()
        sequence.align(DRAFT)
        sampler = sequence.sampler.fork()
        scores = yield sequence.score(runner=DRAFT)
        self.exact = context.length
        drafts: list[int] = []
        while True:
            row = fitted(sequence, scores.row(-1))
            token = sequence.sample(sampler, row, sequence.length + len(drafts))
            drafts.append(token)
            if len(drafts) == size:
                return TokenTree.chain(drafts)
            sampler.advance(token)
            context.reusable = False  # what is approximate is nobody else's prefix
            scores = yield sequence.score([token], runner=DRAFT, parallel=self.group)


@register(
    Card(
        "easyspec",
        "speculative",
        paper="EasySpec (arXiv:2502.02493)",
        exactness="token-exact",
        summary="The draft model runs groups of layers side by side and is put right each round.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with shared noise, not by the rejection rule",
            "the layers of a group run in one program on the CPU, not on a GPU each",
            "within a group attention and MLP of one layer after the other are added; the order"
            " is inferred",
            "chains only; the paper drafts trees as well",
        ),
    )
)
def easyspec(size: int = 5, group: int = 4) -> Speculative:
    """Chains of `size` drafts; all layers but the first and the last run in groups of `group`."""
    return Speculative(LayerParallelDrafter(group), size)
