"""TAPS: several drafters for one target (Zbib et al., "TAPS: Task Aware Proposal Distributions for
Speculative Sampling", arXiv:2603.27027).

All drafters propose. Either the tree of the one that is most confident in this round is verified,
or their trees are merged. A method that drafts with a model does so once with each draft model that
there is, so that several drafters trained for different tasks compete (`LLM(draft=[a, b])`).
"""

from __future__ import annotations

from dataclasses import replace

from anydecode.catalogue import Card, Nested, Range, register
from anydecode.decoders.decoder import Requirements
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    LEARNS_ALONE,
    Drafter,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.goodput import chain_drafter
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree


class Member:
    """One drafter's session and the tree that it has drafted."""

    def __init__(self, name: str, session: DraftSession) -> None:
        self.name = name
        self.session = session
        self.tree = TokenTree()
        self._num_accepted, self._num_drafted = 1.0, 2.0

    @property
    def confidence(self) -> float:
        """That of the tree: the mean probability of the most probable drafts. For a drafter without
        probabilities, how often its first draft was accepted of late, with a prior of one success
        in two."""
        confidence = self.tree.confidence
        return self._num_accepted / self._num_drafted if confidence is None else confidence

    def update(self, tokens: list[int]) -> None:
        """Record whether the first draft was right; the target generated `tokens`. Older rounds
        decay.
        """
        if len(self.tree):
            right = self.tree.child(ROOT, tokens[0]) is not None
            self._num_accepted = 0.9 * self._num_accepted + right
            self._num_drafted = 0.9 * self._num_drafted + 1
            self.tree = TokenTree()


def merge_trees(trees: list[tuple[str, TokenTree]], size: int) -> TokenTree:
    """Merge trees into one of up to `size` nodes; shared prefixes occur once. One node of each tree
    is taken in turn, the first tree's first."""
    tree = TokenTree(sources=[])
    assert tree.sources is not None
    positions: list[dict[int, int]] = [{ROOT: ROOT} for _ in trees]
    longest = max((len(part) for _, part in trees), default=0)
    for node in range(longest):
        for (name, part), position in zip(trees, positions, strict=True):
            if node >= len(part) or part.parents[node] not in position:
                continue
            parent, token = position[part.parents[node]], part.tokens[node]
            child = tree.child(parent, token)
            if child is None:
                if len(tree) >= size:
                    continue
                child = tree.add(token, parent)
                tree.sources.append(name)
            position[node] = child
    return tree


class _Session(DraftSession):
    def __init__(self, members: list[Member], route: bool) -> None:
        self.members = members
        self.route = route

    def propose(self, size: int) -> Proposal:
        for member in self.members:
            member.tree = yield from member.session.propose(size)
        ranked = sorted(self.members, key=lambda member: -member.confidence)
        drafting = [member for member in ranked if len(member.tree)]
        if self.route:
            drafting = drafting[:1]
        return merge_trees([(member.name, member.tree) for member in drafting], size)

    def observe(self, round: SpeculationRound) -> None:
        for member in self.members:
            member.update(round.result.tokens)
            member.session.observe(round)

    def end(self) -> None:
        for member in self.members:
            member.session.end()


class TapsDrafter(Drafter):
    """Drafts with all of `drafters`, by name, those with a model once per draft model. With `route`
    only the tree with the largest confidence is verified, else all are merged, in this order."""

    def __init__(self, drafters: dict[str, Drafter], route: bool = False) -> None:
        self.drafters = drafters
        self.route = route
        needs = [part.requirements for part in drafters.values()]
        # `taps` allows one method with a draft model, which uses every one.
        own = next(
            (replace(one, runners=(), every_draft=True) for one in needs if one.runners), None
        )
        self.requirements = replace(
            own or Requirements(), takes_prediction=any(one.takes_prediction for one in needs)
        )

    def prepare(self, sequence: Sequence) -> None:
        members = self._members(sequence)
        if len(members) < 2:
            raise InvalidRequestError(
                f"taps has {len(members)} drafter for this model; name two methods, such as"
                " suffix+stand, or give several draft models"
            )
        for part in members.values():
            part.prepare(sequence)

    def open(self, sequence: Sequence) -> DraftSession:
        members = self._members(sequence).items()
        return _Session([Member(name, part.open(sequence)) for name, part in members], self.route)

    def _members(self, sequence: Sequence) -> dict[str, Drafter]:
        """The drafters of a sequence by name; that of a draft model is named after its runner
        too."""
        members = {}
        for key, part in self.drafters.items():
            if not part.requirements.runners:
                members[key] = part
            for runner in sequence.draft_runners if part.requirements.runners else ():
                members[f"{key} on {runner}"] = part.on(runner)
        return members

    def clear(self) -> None:
        for part in self.drafters.values():
            part.clear()

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.drafters.values())


@register(
    Card(
        "taps",
        "speculative",
        paper="TAPS (arXiv:2603.27027)",
        exactness="token-exact",
        summary="Several drafters at once: routed by confidence, or merged into one tree.",
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "any methods of this catalogue beside EAGLE drafters, also without a draft model; by"
            " default 'eagle' with each draft model, and two that copy",
            "the confidence of a drafter without probabilities (copies, ranks) is the recent"
            " acceptance rate of its first drafts, not the mean top probability of its tree",
            "trees are merged by default, the more confident first, which the paper found best;"
            " route=true verifies the most confident tree alone",
            "the merged tree has up to `size` nodes, taken from the drafters in turn",
            "averaging the drafters' weights, which the paper advises against, is not included",
            LEARNS_ALONE,
        ),
        remote={"drafters": Nested(4), "size": Range(1, 64), "acceptance": ACCEPTANCE_WORDS},
    )
)
def taps(
    drafters: str = "eagle+suffix+stand",
    route: bool = False,
    size: int = 8,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """TAPS: several drafters, routed or merged.

    Args:
        drafters: Keys of speculative methods, joined with "+". Those that need a draft model draft
            with each one that there is.
        route: Verify only the tree of the most confident drafter.
        size: Maximum number of nodes of a draft tree.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    rule = acceptance_rule(acceptance)
    by_key: dict[str, Drafter] = {}
    for key in filter(None, str(drafters).split("+")):
        drafter = chain_drafter(key, rule)
        if drafter.needs_every_row:
            raise UnsupportedCombinationError(
                f"taps cannot merge {key!r}: it learns from a tree of its own"
            )
        by_key[key] = drafter
    if not by_key:
        raise InvalidRequestError("taps needs a drafter; name methods, such as eagle+suffix")
    if sum(bool(drafter.requirements.runners) for drafter in by_key.values()) > 1:
        raise UnsupportedCombinationError(
            "taps can merge one method with a draft model at most; it drafts with each draft model"
        )
    return Speculative(TapsDrafter(by_key, route), size, rule)
