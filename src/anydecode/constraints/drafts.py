"""Constraints applied to drafts: forced tokens are drafted without a drafter, and drafted tokens
that the constraint forbids are removed before verification."""

from __future__ import annotations

from anydecode.constraints.constraint import ConstraintState
from anydecode.errors import ConstraintError
from anydecode.sampling.sampler import Sampler, constraint_of
from anydecode.scoring.tree import ROOT, TokenTree


def constraint_state(sampler: Sampler) -> ConstraintState | None:
    """The constraint state of `sampler`; None if there is none, or if it has no forced tokens."""
    state = getattr(constraint_of(sampler), "state", None)
    return state if isinstance(state, ConstraintState) else None


def forced_draft(sampler: Sampler, max_tokens: int) -> TokenTree:
    """A chain of up to `max_tokens` tokens that the constraint of `sampler` forces next."""
    state = constraint_state(sampler)
    forced = [] if state is None or max_tokens < 1 else state.forced_tokens()[:max_tokens]
    return TokenTree.chain(forced, sources=["constraint"] * len(forced))


def pruned(forced: list[int], drafted: TokenTree, state: ConstraintState) -> TokenTree:
    """Appends `drafted` to the chain `forced` and removes the nodes that the constraint forbids.

    Args:
        forced: Forced tokens that come before the draft.
        drafted: The drafted tree.
        state: The constraint's state before `forced`; not changed.

    Returns:
        The new tree. Draft distributions move with their nodes. If nothing changes, `drafted`
        itself.
    """
    state = state.fork()
    for token in forced:
        state.advance(token)
    last_forced = len(forced) - 1
    new_nodes, states = {ROOT: last_forced}, {ROOT: state}
    tree = TokenTree.chain(forced)
    tree.kind = drafted.kind
    for node, (parent, token) in enumerate(zip(drafted.parents, drafted.tokens, strict=True)):
        if parent not in new_nodes or not states[parent].allows(token):
            continue
        child_state = states[parent].fork()
        try:
            child_state.advance(token)
        except ConstraintError:  # rejected although `allows` returned true
            continue
        new_nodes[node], states[node] = tree.add(token, new_nodes[parent]), child_state
    if not forced and len(tree) == len(drafted):
        return drafted
    tree.probabilities = {
        new_nodes[node]: distribution
        for node, distribution in drafted.probabilities.items()
        if node in new_nodes
    }
    if drafted.sources is not None:
        sources = [drafted.sources[node] for node in new_nodes if node != ROOT]
        tree.sources = ["constraint"] * len(forced) + sources
    return tree
