"""Rejection rules: the output follows the target's distribution exactly, whatever is drafted.

Chains: Leviathan et al., arXiv:2211.17192. Siblings drawn without replacement: Jeon et al.,
arXiv:2402.14160. Independent siblings: Miao et al., SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.catalogue import Words
from anydecode.decoders.framework.acceptance import (
    Acceptance,
    StepAcceptance,
    TokenExact,
    TopMAcceptance,
    TypicalAcceptance,
)
from anydecode.decoders.framework.judging import JudgeAcceptance
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import constraint_of
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import TokenTree


def rejection_steps(
    p: np.ndarray, q: np.ndarray | None, kind: str, tokens: Iterable[int], lenience: float = 1.0
) -> Iterator[tuple[float, np.ndarray]]:
    """Yield the acceptance probability and the residual distribution of each sibling, in draft
    order.

    The acceptance probability is conditional on the rejection of all siblings before. The residual
    is the target distribution after the rejection of this sibling too.

    Args:
        p: The target's distribution, float64 `[vocab_size]`.
        q: The distribution of the first sibling, float64 `[vocab_size]`; None if it was not drawn.
        kind: "point": siblings were chosen, not drawn. "wor": drawn without replacement, so that
            each is compared with `q` without those before. "iid": drawn independently.
        tokens: The siblings.
        lenience: Factor on `q`; below 1 the rule is lossy.
    """
    if kind == "point":
        q = None
    for token in tokens:
        target = p[token]
        if q is None or q[token] <= 0:  # never drawn from q, so the token was chosen
            probability, rest = target, p.copy()
            rest[token] = 0.0
        else:
            probability = min(1.0, target / (lenience * q[token]))
            rest = np.maximum(p - q, 0.0)
        total = rest.sum()
        if total > 0:  # else rounding left no residual, and p itself is as good
            p = rest / total
        yield float(probability), p
        if kind == "wor" and q is not None:
            q = exclude_token(q, token)


def exclude_token(q: np.ndarray, token: int) -> np.ndarray | None:
    """`q` conditioned on not being `token`; None if no other token is possible."""
    rest = q.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else None


class RejectionSampling(StepAcceptance):
    """Accept a draft with probability min(1, p / q), else sample from the residual of p.

    `tree.probabilities` must hold the distributions that the drafts were drawn from, after the same
    sampler as the target's rows. Acceptance and residual sampling use their own noise streams,
    which never coincide with the drafter's. Without a draft, and near the token limit of a schema,
    where a completion may be forced, the token is that of plain decoding. A `lenience` below 1
    accepts with min(1, p / (lenience q)): faster, but no longer exact.
    """

    exactness = "distribution-exact"
    reads_probabilities = True

    def __init__(self, lenience: float = 1.0) -> None:
        if not 0 < lenience <= 1:
            raise InvalidRequestError(f"lenience must be above 0 and at most 1, not {lenience}")
        self.lenience = lenience
        if lenience < 1:
            self.exactness = "lossy"

    def step(
        self, tree: TokenTree, scores: Scores, node: int, children: Seq[int]
    ) -> tuple[int | None, int]:
        row = scores.after(node)
        constraint = constraint_of(scores.sampler_after(row))
        if not children or (constraint is not None and constraint.is_completing):
            # A token behind which no completion fits is sampled again: no distribution tells that.
            token = scores.sample(row)
            child = tree.child(node, token)
            return child if child in children else None, token
        sequence, position = scores.sequence, int(scores.positions[row]) + 1
        coins = sequence.noise.with_purpose("coin")
        remaining = scores.distribution(row).dense(scores.logits.shape[1])
        draft_tokens = [tree.tokens[child] for child in children]
        steps = self.steps(remaining, tree.probabilities.get(node), tree.kind, draft_tokens)
        for index, (child, (probability, residual)) in enumerate(zip(children, steps, strict=True)):
            remaining = residual
            if coins.coin(position, index=index) < probability:
                sequence.record_logprobs(
                    scores.row(row), position, tree.tokens[child], scores.sampler_after(row)
                )
                return child, tree.tokens[child]
        residual_noise = sequence.noise.with_purpose("residual")
        support = np.flatnonzero(remaining)
        keys = np.log(remaining[support]) + residual_noise.gumbel(support, position)
        token = int(support[keys.argmax()])
        sequence.record_logprobs(scores.row(row), position, token, scores.sampler_after(row))
        return None, token

    def steps(
        self, p: np.ndarray, q: np.ndarray | None, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        """The rejection steps of this rule."""
        return rejection_steps(p, q, kind, tokens, self.lenience)


#: What token-exact verification costs where the paper's rule is rejection, for cards: the shares of
#: drafts that are accepted of one target and one draft, for chains, and for trees whose siblings
#: are drawn without replacement.
CHAIN_NOISE = (
    "sharing noise accepts fewer drafts than that rule: for (0.6, 0.3, 0.1) drafted by"
    " (0.3, 0.3, 0.4), 0.631 of them against 0.700"
)
TREE_NOISE = (
    "sharing noise accepts a single draft less often than that rule, and one of several siblings"
    " more often: for (0.6, 0.3, 0.1) drafted by (0.3, 0.3, 0.4), one draft 0.631 against 0.700,"
    " one of two 0.914 against 0.850"
)
#: The same for trees whose siblings are the most probable ones.
CHOSEN_NOISE = (
    "sharing noise accepts a draft less often than that rule where the target is surer than the"
    " drafter, and more often where they are close: for (0.8, 0.1, 0.1) drafted by"
    " (0.4, 0.35, 0.25), 0.596 against 0.800; for (0.6, 0.3, 0.1) drafted by (0.5, 0.3, 0.2), 0.873"
    " against 0.600"
)

#: The acceptance rules by name.
ACCEPTANCE_RULES: dict[str, type[Acceptance]] = {
    "token-exact": TokenExact,
    "rejection": RejectionSampling,
    "typical": TypicalAcceptance,
    "top-m": TopMAcceptance,
    "judge": JudgeAcceptance,
}
ACCEPTANCE_WORDS = Words(tuple(ACCEPTANCE_RULES))
#: The rules that read nothing but logits, for methods with a loop of their own.
LOGIT_RULES = Words(tuple(key for key, rule in ACCEPTANCE_RULES.items() if not rule.reads_states))


def acceptance_rule(choice: str | Acceptance) -> Acceptance:
    """The acceptance rule with a name. Raises `InvalidRequestError` for an unknown name."""
    if isinstance(choice, Acceptance):
        return choice
    if choice not in ACCEPTANCE_RULES:
        names = ", ".join(ACCEPTANCE_RULES)
        raise InvalidRequestError(f"unknown acceptance rule {choice!r}: give one of {names}")
    return ACCEPTANCE_RULES[choice]()


def logit_rule(choice: str | Acceptance, key: str) -> Acceptance:
    """`acceptance_rule` for the method `key`, whose loop has no hidden states for a rule.

    Raises:
        InvalidRequestError: The name is unknown, or the rule reads hidden states.
    """
    rule = acceptance_rule(choice)
    if rule.reads_states:
        name = choice if isinstance(choice, str) else type(choice).__name__
        raise InvalidRequestError(f"acceptance is {name!r}; {key} takes {LOGIT_RULES}")
    return rule
