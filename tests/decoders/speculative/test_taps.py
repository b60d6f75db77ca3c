"""TAPS passes its certificate; wrong compositions do not."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.oracles.speculative import taps as oracle
from anydecode.certification.rounds import scripted
from anydecode.certification.tiny import with_drafter
from anydecode.decoders.speculative import taps
from anydecode.decoders.speculative.draft_trees import TreeDrafter
from anydecode.decoders.speculative.taps import Member, TapsDrafter
from anydecode.errors import AnydecodeError
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected
from drafted_texts import PROMPTS, generate, num_accepted

merge_trees = taps.merge_trees


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("taps")


def test_trees_merged_one_after_the_other_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turn(trees: list[tuple[str, TokenTree]], size: int) -> TokenTree:
        merged = TokenTree(sources=[])
        assert merged.sources is not None
        for name, tree in trees:
            nodes = {-1: -1}
            for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
                child = merged.child(nodes[parent], token) if parent in nodes else None
                if child is None and parent in nodes and len(merged) < size:
                    child = merged.add(token, nodes[parent])
                    merged.sources.append(name)
                if child is not None:
                    nodes[node] = child
        return merged

    monkeypatch.setattr(taps, "merge_trees", in_turn)
    assert_rejected("taps")


def test_the_first_tree_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "merge_trees", lambda trees, size: merge_trees(trees[:1], size))
    assert_rejected("taps")


def test_a_confidence_from_the_past_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = property(lambda self: self._num_accepted / self._num_drafted)
    monkeypatch.setattr(Member, "confidence", rate)
    assert_rejected("taps")


def test_the_least_confident_first_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    confidence = Member.confidence.fget
    monkeypatch.setattr(Member, "confidence", property(lambda self: -confidence(self)))
    assert_rejected("taps")


def test_drafters_without_probabilities_have_the_rate_of_their_first_drafts() -> None:
    member = Member("prompt-lookup", None)
    rates = []
    for accepted in (True, True, False):
        member.tree = TokenTree.chain([5])
        member.update([5 if accepted else 6])
        rates.append(member.confidence)
    assert rates == pytest.approx([1.9 / 2.8, 2.71 / 3.52, 2.439 / 4.168])
    member.tree = TokenTree.chain([5], confidence=0.25)
    assert member.confidence == 0.25


def test_one_draft_model_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    members = TapsDrafter._members

    def first(self: TapsDrafter, sequence: Any) -> Any:
        sequence.draft_runners = sequence.draft_runners[:1]
        return members(self, sequence)

    monkeypatch.setattr(TapsDrafter, "_members", first)
    assert_rejected("taps")


def test_one_draft_model_for_all_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeDrafter, "on", lambda self, runner: self)
    assert_rejected("taps")


@pytest.mark.slow
def test_states_of_other_layers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafter reads the states of its own layers, whatever those of the others are."""
    observe = DraftStates.observe_target

    def shifted(self: DraftStates, span: Any, first: int, states: list[Any]) -> None:
        observe(self, span, first, states[-1:] * len(states))

    monkeypatch.setattr(DraftStates, "observe_target", shifted)
    assert_rejected("taps")


@pytest.mark.one_in(3)  # an odd number: both temperatures
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("decoder", ["taps", "taps:drafters=eagle,route=true"])
def test_several_drafters_leave_the_text_as_it_is(decoder: str, temperature: float) -> None:
    """In a batch, with cached prefixes, in chunks, and preempted."""
    options: dict[str, Any] = {"cache_positions": 420, "row_budget": 16}
    with with_drafter(*oracle.READERS, **options) as llm:
        drafted = generate(llm, PROMPTS, decoder, temperature=temperature)
        llm.engine.check_integrity()
    with with_drafter(**options) as llm:
        plain = generate(llm, PROMPTS, "autoregressive", temperature=temperature)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    sources = {
        source for one in drafted for round in one.trace for source in round["sources"] or ()
    }
    assert {"eagle on draft", "eagle on draft-2"} <= sources
    assert num_accepted(drafted) > 20


def test_other_methods_use_the_first_draft_model() -> None:
    texts = []
    for drafts in (oracle.DRAFTS, oracle.DRAFTS[:1]):
        with scripted(oracle.LOGITS, drafts) as llm:
            texts.append(generate(llm, "abcabc", "eagle").trace)
    for one, other in zip(*texts, strict=True):
        assert one["drafted"] == other["drafted"]


@pytest.mark.parametrize(
    ("decoder", "drafts", "message"),
    [
        ("taps:drafters=eagle", 1, "taps has 1 drafter"),
        ("taps:drafters=eagle+suffix", 0, "taps has 1 drafter"),
        ("taps:drafters=eagle+medusa", 2, "one method with a draft model"),
        ("taps:drafters=rapid+suffix", 2, "one draft model only"),
    ],
)
def test_refusals(decoder: str, drafts: int, message: str) -> None:
    with (
        scripted(oracle.LOGITS, oracle.DRAFTS[:drafts]) as llm,
        pytest.raises(AnydecodeError, match=message),
    ):
        llm.generate("abc", decoder=decoder)
