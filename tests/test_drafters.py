"""Drafters that need no model: mechanisms, the bugs their cards name, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anydecode import catalogue
from anydecode.decoders.speculative.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.speculative.aded import Search
from anydecode.decoders.speculative.aggressive import InputPointer
from anydecode.decoders.speculative.copyspec import RollingIndex
from anydecode.decoders.speculative.core import Speculative
from anydecode.decoders.speculative.static_trees import Shape, worthwhile
from anydecode.decoders.speculative.suffix import SuffixAutomaton, SuffixDrafter, likely_tree
from anydecode.decoders.speculative.token_recycling import TokenRecyclingDrafter
from anydecode.errors import InvalidRequestError
from anydecode.evaluation.certify import load_oracle_tests
from anydecode.evaluation.rounds import accepted, rounds, scripted, wordy
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
    "following",
    "layer-draft",
)
CHAINS = ("copyspec", "aggressive", "suffix", "token-recycling", "stand", "aded", "lookahead")


@pytest.mark.parametrize("key", MODEL_FREE)
def test_mechanism(key: str) -> None:
    checks = list(load_oracle_tests()[key]())
    assert checks and [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("key", CHAINS)
def test_prompt_lookup_does_not_pass_as_another_method(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = catalogue.entries()[key]
    impostor = replace(entry, build=lambda **_: catalogue.build("prompt-lookup"))
    monkeypatch.setitem(catalogue.entries(), key, impostor)
    assert not all(check.passed for check in load_oracle_tests()[key]())


class _Gullible(Acceptance):
    """A deliberate mistake: keeps the first draft unseen."""

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


def test_the_comparison_catches_an_unverified_draft() -> None:
    method = catalogue.build("prompt-lookup")
    wrong = Speculative(method.drafter, 7, _Gullible())
    with scripted(wordy()) as llm:
        plain = llm.generate("abcabcabd", max_tokens=40, ignore_eos=True).tokens
        assert llm.generate("abcabcabd", decoder=wrong, max_tokens=40).tokens != plain


@pytest.mark.parametrize(
    ("key", "most"),
    [("prompt-lookup", 7), ("copyspec", 10), ("token-recycling:tree=published", 80), ("aded", 6)],
)
def test_drafts_stay_within_their_size(key: str, most: int) -> None:
    with scripted(wordy()) as llm:
        found = rounds(llm, key, "abcabcabd", 60)
    assert 0 < max(len(one.tokens) for one in found) <= most


@pytest.mark.parametrize(
    "decoder",
    [
        "prompt-lookup:size=0",
        "prompt-lookup:longest=1,shortest=2",
        "copyspec:gram=0",
        "aggressive:start=-1",
        "suffix:least=0",
        "token-recycling:tree=round",
        "stand:longest=1",
        "aded:depth=0",
        "lookahead:ngram=1",
        "jacobi:block=-1",
        "taps:parts=copyspec",
        "taps:parts=copyspec+lookahead",
        "bandit:memory=0",
        "bandit:fixed=-1",
        "bandit:drafter=5",
        "smartspec:fixed=0,per_row=0",
        "jacobi:pad=-5",
        "jacobi:pad=259",
        "aggressive:start=3",
        "token-recycling:row_cost=-1",
        "stand:row_cost=-1",
        "suffix:least=nan",
        "copyspec:size=2.5",
        "copyspec:size=many",
        "taps:route=5",
    ],
)
def test_bad_parameters_are_refused_in_one_line(decoder: str) -> None:
    with scripted(wordy()) as llm, pytest.raises(InvalidRequestError) as refusal:
        llm.generate("abc", decoder=decoder)
    assert "\n" not in str(refusal.value)


def test_shapes_keep_parents_before_children() -> None:
    shape = Shape.of([(0, 0), (1,), (0,), (0, 1)])
    assert shape.parents == (ROOT, ROOT, 0, 0) and shape.ranks == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="hangs on"):
        Shape.of([(0, 0)])


def test_a_missing_guess_leaves_out_what_hangs_on_it() -> None:
    shape = Shape.of([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    guesses = {ROOT: [5], 0: [6], 1: [7]}
    tree = shape.fill(lambda tree, node: guesses.get(node, []), 5)
    assert (tree.tokens, tree.parents) == ([5, 6, 7], [ROOT, 0, 1])


def test_worthwhile_takes_more_nodes_where_rows_are_cheap() -> None:
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    dear, fair, cheap = (len(worthwhile(paths, (0.5, 0.2), cost)) for cost in (0.6, 0.1, 1e-6))
    assert (dear, cheap) == (1, 5) and dear < fair < cheap


def test_copyspec_keeps_its_gram_and_finds_first_places() -> None:
    index = RollingIndex(3)
    index.extend([1, 2, 3, 9, 1, 2, 3, 8, 1, 2])
    assert index.match() is None
    index.extend([3])
    assert index.match() == 0


def test_copyspec_takes_nothing_behind_a_rejected_last_token() -> None:
    """When the last copied token is wrong, the bonus must follow what was accepted."""
    options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}
    with scripted(wordy()) as llm:
        found = rounds(llm, "copyspec:size=2,gram=1", "the cab had a bad cab", 40, **options)
        plain = llm.generate("the cab had a bad cab", max_tokens=40, **options).tokens
    assert any(len(one.tokens) == 2 and len(one.accepted) == 1 for one in found)
    assert [token for one in found for token in one.generated][:40] == plain


def test_the_input_pointer_waits_for_a_unique_suffix() -> None:
    pointer = InputPointer([1, 2, 3, 1, 2, 4])
    positions = []
    for token in (2, 1, 2, 4, 9, 3):
        pointer.advance(token)
        positions.append(pointer.position)
    # 2 is ambiguous, as are 1 and "1 2"; "2 1 2" never stood there; 4 and 3 stand there once.
    assert positions == [None, None, None, 6, None, 3]


def test_token_recycling_keeps_the_last_of_equal_tokens() -> None:
    drafter = TokenRecyclingDrafter(Shape.chain(3))
    drafter.successors.update(zip([4, 4], [[1], [2]], strict=True))
    assert drafter.successors[4] == [2]


def test_the_automaton_counts_and_drafts_by_frequency() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 3, 1, 2, 4, 1, 2, 4, 1]:
        automaton.extend(token)
    state = automaton.next[automaton.next[0][1]][2]
    assert automaton.counts[state] == 3
    tree, total = likely_tree(automaton, state, 2, 3, 0.1)
    assert tree.tokens == [4, 1] and total == pytest.approx(2 / 3 + 2 / 3)


def test_the_suffix_memory_is_bounded() -> None:
    drafter = SuffixDrafter(memory=10)
    for _ in range(5):
        drafter.learn([1, 2, 3, 4])
        assert drafter.past_tokens <= 10
    drafter.clear()
    assert drafter.past_tokens == 0 and len(drafter.past.next) == 1


def test_search_stops_without_continuations() -> None:
    assert len(Search(4).run({}, lambda tree, node: {}, 6)) == 0
    assert Search(4).run({3: 1.0}, lambda tree, node: {}, 6).tokens == [3]


def test_warm_memories_are_forgotten_by_clear() -> None:
    with scripted(wordy()) as llm:
        cold, warm = (accepted(rounds(llm, "token-recycling", "hbhb")) for _ in range(2))
        llm.clear()
        again = accepted(rounds(llm, "token-recycling", "hbhb"))
    assert warm > cold == again
