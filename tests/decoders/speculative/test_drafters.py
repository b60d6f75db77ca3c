"""Drafters without a model: oracle tests, the errors their cards name, and rejected requests."""

from __future__ import annotations

import pytest

from anydecode import catalogue
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.rounds import rounds, scripted, wordy
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.static_trees import TreeShape, worthwhile
from anydecode.decoders.speculative.token_recycling import PUBLISHED, RATES
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
    "layerskip",
)


class _AcceptsUnverified(Acceptance):
    """Broken: accepts the first draft without comparing it."""

    exactness = "token-exact"

    def walk(self, tree: TokenTree, scores: Scores) -> AcceptanceResult:
        path = tree.children(ROOT)[:1]
        tokens = [tree.tokens[node] for node in path]
        return AcceptanceResult(path, [*tokens, scores.sample(path[-1] + 1 if path else 0)])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("key", [key for key in MODEL_FREE if key not in ("layerskip",)])
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
        "smartspec:fixed=-1",
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

    def num_nodes(row_cost: float, num_others: int = 0) -> int:
        return len(
            worthwhile(paths, (0.5, 0.2), lambda rows: 1 + row_cost * (rows - 1), num_others)
        )

    expensive, fair, cheap = (num_nodes(cost) for cost in (0.6, 0.1, 1e-6))
    assert (expensive, cheap) == (0, 5) and expensive < fair < cheap
    assert num_nodes(0.1, num_others=6) < fair  # the rows delay the others too


def test_nodes_that_pay_follow_the_measured_costs() -> None:
    """The default table has a tenth of a pass per row; here eight rows cost as much as one."""
    sizes = []
    for steps in (1, 8):
        with scripted(wordy()) as llm:
            llm.cost_model = FixedCosts(lambda rows, context, n=steps: 1.0 + (rows - 1) // n)
            found = rounds(llm, "token-recycling", "abcabcabd", 60)
        sizes.append({len(one.tokens) for one in found})
    assert sizes[0] == {0} and max(sizes[1]) == 7


@pytest.mark.parametrize("key", ["token-recycling", "stand"])
def test_the_cards_say_how_many_nodes_save_time(key: str) -> None:
    tenth = worthwhile(PUBLISHED, RATES, lambda rows: 1 + 0.1 * (rows - 1))
    free = worthwhile(PUBLISHED, RATES, lambda rows: max(1.0, rows / 16))
    said = " ".join(catalogue.find(key).card.deviations)
    assert len(tenth) == 1 and "1 node where a row costs a tenth of a pass" in said
    assert f"{len(free)} where up to 16 rows cost one pass" in said
