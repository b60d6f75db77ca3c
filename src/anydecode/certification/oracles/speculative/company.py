"""Checks of drafting methods beside other requests on the default draft policy, which limits how
much all of them together draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, equal_tokens
from anydecode.certification.oracles.speculative.draft_lengths import LoadedCosts
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.speculative.smartspec_server import (
    ServerGoodput,
    ServerShare,
    SourceRates,
)
from anydecode.scoring.draft_policy import DraftedSequence
from anydecode.scoring.tree import TokenTree

#: The cost of a row, relative to a pass over one, with which many drafts pay and some do not.
ROW_COST = 0.01


class _WatchedShare(ServerShare):
    """Counts the rounds of a request while others ran, and those of them with drafts."""

    num_rounds = num_drafting = 0
    _is_beside = False

    def size(self, own: int, can_burst: bool = False) -> int:
        self._is_beside = self.sequence.cost_model.num_others() > 0
        return super().size(own, can_burst)

    def observe(
        self, tree: TokenTree, path: Seq[int], seconds: float, is_whole: bool = False
    ) -> None:
        super().observe(tree, path, seconds, is_whole)
        if self._is_beside:
            self.num_rounds += 1
            self.num_drafting += len(tree) > 0


class _WatchedPolicy(ServerGoodput):
    """The default policy; keeps the shares that it has opened."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: list[_WatchedShare] = []

    def share(self, sequence: DraftedSequence, source: SourceRates) -> ServerShare:
        self.shares.append(_WatchedShare(self, sequence, source))
        return self.shares[-1]


def company_checks(
    name: str,
    open_llm: Callable[[], LLM],
    decoder: str | Decoder,
    prompts: Seq[Any],
    expected: Seq[list[int]],
    **options: Any,
) -> Iterator[Check]:
    """Checks that texts of a method that are generated together on the default policy are the
    expected ones, and that it drafts for them; nothing if it does not draft.

    Args:
        name: What is tested.
        open_llm: Opens the models.
        decoder: The method, which drafts for these prompts where nothing limits it.
        prompts: The prompts.
        expected: The tokens of texts that are generated alone.
        options: Options of the requests.
    """
    policy = _WatchedPolicy()
    with open_llm() as llm:
        llm.resources = replace(llm.resources, draft_policy=policy)
        llm.cost_model = LoadedCosts(llm.engine, ROW_COST)
        answers = llm.generate(list(prompts), decoder=decoder, **options)
        llm.engine.check_integrity()
    if not policy.shares:
        return
    tokens = [one.tokens for one in answers]
    yield equal_tokens(f"in company on the default policy, {name}", tokens, list(expected))
    drafting = sum(share.num_drafting for share in policy.shares)
    rounds = sum(share.num_rounds for share in policy.shares)
    yield Check(f"drafts in company, {name}", drafting > 0, f"in {drafting} of {rounds} rounds")
