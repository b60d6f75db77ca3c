"""Drafters without a model: oracle tests, the errors their cards name, and rejected requests."""

from __future__ import annotations

import pytest

from anydecode import catalogue
from anydecode.certification.rounds import rounds, scripted, wordy
from anydecode.decoders.framework.acceptance import Acceptance, AcceptanceResult
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.static_trees import TreeShape, worthwhile
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
    expensive, fair, cheap = (len(worthwhile(paths, (0.5, 0.2), cost)) for cost in (0.6, 0.1, 1e-6))
    assert (expensive, cheap) == (1, 5) and expensive < fair < cheap
