"""EasySpec: drafts from a draft model that runs several layers in parallel (Wu et al., "EasySpec:
Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization", arXiv:2502.02493).

The layers of a group read the same hidden state, so they can run in parallel; drafts become
approximate. Before each draft an exact pass over the accepted tokens corrects the draft model's
cache.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.draft_candidates import fit_vocab
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, CHAIN_NOISE, acceptance_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import Drafter, DraftSession, Proposal, Speculative
from anydecode.decoders.framework.variants import check_variant
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.errors import InvalidRequestError
from anydecode.kernels.interface import ParallelLayers
from anydecode.scoring.score import DecoderAction
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import TokenTree


class LayerParallelDrafter(Drafter):
    """Drafts chains with the runner "draft", whose layers run in groups of `group`."""

    requirements = Requirements(runners=(DRAFT,))

    def __init__(self, group: int, rule: Acceptance | None = None) -> None:
        self.group = group
        self.rule = rule

    def prepare(self, sequence: Sequence) -> None:
        check_variant(sequence.model(DRAFT), ParallelLayers(self.group))

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class LayerParallelTreeDrafter(TreeDrafter):
    """Drafts trees with the runner "draft", whose layers run in groups of `group`: those of EAGLE-2
    (`GrowingTree.grow_best`), of `depth` levels and `width` nodes per level. Only the pass over the
    new text, the calibration, is exact."""

    requirements = LayerParallelDrafter.requirements

    def __init__(self, group: int, depth: int, width: int, rule: Acceptance | None = None) -> None:
        super().__init__(rule)
        self.variant, self.depth, self.width = ParallelLayers(group), depth, width

    def prepare(self, sequence: Sequence) -> None:
        super().prepare(sequence)
        check_variant(sequence.model(DRAFT), self.variant)

    def new_tree(self, sequence: Sequence) -> GrowingTree:
        return GrowingTree(sequence, self.runner, self.noise, self.variant)

    def grow(self, growing: GrowingTree, size: int) -> Generator[DecoderAction, Any, list[int]]:
        return growing.grow_best(size, self.depth, self.width)


class _Session(DraftSession):
    def __init__(self, sequence: Sequence, drafter: LayerParallelDrafter) -> None:
        self.sequence = sequence
        self.drafter = drafter
        self.exact = sequence.kv_cache(DRAFT).length

    def propose(self, size: int) -> Proposal:
        """Draft a chain. The cache entries of the last draft are dropped. An exact pass over all
        new tokens (calibration) gives the first draft; approximate passes give the others."""
        sequence = self.sequence
        kv_cache = sequence.kv_cache(DRAFT)
        if kv_cache.length > self.exact:
            kv_cache.truncate(self.exact)
        if size < 1:
            return TokenTree()
        sequence.align(DRAFT)
        sampler, variant = sequence.sampler.fork(), ParallelLayers(self.drafter.group)
        scores = yield sequence.score(runner=DRAFT)
        self.exact = kv_cache.length
        drafts: list[int] = []
        distributions = distribution_list(self.drafter.rule)
        while True:
            row = fit_vocab(sequence, scores.row(-1))
            token = sequence.sample(sampler, row, sequence.length + len(drafts))
            drafts.append(token)
            if distributions is not None:
                distributions.append(sampler.distribution(row).dense(len(row)))
            if len(drafts) == size:
                return sampled_chain(drafts, distributions)
            sampler.advance(token)
            kv_cache.reusable = False  # approximate entries must not be shared as a prefix
            scores = yield sequence.score([token], runner=DRAFT, variant=variant)


@register(
    Card(
        "easyspec",
        "speculative",
        paper="EasySpec (arXiv:2502.02493)",
        exactness="token-exact",
        summary="The draft model runs groups of layers in parallel and is corrected each round.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "guidance", "batches"),
        deviations=(
            "verified token-exactly with shared noise; the paper's rule is acceptance='rejection'",
            CHAIN_NOISE,
            "the layers of a group run in one program on the CPU, not on one GPU each",
            "within a group the outputs of attention and MLP are added layer by layer; this order"
            " is inferred",
            "drafts are chains by default; trees (`width` above 1) grow as those of EAGLE-2, since"
            " the shape of the paper's is not known here",
        ),
        remote={
            "size": Range(1, 64),
            "group": Range(2, 64),
            "width": Range(1, 4),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def easyspec(
    size: int = 5,
    group: int = 4,
    width: int = 1,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """EasySpec: layer-parallel drafting.

    Args:
        size: Number of drafts per round; of a tree, its levels.
        group: Layers per parallel group; the first and the last layer run alone.
        width: Nodes per level of a tree, `size` times as many in all; 1: a chain.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if group < 2 or width < 1:
        raise InvalidRequestError(
            "easyspec needs groups of at least two layers, and a width of at least one node"
        )
    rule = acceptance_rule(acceptance)
    if width > 1:
        tree = LayerParallelTreeDrafter(group, size, width, rule)
        return Speculative(tree, size * width, rule)
    return Speculative(LayerParallelDrafter(group, rule), size, rule)
