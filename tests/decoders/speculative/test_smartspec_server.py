"""SmartSpec for all requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.decoders.speculative import smartspec_server
from anydecode.decoders.speculative.smartspec_server import DraftingRequests, SharedBudget
from anydecode.errors import InvalidRequestError
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected

Patch = pytest.MonkeyPatch


def test_certificate() -> None:
    assert_certified("smartspec-server")


def test_certificate_rejects_later_drafts_as_probable_as_the_first(monkeypatch: Patch) -> None:
    def even(chances: list[list[float]], num: int, cost: Callable[[int], float]) -> list[int]:
        return useful_counts([row[:1] * len(row) for row in chances], num, cost)

    monkeypatch.setattr(smartspec_server, "useful_counts", even)
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_limit_without_effect(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SharedBudget, "size", lambda self, sequence: self.own.size(sequence))
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_limit_by_the_own_draft_alone(monkeypatch: Patch) -> None:
    counts = DraftingRequests._useful_counts

    def alone(self: DraftingRequests, sequence: Sequence) -> dict[Sequence, int]:
        running, self.running = self.running, {sequence: self.running[sequence]}
        found = counts(self, sequence)
        self.running = running
        return found

    monkeypatch.setattr(DraftingRequests, "_useful_counts", alone)
    assert_rejected("smartspec-server")


def test_certificate_rejects_drafts_that_every_pass_must_run(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SharedBudget, "chances", lambda self, tree: ())
    assert_rejected("smartspec-server")


def test_certificate_rejects_siblings_that_count_as_chains(monkeypatch: Patch) -> None:
    def by_depth(self: SharedBudget, tree: Any) -> list[float]:
        return [self.rate ** tree.depth(node) for node in range(len(tree))]

    monkeypatch.setattr(SharedBudget, "chances", by_depth)
    assert_rejected("smartspec-server")


def test_certificate_rejects_another_maximum(monkeypatch: Patch) -> None:
    made = smartspec_server.ServerGoodput.__init__
    monkeypatch.setattr(
        smartspec_server.ServerGoodput,
        "__init__",
        lambda self, **given: made(self, **{**given, "max_drafts": 7}),
    )
    assert_rejected("smartspec-server")


@pytest.mark.parametrize(
    "decoder", ["suffix", "token-recycling:row_cost=0.01", "lookahead", "opt-tree", "rsd"]
)
def test_trees_of_several_requests_keep_the_text(decoder: str) -> None:
    """Of which passes leave out rows."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    prompts = ["abcabcabcabc", "aabbaabbaabb", "xyxyxyxy", "zzzzzz"]
    with scripted_llm(drafting="smartspec-server") as llm:
        plain = llm.generate(prompts, decoder="autoregressive", **options)
        drafted = llm.generate(prompts, decoder=decoder, **options)
        llm.engine.check_integrity()
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_a_limit_of_no_drafts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_drafts is 0"):
        smartspec_server.ServerGoodput(0)
