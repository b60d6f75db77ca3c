"""What methods learn beside other requests, where passes leave out drafts or reorder them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative.draft_chains import DRAFT, TARGET
from anydecode.certification.oracles.speculative.draft_lengths import LoadedCosts
from anydecode.certification.rounds import scripted
from anydecode.decoders.framework.acceptance import AcceptanceResult
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative import online_sd, specdecpp
from anydecode.decoders.speculative.smartspec_server import ServerGoodput
from anydecode.decoders.speculative.stree import ReplayBudget
from anydecode.kernels.arithmetic import softmax
from anydecode.scoring.tree import TokenTree

PROMPTS = ["abcabcabd", "the cab had a bad cab", "h", "cabbage", "faded"]


def a_round(tree: TokenTree, path: list[int], tokens: list[int], **facts: Any) -> SpeculationRound:
    result = AcceptanceResult(path, tokens)
    return SpeculationRound(SimpleNamespace(), tree, SimpleNamespace(), result, 0.0, 0.0, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_verified", "tokens", "tested"),
    [
        (4, [5, 6, 7, 8, 1], (4, 4)),  # all accepted
        (4, [5, 6, 1], (2, 3)),  # the third is rejected
        (2, [5, 1], (1, 2)),  # the second is rejected, others were left out
        (2, [5, 6, 1], (2, 3)),  # the first one left out would have been rejected,
        (2, [5, 6, 7], (3, 3)),  # or accepted
        (0, [1], (0, 1)),
        (0, [5], (1, 1)),
    ],
)
def test_the_token_after_the_verified_drafts_tests_the_first_one_left_out(
    num_verified: int, tokens: list[int], tested: tuple[int, int]
) -> None:
    chain = TokenTree.chain([5, 6, 7, 8])
    path = [*range(min(len(tokens) - 1, num_verified))]
    assert a_round(chain.first(num_verified), path, tokens).tested(chain) == tested


def test_a_tree_size_learns_of_nodes_by_the_numbers_that_they_were_drafted_with() -> None:
    """Of four nodes, a pass has the third one before the second, and not the fourth."""
    budget = ReplayBudget(4, 0.0)
    before = budget.rates.copy()
    tree = TokenTree([7, 9, 8], [-1, 0, -1])
    budget.observe(a_round(tree, [0, 1], [7, 9, 3], numbers=[0, 2, 1]))
    changed = np.sign(budget.rates - before)
    assert changed.tolist() == [1, -1, 1, 0]


def beside_others(
    drafter: Any, llm: Any, decoder: Any, row_cost: float = 0.15
) -> list[tuple[TokenTree, Any, list[Any]]]:
    """The rounds of several requests on the shared budget: what was drafted in each, the round, and
    the text before it. A row costs `row_cost` of a pass over one."""
    found, opened = list[Any](), drafter.open

    def recording(sequence: Any) -> Any:
        session, drafted = opened(sequence), list[Any]()
        propose, observe = session.propose, session.observe

        def proposing(size: int) -> Any:
            tree = yield from propose(size)
            drafted[:] = [tree, list(sequence.all_tokens)]
            return tree

        def observing(round: SpeculationRound) -> None:
            if drafted:
                found.append((drafted[0], round, drafted[1]))
                drafted.clear()
            observe(round)

        session.propose, session.observe = proposing, observing
        return session

    drafter.open = recording
    llm.cost_model = LoadedCosts(llm.engine, row_cost)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    llm.generate(PROMPTS, decoder=decoder, **options)
    return found


def open_llm() -> Any:
    """Of which each request drafts four tokens, and passes leave out those that save no time."""
    llm = scripted(TARGET, DRAFT)
    llm.resources = replace(llm.resources, draft_policy=_AllDrafts())
    return llm


class _AllDrafts(ServerGoodput):
    """No draft is left out before it is made."""

    def count(self, share: Any) -> int:
        return self.max_drafts


def test_online_sd_learns_from_every_first_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft that differs from the tokens that the round generates is rejected."""
    places = list[tuple[int, int]]()
    monkeypatch.setattr(
        online_sd.OnlineDrafter,
        "add_example",
        lambda self, example: places.append((example.request, example.position)),
    )
    with open_llm() as llm:
        decoder: Any = llm.decoder("online-sd")
        found = beside_others(decoder.drafter, llm, decoder)
    expected, num_cut = list[tuple[int, int]](), 0
    for drafted, round, text in found:
        for number, (token, emitted) in enumerate(
            zip(drafted.tokens, round.result.tokens, strict=False)
        ):
            if token != emitted:
                expected.append((round.sequence.id, len(text) + number))
                num_cut += len(round.tree) < len(drafted)
                break
    assert places == expected
    assert num_cut > 5


def test_specdecpp_learns_from_all_drafts_of_which_the_target_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """min(1, p / q) of the verified drafts and of the one after them, if they were fed."""
    labels = list[float]()
    monkeypatch.setattr(
        specdecpp.OnlineHead, "add", lambda self, state, label: labels.append(label)
    )
    with open_llm() as llm:
        decoder: Any = llm.decoder("specdec++:size=6")
        found = beside_others(decoder.drafter, llm, decoder)
    expected, num_cut = list[float](), 0
    for drafted, round, text in found:
        for number, token in enumerate(drafted.tokens[:-1][: len(round.tree) + 1]):
            seen = (*text, *drafted.tokens[:number])
            p, q = (softmax(logits(seen) / 0.8)[token] for logits in (TARGET, DRAFT))
            expected.append(min(1.0, p / q))
            num_cut += len(round.tree) < len(drafted)
    assert labels == pytest.approx(expected, abs=1e-4)
    assert num_cut > 5


def test_a_tree_size_sees_the_nodes_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[list[int], list[int]]]()
    observe = ReplayBudget.observe

    def observing(self: ReplayBudget, round: SpeculationRound) -> None:
        seen.append((list(round.numbers), round.tree.tokens))
        observe(self, round)

    monkeypatch.setattr(ReplayBudget, "observe", observing)
    with open_llm() as llm:
        built: Any = llm.decoder("stree:drafter=token-recycling")
        found = beside_others(built.drafter, llm, built, row_cost=0.01)
    numbers = [one for one, _ in seen]
    assert len(found) == len(seen)
    for (drafted, round, _), (order, tokens) in zip(found, seen, strict=True):
        assert round.tree.tokens == tokens == [drafted.tokens[number] for number in order]
    assert any(one != list(range(len(one))) for one in numbers)
