"""Speculation on the outcome of a verification while it runs (Kumar et al., "Speculative
Speculative Decoding", arXiv:2603.03251: SSD with Saguaro's fan-out)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.acceptance import AcceptanceResult, TokenExact
from anydecode.decoders.speculative.draft_model import DRAFT, draft_chain
from anydecode.decoders.speculative.draft_trees import GrowingTree
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import DecoderAction, Decoding, Submit, Ticket, Wait
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.tree import ROOT, TokenTree

#: How many drafts were accepted, and the token that came behind them.
Outcome = tuple[int, int]


def fan_out(size: int, budget: int, acceptance: float, exponent: float) -> list[int]:
    """How many bonus tokens to prepare for after k = 0..`size` accepted drafts, `budget` in all:
    F_k in proportion to a^(k / (1 + r)), and the last, where no draft is excluded, to
    a^(size / (1 + r)) (1 - a)^(-1 / (1 + r)). `acceptance` a is the rate at which drafts are
    accepted; misses fall with the fan-out like F^-`exponent`. At least one each."""
    power = 1 / (1 + exponent)
    shares = [acceptance ** (k * power) for k in range(size + 1)]
    shares[-1] *= (1 - acceptance) ** -power
    return [max(1, round(budget * share / sum(shares))) for share in shares]


@dataclass(eq=False)
class _Branch:
    """Drafts prepared for one outcome; `node` is the last one's place in the tree."""

    node: int
    drafts: list[int] = field(default_factory=list)


@register(
    Card(
        "saguaro",
        "speculative",
        paper="Speculative Speculative Decoding (arXiv:2603.03251), Saguaro",
        exactness="token-exact",
        summary="While drafts are verified, the next drafts are made for every likely outcome.",
        needs=("draft model",),
        works_with=("constraints", "samplers", "batches"),
        deviations=(
            "verified token-exactly; bonus tokens are guessed with the noise the target will use,"
            " so the paper's reshaped draft distribution is not needed",
            "a miss drafts at once (the paper's jit backup)",
            "once the outcome is known, only its own branch goes on",
            "bonus tokens and prepared drafts come from the draft model's 64 likeliest tokens",
            "4 drafts a round by default (the paper: 6 or 7)",
        ),
    )
)
class Saguaro(Decoder):
    """`size` drafts a round; `fan` bonus tokens are prepared for after each number of accepted
    drafts. With `acceptance` (a rate below 1) the same total is spread by `fan_out`."""

    runners = (DRAFT,)

    def __init__(
        self, size: int = 4, fan: int = 3, acceptance: float | None = None, exponent: float = 0.5
    ) -> None:
        if size < 1 or fan < 1:
            raise InvalidRequestError("saguaro needs size and fan of at least 1")
        if acceptance is not None and not 0 < acceptance < 1 or exponent < 0:
            raise InvalidRequestError("saguaro needs 0 < acceptance < 1 and exponent >= 0")
        self.size = size
        self.fans = [fan] * (size + 1)
        if acceptance is not None:
            self.fans = fan_out(size, fan * (size + 1), acceptance, exponent)
        self.acceptance = TokenExact()

    def decode(self, sequence: Sequence) -> Decoding:
        drafts: list[int] = []
        while not sequence.finished:
            hit = bool(drafts)
            if not drafts:
                sequence.align(DRAFT)
                drafts = yield from draft_chain(sequence, [], self.size)
            tree = TokenTree.chain(drafts)
            ticket = yield Submit(sequence.verify(tree))
            growing = GrowingTree(sequence)
            branches = yield from self._prepare(growing, tree, ticket)
            if ticket.scores is None:
                yield Wait([ticket])
            verdict = self.acceptance.walk(tree, ticket.scores)
            sequence.record(tree, verdict.path, verdict.tokens, hit=hit, prepared=sorted(branches))
            sequence.accept(verdict.path, verdict.tokens, ticket.scores)
            growing.keep(verdict.tokens[:-1])
            branch = branches.get(_outcome(verdict))
            drafts = branch.drafts if branch and len(branch.drafts) == self.size else []

    def _prepare(
        self, growing: GrowingTree, tree: TokenTree, ticket: Ticket
    ) -> Generator[DecoderAction, Any, dict[Outcome, _Branch]]:
        """Drafts for every outcome in the fan-out; for the true one only once it is known."""
        yield from growing.start(tree.tokens)
        branches: dict[Outcome, _Branch] = {}
        for kept, count in enumerate(self.fans):
            excluded = tree.tokens[kept] if kept < self.size else None
            tokens = [int(t) for t in growing.guesses[kept - 1].tokens if t != excluded]
            for token in tokens[:count]:
                branches[kept, token] = _Branch(growing.add(token, kept - 1 if kept else ROOT))
        active = branches
        for _ in range(self.size):
            if ticket.scores is not None:
                outcome = _outcome(self.acceptance.walk(tree, ticket.scores))
                active = {outcome: branches[outcome]} if outcome in branches else {}
            yield from growing.expand([branch.node for branch in active.values()])
            for branch in active.values():
                token = int(growing.guesses[branch.node].tokens[0])
                branch.drafts.append(token)
                branch.node = growing.add(token, branch.node)
        return branches


def _outcome(verdict: AcceptanceResult) -> Outcome:
    return len(verdict.path), verdict.tokens[-1]
