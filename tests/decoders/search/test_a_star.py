"""A*-Decoding: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.decoders.search.a_star import AStar, Frontier, Node
from anydecode.errors import InvalidRequestError, RewardError
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("a-star")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["a-star"]())
    assert len(checks) == 5 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "other",
    [{"k": 3}, {"step": "\n"}, {"step_tokens": 3}, {"expansions": 1}, {"frontier": 1},
     {"reward": "length:max_words=2"}],
    ids=str,
)  # fmt: skip
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, AStar, name, value)
    assert_rejected("a-star")


@pytest.mark.parametrize("rule", ["greedy", "uniform-cost", "shallow-first"])
def test_certificate_rejects_another_order(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    ranks = {
        "greedy": lambda node: (node.left, -node.depth, node.order),
        "uniform-cost": lambda node: (node.cost, -node.depth, node.order),
        "shallow-first": lambda node: (node.depth, node.cost + node.left, node.order),
    }
    monkeypatch.setattr(Node, "rank", property(ranks[rule]))
    assert_rejected("a-star")


def test_certificate_rejects_costs_that_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of all changes is the last estimate."""
    made = Node.__init__

    def build(self: Any, depth: int, cost: float, left: float, order: int) -> None:
        made(self, depth, left, left, order)

    monkeypatch.setattr(Node, "__init__", build)
    assert_rejected("a-star")


def test_certificate_rejects_the_first_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    over = AStar._is_over
    monkeypatch.setattr(
        AStar, "_is_over", staticmethod(lambda state: bool(state.found) or over(state))
    )
    assert_rejected("a-star")


def test_certificate_rejects_steps_with_the_noise_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expand = AStar._expand

    def again(self: AStar, sequence: Any, state: Frontier, group: Any) -> Any:
        state.num_expansions, number = 0, state.num_expansions
        yield from expand(self, sequence, state, group)
        state.num_expansions = number + 1

    monkeypatch.setattr(AStar, "_expand", again)
    assert_rejected("a-star")


def test_prefixes_are_computed_once() -> None:
    """Rows: the prompt, and at most one per sampled token but the last of every text."""
    with letters_llm() as llm:
        whole = llm.generate("ab" * 10, decoder="a-star:step_tokens=64", **OPTIONS).stats
        steps = llm.generate("ba" * 10, decoder="a-star:step_tokens=3,expansions=3", **OPTIONS)
    assert 20 + 11 < whole.rows <= 20 + 4 * 11
    first, second, third, rest = 4 * 2, 4 * 3, 4 * 3, 3 + 3 + 3 + 3
    assert steps.stats.rows <= 20 + first + second + third + rest


def test_whole_texts_are_returned_once() -> None:
    with letters_llm("ab") as llm:
        found = llm.generate("a", decoder="a-star:step_tokens=12", n=8, **OPTIONS)
    texts = [tuple(one.tokens) for one in found.samples]
    assert len(set(texts)) == len(texts) > 1
    scores = [one.score for one in found.samples[1:]]
    assert scores == sorted(scores, reverse=True)


def test_an_exhausted_budget_ends_the_best_beginning_greedily() -> None:
    with letters_llm() as llm:
        greedy = llm.generate("a", max_tokens=12)
        found = llm.generate(
            "a", decoder="a-star:step_tokens=1,expansions=1", max_tokens=12, temperature=0
        )
        assert found.tokens == greedy.tokens
        one = llm.generate("a", decoder="a-star:step_tokens=1,expansions=1", **OPTIONS)
        assert len(one.tokens) == 12


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="a-star:step_tokens=2", constraint=Regex("(cat|dog)+"), logprobs=0,
            **OPTIONS,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_a_failing_reward_frees_the_branches() -> None:
    with letters_llm() as llm:
        for reward, message in (
            (lambda prompt, texts: [1 / 0], "failed: ZeroDivisionError"),
            (lambda prompt, texts: [float("nan")] * len(texts), "its values must be from 0 to 1"),
        ):
            with pytest.raises(RewardError, match=message):
                llm.generate("a", decoder=AStar(2, reward), **OPTIONS)
            llm.engine.check_integrity()
        assert llm.generate("a", decoder="a-star:step_tokens=4", **OPTIONS).text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": 0}, "k is 0; allowed are 1 to"),
        ({"step": ""}, "a-star needs a step"),
        ({"k": 8, "expansions": 1000}, "k times expansions may be up to 4095"),
        ({"frontier": 5000}, "frontier is 5000; allowed are 1 to 1024"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("a-star", **options)
