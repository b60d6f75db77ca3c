"""Drafters without a model: oracle tests, the errors their cards name, and rejected requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anydecode import catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.rounds import accepted, rounds, scripted, wordy
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.aded import Search
from anydecode.decoders.speculative.aggressive import InputPointer
from anydecode.decoders.speculative.copyspec import RollingIndex
from anydecode.decoders.speculative.static_trees import TreeShape, worthwhile
from anydecode.decoders.speculative.suffix import SuffixAutomaton, SuffixDrafter, likely_tree
from anydecode.decoders.speculative.token_recycling import TokenRecyclingDrafter
from anydecode.errors import InvalidRequestError
from anydecode.scoring.score import Scores
from anydecode.scoring.tree import ROOT, TokenTree

MODEL_FREE = (
    "prompt-lookup",
    "copyspec",
    "aggressive",
    "suffix",
    "token-recycling",
    "stand",
    "aded",
    "lookahead",
    "jacobi",
    "autoregressive",
    "multi-step",
    "layer-draft",
)
CHAINS = ("copyspec", "aggressive", "suffix", "token-recycling", "stand", "aded", "lookahead")


@pytest.mark.parametrize("key", MODEL_FREE)
def test_oracle_test_passes(key: str) -> None:
    checks = list(load_oracle_tests()[key]())
    assert checks and [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("key", CHAINS)
def test_prompt_lookup_fails_the_oracle_tests_of_other_methods(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = catalogue.entries()[key]
    replacement = replace(entry, build=lambda **_: catalogue.build("prompt-lookup"))
    monkeypatch.setitem(catalogue.entries(), key, replacement)
    assert not all(check.passed for check in load_oracle_tests()[key]())


class _AcceptsUnverified(Acceptance):
    """Broken: accepts the first draft without comparing it."""

    exactness = "token-exact"

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        path = tree.children(ROOT)[:1]
        tokens = [tree.tokens[node] for node in path]
        return AcceptanceResult(path, [*tokens, scores.sample(path[-1] + 1 if path else 0)])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("key", [key for key in MODEL_FREE if key not in ("layer-draft",)])
def test_tokens_equal_plain_decoding_in_a_batch(key: str, temperature: float) -> None:
    prompts = ["abcabcabd", "the cab had a bad cab", "h"]
    options = {"temperature": temperature, "seed": 4, "max_tokens": 40, "ignore_eos": True}
    with scripted(wordy()) as llm:
        plain = [answer.tokens for answer in llm.generate(prompts, **options)]
        drafted = llm.generate(prompts, decoder=key, **options)
        assert [answer.tokens for answer in drafted] == plain
        llm.engine.check_integrity()


def test_unverified_draft_changes_the_output() -> None:
    method = catalogue.build("prompt-lookup")
    wrong = Speculative(method.drafter, 7, _AcceptsUnverified())
    with scripted(wordy()) as llm:
        plain = llm.generate("abcabcabd", max_tokens=40, ignore_eos=True).tokens
        assert llm.generate("abcabcabd", decoder=wrong, max_tokens=40).tokens != plain


@pytest.mark.parametrize(
    ("key", "max_drafts"),
    [("prompt-lookup", 7), ("copyspec", 10), ("token-recycling:tree=published", 80), ("aded", 6)],
)
def test_drafts_have_at_most_the_given_size(key: str, max_drafts: int) -> None:
    with scripted(wordy()) as llm:
        found = rounds(llm, key, "abcabcabd", 60)
    assert 0 < max(len(one.tokens) for one in found) <= max_drafts


@pytest.mark.parametrize(
    "decoder",
    [
        "prompt-lookup:size=0",
        "prompt-lookup:max_ngram=1,min_ngram=2",
        "copyspec:ngram=0",
        "aggressive:start=-1",
        "suffix:min_probability=0",
        "token-recycling:tree=round",
        "stand:max_ngram=1",
        "aded:depth=0",
        "lookahead:ngram=1",
        "jacobi:block=-1",
        "taps:drafters=copyspec",
        "taps:drafters=copyspec+lookahead",
        "bandit:memory=0",
        "bandit:fixed=-1",
        "bandit:drafter=5",
        "smartspec:fixed=0,per_row=0",
        "jacobi:pad=-5",
        "jacobi:pad=259",
        "aggressive:start=3",
        "token-recycling:row_cost=-1",
        "stand:row_cost=-1",
        "suffix:min_probability=nan",
        "copyspec:size=2.5",
        "copyspec:size=many",
        "taps:route=5",
    ],
)
def test_invalid_parameters_have_one_line_errors(decoder: str) -> None:
    with scripted(wordy()) as llm, pytest.raises(InvalidRequestError) as refusal:
        llm.generate("abc", decoder=decoder)
    assert "\n" not in str(refusal.value)


def test_shapes_order_parents_before_children() -> None:
    shape = TreeShape.of([(0, 0), (1,), (0,), (0, 1)])
    assert shape.parents == (ROOT, ROOT, 0, 0) and shape.ranks == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="hangs on"):
        TreeShape.of([(0, 0)])


def test_missing_candidate_removes_its_subtree() -> None:
    shape = TreeShape.of([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    guesses = {ROOT: [5], 0: [6], 1: [7]}
    tree = shape.fill(lambda tree, node: guesses.get(node, []), 5)
    assert (tree.tokens, tree.parents) == ([5, 6, 7], [ROOT, 0, 1])


def test_worthwhile_keeps_more_nodes_when_rows_are_cheap() -> None:
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    expensive, fair, cheap = (len(worthwhile(paths, (0.5, 0.2), cost)) for cost in (0.6, 0.1, 1e-6))
    assert (expensive, cheap) == (1, 5) and expensive < fair < cheap


def test_copyspec_finds_the_first_occurrence_of_its_gram() -> None:
    index = RollingIndex(3)
    index.extend([1, 2, 3, 9, 1, 2, 3, 8, 1, 2])
    assert index.match() is None
    index.extend([3])
    assert index.match() == 0


def test_copyspec_bonus_token_follows_the_accepted_tokens() -> None:
    """When the last copied token is wrong, the bonus token must follow the accepted ones."""
    options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    with scripted(wordy()) as llm:
        found = rounds(llm, "copyspec:size=2,ngram=1", "the cab had a bad cab", 40, **options)
        plain = llm.generate("the cab had a bad cab", max_tokens=40, **options).tokens
    assert any(len(one.tokens) == 2 and len(one.accepted) == 1 for one in found)
    assert [token for one in found for token in one.generated][:40] == plain


def test_input_pointer_restarts_at_a_unique_suffix() -> None:
    pointer = InputPointer([1, 2, 3, 1, 2, 4])
    positions = []
    for token in (2, 1, 2, 4, 9, 3):
        pointer.advance(token)
        positions.append(pointer.position)
    # 2 is ambiguous, as are 1 and "1 2"; "2 1 2" does not occur; 4 and 3 occur once.
    assert positions == [None, None, None, 6, None, 3]


def test_token_recycling_keeps_the_last_of_equal_tokens() -> None:
    drafter = TokenRecyclingDrafter(TreeShape.chain(3))
    drafter.successors.update(zip([4, 4], [[1], [2]], strict=True))
    assert drafter.successors[4] == [2]


def test_suffix_automaton_drafts_by_frequency() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 4, 1]:
        automaton.extend(token)
    state = automaton.next[automaton.next[0][1]][2]
    assert automaton.counts[state] == 3
    tree, total = likely_tree(automaton, state, 2, 3, 0.1)
    assert tree.tokens == [4, 1] and total == pytest.approx(2 / 3 + 2 / 3)


def test_suffix_memory_is_bounded() -> None:
    drafter = SuffixDrafter(memory=10)
    for _ in range(5):
        drafter.learn([1, 2, 3, 4])
        assert drafter.past_tokens <= 10
    drafter.clear()
    assert drafter.past_tokens == 0 and len(drafter.past.next) == 1


def test_search_stops_without_successors() -> None:
    assert len(Search(4).run({}, lambda tree, node: {}, 6)) == 0
    assert Search(4).run({3: 1.0}, lambda tree, node: {}, 6).tokens == [3]


def test_clear_resets_learned_drafts() -> None:
    with scripted(wordy()) as llm:
        cold, warm = (accepted(rounds(llm, "token-recycling", "hbhb")) for _ in range(2))
        llm.clear()
        again = accepted(rounds(llm, "token-recycling", "hbhb"))
    assert warm > cold == again
