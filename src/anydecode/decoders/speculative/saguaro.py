"""Saguaro: drafting for the outcome of a verification while it runs (Kumar et al., "Speculative
Speculative Decoding", arXiv:2603.03251).

While the target verifies, the draft model prepares the next drafts for the most probable outcomes.
An outcome is the number of accepted drafts and the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.framework.draft_candidates import DraftCandidates
from anydecode.decoders.framework.draft_time import beside_target
from anydecode.decoders.framework.growing_tree import GrowingTree
from anydecode.decoders.framework.rejection import CHAIN_NOISE, LOGIT_RULES, logit_rule
from anydecode.decoders.framework.sampled_chains import distribution_list, sampled_chain
from anydecode.decoders.framework.speculation import draft_share, verify_tree
from anydecode.decoders.speculative.draft_model import draft_chain
from anydecode.errors import InvalidRequestError
from anydecode.scoring.draft_policy import DraftShare
from anydecode.scoring.score import DecoderAction, Decoding, Submit, Ticket, Wait
from anydecode.scoring.sequence import DRAFT, Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: The number of accepted drafts, and the bonus token after them.
Outcome = tuple[int, int]


def fan_out(size: int, budget: int, acceptance_rate: float, exponent: float) -> list[int]:
    """The number of bonus tokens to prepare for after k = 0..`size` accepted drafts.

    F_k is proportional to a^(k / (1 + r)). The last, where no draft is excluded, is proportional to
    a^(size / (1 + r)) (1 - a)^(-1 / (1 + r)). The result is nearest to these shares of `budget`
    (by the sum of squares) among the numbers that sum to it, of which none is 0.

    Args:
        size: Number of drafts.
        budget: Total number of bonus tokens, above `size`.
        acceptance_rate: The acceptance rate a.
        exponent: r; misses fall with the fan-out like F^-r.
    """
    power = 1 / (1 + exponent)
    shares = [acceptance_rate ** (k * power) for k in range(size + 1)]
    shares[-1] *= (1 - acceptance_rate) ** -power
    wanted = [budget * share / sum(shares) for share in shares]
    counts = [1] * (size + 1)
    for _ in range(budget - len(counts)):
        counts[max(range(size + 1), key=lambda k: wanted[k] - counts[k])] += 1
    return counts


def reshaped(candidates: DraftCandidates, count: int, factor: float) -> DraftCandidates:
    """The candidates with the probabilities of the `count` most probable ones times `factor`,
    normalised: the paper's sampling, by which more of these is left after a rejection."""
    factors = np.ones(len(candidates.tokens))
    factors[np.argsort(-candidates.probabilities, kind="stable")[:count]] = factor
    probabilities = candidates.probabilities * factors
    keys = candidates.keys + np.log(factors)
    order = np.argsort(-keys, kind="stable")
    probabilities = probabilities[order] / probabilities.sum()
    return DraftCandidates(candidates.tokens[order], probabilities, keys[order])


@dataclass(eq=False)
class _Branch:
    """Drafts prepared for one outcome, and the distributions that they were drawn from, if the
    rule compares with them; `node` is the tree index of the last one."""

    node: int
    rows: list[np.ndarray] | None
    drafts: list[int] = field(default_factory=list)


