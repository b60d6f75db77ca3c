"""What a constraint does for drafts: it forces tokens, which need no drafter, and forbids others,
which need no verification."""

from __future__ import annotations

from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError
from anydecode.sampling.constrained import constraint_of
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.tree import ROOT, TokenTree


def constraint_state(sampler: Sampler) -> ConstraintState | None:
    """The state of the constraint that `policy` keeps to, or None where there is none that tells
    what it forces."""
    state = getattr(constraint_of(sampler), "state", None)
    return state if isinstance(state, ConstraintState) else None


def forced_draft(sampler: Sampler, most: int) -> TokenTree:
    """The chain of up to `most` tokens that the constraint of `policy` forces now."""
    state = constraint_state(sampler)
    forced = [] if state is None or most < 1 else state.forced()[:most]
    return TokenTree.chain(forced, sources=["constraint"] * len(forced))


def pruned(forced: list[int], drafted: TokenTree, state: ConstraintState) -> TokenTree:
    """The chain `forced` with `drafted` behind it, without what the constraint forbids. Draft
    distributions move with their nodes; where nothing changes, it is `drafted` itself."""
    state = state.fork()
    for token in forced:
        state.advance(token)
    last = len(forced) - 1
    positions, states = {ROOT: last}, {ROOT: state}
    tree = TokenTree.chain(forced)
    tree.kind = drafted.kind
    for node, (parent, token) in enumerate(zip(drafted.parents, drafted.tokens, strict=True)):
        if parent not in positions or not states[parent].allows(token):
            continue
        ahead = states[parent].fork()
        try:
            ahead.advance(token)
        except ConstraintError:  # narrowed away, though the text would be allowed
            continue
        positions[node], states[node] = tree.add(token, positions[parent]), ahead
    if not forced and len(tree) == len(drafted):
        return drafted
    tree.probabilities = {
        positions[node]: given for node, given in drafted.probabilities.items() if node in positions
    }
    if drafted.sources is not None:
        kept = [drafted.sources[node] for node in positions if node != ROOT]
        tree.sources = ["constraint"] * len(forced) + kept
    return tree
