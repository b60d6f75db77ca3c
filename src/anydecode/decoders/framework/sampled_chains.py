"""Chains of drafts with the distributions that they were sampled from, for rejection rules."""

from __future__ import annotations

import numpy as np

from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.scoring.tree import TokenTree


def distribution_list(rule: Acceptance | None) -> list[np.ndarray] | None:
    """An empty list for the distributions of drafts, if the rule compares with them."""
    return [] if rule is not None and rule.reads_probabilities else None


def sampled_chain(drafts: list[int], distributions: list[np.ndarray] | None) -> TokenTree:
    """The tree of a chain, with the distributions that its tokens were sampled from, if given."""
    if distributions is None:
        return TokenTree.chain(drafts)
    rows = {node - 1: row for node, row in enumerate(distributions[: len(drafts)])}
    return TokenTree.chain(drafts, probabilities=rows, kind="wor")
