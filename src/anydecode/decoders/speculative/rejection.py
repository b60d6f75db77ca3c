"""Rejection rules: the text follows the target's distribution exactly, whoever drafts.

Chains: Leviathan et al., arXiv:2211.17192. Siblings drawn without replacement: Jeon et al.,
arXiv:2402.14160. Independent siblings: Miao et al., SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from anydecode.decoders.speculative.acceptance import (
    Acceptance,
    AcceptanceResult,
    TokenExact,
    TopMAcceptance,
    TypicalAcceptance,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree


def ladder(
    p: np.ndarray, q: np.ndarray | None, kind: str, tokens: Iterable[int], lenience: float = 1.0
) -> Iterator[tuple[float, np.ndarray]]:
    """For each sibling in draft order: how likely it is kept if all before it were not, and what
    is left of `p` when it is not kept either. `p` and `q` are float64 `[vocab_size]`.

    `q` is what the first sibling was drawn from; without it, or of kind "point", siblings were
    chosen and not drawn. For "wor" each sibling is held against `q` without those before it.
    """
    if kind == "point":
        q = None
    for token in tokens:
        target = p[token]
        if q is None or q[token] <= 0:  # nobody draws this token, so it was chosen
            chance, rest = target, p.copy()
            rest[token] = 0.0
        else:
            chance = min(1.0, target / (lenience * q[token]))
            rest = np.maximum(p - q, 0.0)
        total = rest.sum()
        if total > 0:  # else rounding left nothing, and p itself is as good
            p = rest / total
        yield float(chance), p
        if kind == "wor" and q is not None:
            q = without(q, token)


def without(q: np.ndarray, token: int) -> np.ndarray | None:
    """`q` given that it is not `token`; None if there is nothing else."""
    rest = q.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else None


class RejectionSampling(Acceptance):
    """Keep a draft with probability min(1, p / q), else draw from what is left of p.

    `tree.probabilities` must hold what the drafter drew from, after the same policy as the target's
    rows. Coins and draws come from streams of their own, so they never meet the drafter's noise;
    where nothing was drafted the token is the one plain decoding picks. A `lenience` below 1 keeps
    drafts with min(1, p / (lenience q)): faster, and no longer exact.
    """

    exactness = "distribution-exact"

    def __init__(self, lenience: float = 1.0) -> None:
        if not 0 < lenience <= 1:
            raise InvalidRequestError(f"lenience must be above 0 and at most 1, not {lenience}")
        self.lenience = lenience
        if lenience < 1:
            self.exactness = "lossy"

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        node = ROOT
        path: list[int] = []
        tokens: list[int] = []
        while True:
            child, token = self._step(tree, scores, node)
            tokens.append(token)
            if child is None:
                return AcceptanceResult(path, tokens)
            path.append(child)
            node = child

    def _step(self, tree: TokenTree, scores: Scores, node: int) -> tuple[int | None, int]:
        """The child that is kept, if one is, and the token that is said after `node`."""
        row, children = node + 1, tree.children(node)
        if not children:
            return None, scores.sample(row)
        sequence, position = scores.sequence, int(scores.positions[row]) + 1
        coins = sequence.noise.with_purpose("coin")
        rest = scores.distribution(row).dense(scores.logits.shape[1])
        drafted = [tree.tokens[child] for child in children]
        rungs = self.rungs(rest, tree.probabilities.get(node), tree.kind, drafted)
        for index, (child, (chance, left)) in enumerate(zip(children, rungs, strict=True)):
            rest = left
            if coins.coin(position, index=index) < chance:
                sequence.record_logprobs(
                    scores.row(row), position, tree.tokens[child], scores.sampler_after(row)
                )
                return child, tree.tokens[child]
        residual = sequence.noise.with_purpose("residual")
        support = np.flatnonzero(rest)
        keys = np.log(rest[support]) + residual.gumbel(support, position)
        token = int(support[keys.argmax()])
        sequence.record_logprobs(scores.row(row), position, token, scores.sampler_after(row))
        return None, token

    def rungs(
        self, p: np.ndarray, q: np.ndarray | None, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        """The ladder this rule climbs down."""
        return ladder(p, q, kind, tokens, self.lenience)


#: The rules a user can name.
RULES: dict[str, type[Acceptance]] = {
    "token-exact": TokenExact,
    "rejection": RejectionSampling,
    "typical": TypicalAcceptance,
    "top-m": TopMAcceptance,
}


def rule(choice: str | Acceptance) -> Acceptance:
    """The rule a user named. Raises `InvalidRequestError` for a name that is none."""
    if isinstance(choice, Acceptance):
        return choice
    if choice not in RULES:
        known = ", ".join(RULES)
        raise InvalidRequestError(f"no acceptance rule is called {choice!r}: there are {known}")
    return RULES[choice]()
