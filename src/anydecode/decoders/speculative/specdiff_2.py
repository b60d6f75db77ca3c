"""SpecDiff-2: several drafts from one denoising pass, verified as a tree (Sandler et al.,
"SpecDiff-2: Scaling Diffusion Drafter Alignment For Faster Speculative Decoding",
arXiv:2511.00606).

The draft model predicts a block of masks in one pass. Several drafts are sampled from these
distributions and merged into a tree.
"""

from __future__ import annotations

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.framework.rejection import (
    ACCEPTANCE_WORDS,
    RejectionSampling,
    acceptance_rule,
)
from anydecode.decoders.framework.speculation import DraftSession, Proposal, Speculative
from anydecode.decoders.speculative.diffusion_draft import DiffusionDrafter, DiffusionSession
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


class JointDrafter(DiffusionDrafter):
    """Drafts `paths` samples from the distributions of the masks at `temperature`. The
    first uses the request's sampler and the target's noise, unless `rule` reads probabilities."""

    def __init__(self, paths: int, temperature: float, rule: Acceptance | None = None) -> None:
        if paths < 1 or temperature <= 0:
            raise InvalidRequestError("specdiff-2 needs paths >= 1 and temperature > 0")
        self.paths = paths
        self.temperature = temperature
        self.shares_noise = rule is None or not rule.reads_probabilities

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(DiffusionSession):
    def __init__(self, sequence: Sequence, drafter: JointDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter

    def propose(self, size: int) -> Proposal:
        sequence = self.sequence
        rows = yield from self.marginals(size)
        paths: list[list[int]] = []
        if self.drafter.shares_noise:
            sampler = sequence.sampler.fork()
            paths.append([])
            for offset, row in enumerate(rows):
                paths[0].append(sequence.sample(sampler, row, sequence.length + offset))
                sampler.advance(paths[0][-1])
        draft_sampler, noise = (
            Sampler(self.drafter.temperature),
            sequence.noise.with_purpose("draft"),
        )
        for number in range(len(paths), self.drafter.paths):
            paths.append(
                [
                    draft_sampler.sample(row, noise, sequence.length + offset, number)
                    for offset, row in enumerate(rows)
                ]
            )
        return TokenTree.merge(paths)


class BestStreak(RejectionSampling):
    """The paper's rule: of all drafted paths, the one with the largest expected number of accepted
    tokens by the target (self-selection) is verified alone. A token is accepted with its
    probability; after a rejection it is excluded. The choice reads no coins, so the output follows
    the target's distribution."""

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        path: list[int] = []
        tokens: list[int] = []
        for node in [*self.select(tree, scores), None]:
            parent = path[-1] if path else ROOT
            child, token = self.step(tree, scores, parent, [] if node is None else [node])
            tokens.append(token)
            if child is None:
                break
            path.append(child)
        return AcceptanceResult(path, tokens)

    @staticmethod
    def select(tree: TokenTree, scores: Scores) -> list[int]:
        """The path with the largest sum of the probabilities that its beginnings are accepted."""
        chances, streaks = {ROOT: 1.0}, {ROOT: 0.0}
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            chances[node] = chances[parent]
            if chances[parent]:  # else a constraint may forbid the path up to the parent
                p = scores.distribution(scores.after(parent)).dense(scores.logits.shape[1])
                chances[node] *= float(p[token])
            streaks[node] = streaks[parent] + chances[node]
        ends = [node for node in range(len(tree)) if not tree.children(node)]
        return tree.path(max(ends, key=lambda node: streaks[node])) if ends else []


@register(
    Card(
        "specdiff-2",
        "speculative",
        paper="SpecDiff-2 (arXiv:2511.00606)",
        exactness="token-exact",
        summary="Several drafts from one pass of a diffusion model are verified as a tree.",
        needs=("diffusion draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "verified token-exactly along every path, so that none need be selected; the paper's"
            " selection of one path, and its rule, is selection=true",
            "the first path uses the request's sampler and the target's noise; only the others are"
            " sampled at `temperature`",
            "4 paths of 16 drafts by default (the paper: up to 8, of 16 or 32)",
            "any diffusion model can draft; streak distillation,"
            " `anydecode train distil --method specdiff-2`, is for those that this package trained",
        ),
        remote={
            "size": Range(1, 64),
            "paths": Range(1, 16),
            "temperature": Range(0, 100),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def specdiff_2(
    size: int = 16,
    paths: int = 4,
    temperature: float = 1.5,
    selection: bool = False,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """SpecDiff-2: joint drafts from a diffusion model.

    Args:
        size: Number of tokens per draft.
        paths: Number of drafts per round.
        temperature: Temperature of all drafts but the first, above 0.
        selection: Verify only the path with the largest expected number of accepted tokens, by the
            paper's rule (distribution-exact); `acceptance` must not be given.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if selection and acceptance != "token-exact":
        raise InvalidRequestError("specdiff-2 takes selection or acceptance, not both")
    rule = BestStreak() if selection else acceptance_rule(acceptance)
    drafter = JointDrafter(paths, temperature, rule)
    return Speculative(drafter, size, rule)
