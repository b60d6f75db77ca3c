"""SmartSpec for all requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.certification.oracles.speculative.draft_lengths import LoadedCosts
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    early_exit_checkpoint,
    with_drafter,
)
from anydecode.certification.tiny_blocks import dspark_checkpoint
from anydecode.certification.tiny_heads import hydra_checkpoint
from anydecode.decoders.framework import speculation
from anydecode.decoders.framework.speculation import by_probability
from anydecode.decoders.speculative import smartspec_server
from anydecode.decoders.speculative.smartspec_server import (
    AcceptanceCounts,
    ServerGoodput,
    ServerShare,
    SourceRates,
)
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.goodput import useful_counts
from anydecode.scoring.tree import TokenTree
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
    monkeypatch.setattr(ServerShare, "size", lambda self, own: own)
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_limit_by_the_own_draft_alone(monkeypatch: Patch) -> None:
    counts = ServerGoodput.count

    def alone(self: ServerGoodput, share: ServerShare) -> int:
        running, self.running = self.running, {share: None}
        found = counts(self, share)
        self.running = running
        return found

    monkeypatch.setattr(ServerGoodput, "count", alone)
    assert_rejected("smartspec-server")


def test_certificate_rejects_drafts_that_every_pass_must_run(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ServerShare, "chances", lambda self, tree: ())
    assert_rejected("smartspec-server")


def test_certificate_rejects_siblings_as_probable_as_the_first(monkeypatch: Patch) -> None:
    def by_depth(self: ServerShare, tree: TokenTree) -> list[float]:
        rates = [*self.rates[:, 0], *[self.rates[-1, 0]] * len(tree)]
        return [float(np.prod(rates[: tree.depth(node)])) for node in range(len(tree))]

    monkeypatch.setattr(ServerShare, "chances", by_depth)
    assert_rejected("smartspec-server")


def test_certificate_rejects_trees_whose_last_nodes_are_left_out(monkeypatch: Patch) -> None:
    from anydecode.certification.oracles.speculative import smartspec_server as oracle

    monkeypatch.setattr(oracle, "by_probability", lambda tree, chances: (tree, chances, ()))
    assert_rejected("smartspec-server")


def test_certificate_rejects_times_that_do_not_fade(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SourceRates, "forget_seconds", lambda self: None)
    assert_rejected("smartspec-server")


def test_siblings_stay_in_the_order_by_which_their_rates_are_known() -> None:
    tree = TokenTree([10, 20, 11, 21], [-1, -1, 0, 1])
    ordered, chances, numbers = by_probability(tree, [0.3, 0.5, 0.1, 0.4])
    assert (ordered.tokens, ordered.parents) == ([10, 20, 21, 11], [-1, -1, 1, 0])
    assert (chances, numbers) == ([0.3, 0.3, 0.3, 0.1], [0, 1, 3, 2])


def test_certificate_rejects_counts_that_do_not_fade(monkeypatch: Patch) -> None:
    made = AcceptanceCounts.__init__
    monkeypatch.setattr(
        AcceptanceCounts, "__init__", lambda self, num_rounds: made(self, num_rounds * 1000)
    )
    assert_rejected("smartspec-server")


def test_certificate_rejects_rates_of_the_source_alone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ServerShare, "rates", property(lambda self: self.source.rates()))
    assert_rejected("smartspec-server")


def test_certificate_rejects_a_request_alone_that_is_limited(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ServerShare, "size", lambda self, own: min(own, self.server.count(self)))
    assert_rejected("smartspec-server")


def test_certificate_rejects_another_maximum(monkeypatch: Patch) -> None:
    made = ServerGoodput.__init__
    monkeypatch.setattr(
        ServerGoodput, "__init__", lambda self, max_drafts=7: made(self, max_drafts)
    )
    assert_rejected("smartspec-server")


def test_certificate_rejects_undrafted_passes_at_full_cost(monkeypatch: Patch) -> None:
    monkeypatch.setattr(smartspec_server, "MAX_UNDRAFTED", 1)
    assert_rejected("smartspec-server")


def test_certificate_rejects_single_steps_without_drafts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(speculation, "can_burst", lambda sequence, session: False)
    assert_rejected("smartspec-server")


def test_certificate_rejects_texts_of_other_rules_that_are_limited(monkeypatch: Patch) -> None:
    from anydecode.certification.oracles.speculative import smartspec_server as oracle

    def limited(sequence: Any, source: object, acceptance: object) -> Any:
        return sequence.draft_policy.open(sequence, source)

    monkeypatch.setattr(oracle, "draft_share", limited)
    assert_rejected("smartspec-server")


@pytest.mark.parametrize(
    "decoder",
    [
        "suffix",
        "token-recycling:tree=published",
        "token-recycling:row_cost=0.01",
        "lookahead",
        "opt-tree",
        "rsd",
        "stand",
        "taps",
        "jacobi",
        "layerskip:layers=2",
        "pearl",
        "saguaro",
    ],
)
@pytest.mark.parametrize(
    "drafting", ["smartspec-server", pytest.param("fixed", marks=pytest.mark.slow)]
)
def test_drafts_of_several_requests_keep_the_text(decoder: str, drafting: str) -> None:
    """Of which passes leave out rows, or not."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    prompts = ["abcabcabcabc", "aabbaabbaabb", "xyxyxyxy", "zzzzzz"]
    with scripted_llm(drafting=drafting) as llm:
        plain = llm.generate(prompts, decoder="autoregressive", **options)
        drafted = llm.generate(prompts, decoder=decoder, **options)
        llm.engine.check_integrity()
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.parametrize("cost", [0.02, 0.3])
@pytest.mark.parametrize(
    ("decoder", "drafter"),
    [
        ("eagle", eagle3_checkpoint),
        ("dflash:tree=true", dspark_checkpoint),
        ("hydra", hydra_checkpoint),
        ("kangaroo", partial(early_exit_checkpoint, has_mlp=False)),
    ],
)
def test_drafters_that_read_states_keep_the_text_in_company(
    decoder: str, drafter: Callable[..., Checkpoint], cost: float
) -> None:
    """Where they draft in some rounds only, and states of other positions are missing."""
    options: dict[str, Any] = {"max_tokens": 32, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    prompts = ["the cat sat on the mat", "abcabcabcabc", "zq", "one two three one two"]
    with with_drafter(drafter, drafting="smartspec-server", cache_positions=2048) as llm:
        llm.cost_model = LoadedCosts(llm.engine, cost)
        plain = llm.generate(prompts, decoder="autoregressive", **options)
        drafted = [llm.generate(prompts, decoder=decoder, **options) for _ in range(2)]
        llm.engine.check_integrity()
    for answers in drafted:
        assert [one.tokens for one in answers] == [one.tokens for one in plain]


@pytest.mark.parametrize("count", [0, 3])
def test_passes_return_no_states_while_no_drafts_are_wanted(count: int, monkeypatch: Patch) -> None:
    num_observed = 0
    observe = DraftStates.observe_target

    def counted(self: DraftStates, *given: Any) -> None:
        nonlocal num_observed
        num_observed += 1
        observe(self, *given)

    monkeypatch.setattr(DraftStates, "observe_target", counted)
    monkeypatch.setattr(ServerShare, "size", lambda self, own, can_burst=False: count)
    with with_drafter(eagle3_checkpoint, drafting="smartspec-server") as llm:
        llm.generate("abcabcabc", decoder="eagle", max_tokens=8, ignore_eos=True)
    assert (num_observed > 0) == (count > 0)


def test_engines_that_are_given_one_object_count_their_requests_apart() -> None:
    limit = ServerGoodput(max_drafts=3)
    with scripted_llm(drafting=limit) as one, scripted_llm(drafting=limit) as other:
        policies: list[Any] = [llm.resources.draft_policy for llm in (one, other)]
        sequence = one.request("abcabc", max_tokens=20).jobs[0].sequence
        share = sequence.draft_policy.open(sequence, one)
    assert [policy.max_drafts for policy in policies] == [3, 3]
    assert [list(policy.running) for policy in (*policies, limit)] == [[share], [], []]


def test_a_limit_of_no_drafts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_drafts is 0"):
        ServerGoodput(0)