@register(
    Card(
        "saguaro",
        "speculative",
        paper="Speculative Speculative Decoding (arXiv:2603.03251), Saguaro",
        exactness="token-exact",
        summary="While drafts are verified, the next ones are prepared for every probable outcome.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly: bonus tokens are predicted with the noise that the target will"
            " use, so the paper's reshaped draft distribution is not needed",
            "with acceptance='rejection', the paper's rule, bonus tokens after a rejection are"
            " predicted by the draft model's probabilities, as in the paper; discount is the"
            " paper's factor C of the reshaped distribution, 1 by default",
            CHAIN_NOISE,
            "after a miss new drafts are made at once (the paper's just-in-time backup)",
            "once the outcome is known, only its own branch is continued",
            "bonus tokens and prepared drafts come from the draft model's 64 most probable tokens",
            "4 drafts per round by default (the paper: 6 or 7)",
        ),
        remote={
            "size": Range(1, 32),
            "fan": Range(1, 8),
            "acceptance_rate": Range(0, 1),
            "exponent": Range(0, 10),
            "acceptance": LOGIT_RULES,
            "discount": Range(0, 1),
        },
    )
)
class Saguaro(Decoder):
    """Saguaro: prepares drafts for the outcomes of a running verification.

    Args:
        size: Number of drafts per round.
        fan: Bonus tokens to prepare for after each number of accepted drafts.
        acceptance_rate: Acceptance rate, below 1; with it the same total is spread by `fan_out`.
        exponent: Exponent of `fan_out`.
        acceptance: "token-exact", "rejection", "typical" or "top-m", or a rule that reads no hidden
            states.
        discount: Factor, above 0 and at most 1, on the draft probabilities of the tokens for which
            drafts are prepared after a rejection, with acceptance="rejection": such a rejection
            then leaves more of them.
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(
        self,
        size: int = 4,
        fan: int = 3,
        acceptance_rate: float | None = None,
        exponent: float = 0.5,
        acceptance: str | Acceptance = "token-exact",
        discount: float = 1.0,
    ) -> None:
        if size < 1 or fan < 1:
            raise InvalidRequestError("saguaro needs size >= 1 and fan >= 1")
        if acceptance_rate is not None and not 0 < acceptance_rate < 1 or exponent < 0:
            raise InvalidRequestError("saguaro needs 0 < acceptance_rate < 1 and exponent >= 0")
        self.size = size
        self.fans = [fan] * (size + 1)
        if acceptance_rate is not None:
            self.fans = fan_out(size, fan * (size + 1), acceptance_rate, exponent)
        self.acceptance = logit_rule(acceptance, "saguaro")
        if not 0 < discount <= 1:
            raise InvalidRequestError(f"discount is {discount}; saguaro needs 0 < discount <= 1")
        if discount < 1 and not self.acceptance.reads_probabilities:
            raise InvalidRequestError("saguaro takes discount with acceptance='rejection' alone")
        self.discount = discount
        self.clock: Callable[[], float] = perf_counter

    def decode(self, sequence: Sequence) -> Decoding:
        with closing(draft_share(sequence, self, self.acceptance)) as share:
            yield from self._rounds(sequence, share)

    def _rounds(self, sequence: Sequence, share: DraftShare) -> Decoding:
        drafts, rows = list[int](), distribution_list(self.acceptance)
        while not sequence.finished:
            is_hit = bool(drafts)
            size = share.size(self.size) if sequence.can_draft() else 0
            if not size:  # no memory, or not worth the draft model's passes
                drafts = []
                plain = yield from verify_tree(sequence, TokenTree(), self.acceptance)
                share.observe(plain.tree, [], 0.0)
                continue
            start = self.clock()
            if not drafts:
                sequence.align(DRAFT)
                rows = distribution_list(self.acceptance)
                drafts = yield from self._draft(sequence, size, rows)
            seconds = self.clock() - start
            tree = sampled_chain(drafts[:size], rows)
            ticket = yield Submit(sequence.verify(tree))
            growing = GrowingTree(sequence)
            branches, spent = yield from beside_target(
                self._prepare(growing, tree, size, ticket), sequence, ticket, self.clock
            )
            if ticket.scores is None:
                yield Wait([ticket])
            result = self.acceptance.walk(tree, ticket.scores)
            sequence.record(tree, result.path, result.tokens, hit=is_hit, prepared=sorted(branches))
            sequence.accept(result.path, result.tokens, ticket.scores)
            growing.retain(result.tokens[:-1])
            seconds = (seconds + spent) / (sequence.cost_model.num_others() + 1)
            share.observe(tree, result.path, seconds)
            branch = branches.get(_outcome(result))
            drafts = []
            if branch is not None and len(branch.drafts) == size:
                drafts, rows = branch.drafts, branch.rows

    def _draft(
        self, sequence: Sequence, size: int, rows: list[np.ndarray] | None
    ) -> Generator[DecoderAction, Any, list[int]]:
        """Draft a chain of `size`; the distribution of each draft is appended to `rows`."""
        if self.discount == 1:
            return (yield from draft_chain(sequence, [], size, distributions=rows))
        growing, drafts, node = GrowingTree(sequence), list[int](), ROOT
        yield from growing.start()
        while len(drafts) < size and len(growing.candidates[node].tokens):
            drafts.append(self._draw(growing, node, len(drafts), rows))
            node = growing.add(drafts[-1], node)
            if len(drafts) < size:
                yield from growing.expand([node])
        return drafts

    def _draw(
        self, growing: GrowingTree, node: int, number: int, rows: list[np.ndarray] | None
    ) -> int:
        """Draft number `number` of a chain, after `node`; its distribution is appended to
        `rows`."""
        candidates = growing.candidates[node]
        if self.discount < 1:
            candidates = reshaped(candidates, self.fans[number], self.discount)
        if rows is not None:
            rows.append(candidates.dense(growing.sequence.model().spec.vocab_size))
        return int(candidates.tokens[0])

    def _prepare(
        self, growing: GrowingTree, tree: TokenTree, size: int, ticket: Ticket
    ) -> Generator[DecoderAction, Any, dict[Outcome, _Branch]]:
        """Prepare `size` drafts for every outcome in the fan-out; once the true outcome is known,
        only for that one."""
        yield from growing.start(tree.tokens)
        branches: dict[Outcome, _Branch] = {}
        for num_accepted, count in enumerate(self.fans[: len(tree) + 1]):
            excluded = tree.tokens[num_accepted] if num_accepted < len(tree) else None
            found = self._ordered(growing.candidates[num_accepted - 1], num_accepted < len(tree))
            for token in [int(one) for one in found if one != excluded][:count]:
                branches[num_accepted, token] = _Branch(
                    growing.add(token, num_accepted - 1 if num_accepted else ROOT),
                    distribution_list(self.acceptance),
                )
        active = branches
        for _ in range(size):
            if ticket.scores is not None:
                outcome = _outcome(self.acceptance.walk(tree, ticket.scores))
                active = {outcome: branches[outcome]} if outcome in branches else {}
            yield from growing.expand([branch.node for branch in active.values()])
            for branch in active.values():
                token = self._draw(growing, branch.node, len(branch.drafts), branch.rows)
                branch.drafts.append(token)
                branch.node = growing.add(token, branch.node)
        return branches

    def _ordered(self, candidates: DraftCandidates, is_rejection: bool) -> np.ndarray:
        """Candidates for a bonus token, the most probable one first: with the noise that it is
        sampled with, or without noise where a rejection rule draws it from a residual."""
        if not (is_rejection and self.acceptance.reads_probabilities):
            return candidates.tokens
        return candidates.tokens[np.argsort(-candidates.probabilities, kind="stable")]


def _outcome(result: AcceptanceResult) -> Outcome:
    return len(result.path), result.tokens[-1]
