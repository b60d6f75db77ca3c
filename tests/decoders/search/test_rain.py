"""RAIN: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.benchmarks.search import observed
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.search.rain import PROMPT, SelfJudge
from anydecode.decoders.search import rain
from anydecode.decoders.search.rain import Node, Rain, is_widened
from anydecode.errors import InvalidRequestError, RewardError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 6}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("rain")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["rain"]())
    assert len(checks) == 4 and all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"k": 9}, {"simulations": 40}, {"good": "harmful", "bad": "harmless"}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Rain, name, value)
    assert_rejected("rain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, value",
    [("LENGTHS", (1, 2, 4, 4)), ("LENGTHS", (1, 2, 2, 10)), ("TOP_K", 100), ("EXPLORATION", 1.0),
     ("MODEL_SHARE", 1.0), ("SIMILAR", 2.0), ("SIMILAR_WEIGHT", 1.0), ("VARIANCE", 0.0),
     ("SURE_VALUE", 2.0), ("SURE_VISITS", 3), ("MIN_ADDED_VISITS", 0), ("PHRASE_ENDS", ".")],
)  # fmt: skip
def test_certificate_rejects_another_rule(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(rain, name, value)
    assert_rejected("rain")


@pytest.mark.slow
def test_certificate_rejects_one_order_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that always names the first answer then finds a text good."""

    def first_only(self: Any, reply: str) -> Any:
        [branch, *_], (first, second) = self.asked[0], self.orders[0]
        question = rain.JUDGE.format(first=first, second=second, prompt=self.prompt, reply=reply)
        branch.prompt = self.tokenizer.encode(question)
        branch.align("target")
        [scores] = yield [branch.score()]
        return 1.0 if scores.row(-1)[self.letters[0]] > scores.row(-1)[self.letters[1]] else -1.0

    monkeypatch.setattr(rain._Judge, "value", first_only)
    assert_rejected("rain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", ["lengths below the root", "priors that are no shares", "values of sets without visits"]
)
def test_certificate_rejects_another_tree(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if rule == "lengths below the root":
        monkeypatch.setattr(rain, "_length", lambda node: 2)
    elif rule == "priors that are no shares":
        monkeypatch.setattr(rain, "mix_priors", lambda nodes: None)
    else:

        def most_valuable(parent: Node) -> Node:
            def rank(child: Node) -> float:
                share = child.prior * parent.visits**0.5 / (1 + child.visits)
                return (child.value + 1) / 2 + 2 * share

            return max(parent.children, key=rank)

        monkeypatch.setattr(rain, "selected", most_valuable)
    assert_rejected("rain")


def test_phrases_are_sampled_from_all_tokens_and_sets_from_the_most_probable_ones() -> None:
    """The 16th token is in phrases, but in no set."""
    texts: set[str] = set()

    def reward(prompt: str, valued: list[str]) -> list[float]:
        texts.update(valued)
        return [0.0] * len(valued)

    row = np.full(259, -30.0, np.float32)
    row[list(b"abcdefghijklmno")] = 1.0
    row[ord("p")] = 0.99
    model = ScriptedModel(lambda seen: row)
    model.embed = lambda tokens: np.ones((len(tokens), 4), np.float32)  # type: ignore[attr-defined]
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=16384) as llm:
        answer = llm.generate("x", decoder=Rain(4, 20, reward), seed=1, max_tokens=20)
    assert any("p" in text for text in texts) and "p" not in answer.text


def test_of_children_with_as_many_visits_the_better_one_is_taken() -> None:
    root = Node(children=[Node() for _ in range(3)])
    for child, values in zip(root.children, ([0.1, 0.3], [0.5, 0.5], [1.0]), strict=True):
        for value in values:
            child.add(value, 1.0)
    assert root.most_visited() is root.children[1]


def test_a_visit_counts_by_its_weight() -> None:
    node = Node()
    node.add(1.0, 1.0)
    node.add(-1.0, 0.5)
    assert (node.visits, node.value) == pytest.approx((1.5, 1 / 3))


def test_bad_children_are_widened_unless_they_differ() -> None:
    def node(value: float, *embeddings: list[float] | None, size: int = 1) -> Node:
        children = [
            Node([0] * size, embedding=None if one is None else np.array(one), value=value)
            for one in embeddings
        ]
        return Node(children=children)

    assert is_widened(node(-1, [1, 0], [1, 0], [0.9, 0.1]))
    assert not is_widened(node(0, [1, 0], [1, 0], [0.9, 0.1]))
    assert not is_widened(node(-1, [1, 0], [-1, 0], [0, 1]))
    assert not is_widened(node(-1, [1, 0], [0.6, 0.3])) and is_widened(
        node(-1, [1, 0], [0.6, 0.3], size=10)
    )
    assert not is_widened(node(-1, [1, 0], None))
    assert not is_widened(node(-1, *[[1.0, 0.0]] * 20))


def test_prefixes_are_computed_once_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Rain(3, 8, lambda prompt, texts: [1.0 - 2 * ("a" in text) for text in texts])

    def run() -> tuple[list[int], int, int]:
        with letters_llm("abcdefgh.") as llm:
            prompt = llm.encode("ab" * 10)
            with observed(llm.model, prompt) as prefixes:
                found = llm.generate(prompt, decoder=decoder, seed=1, max_tokens=12)
        return found.tokens, prefixes.num_rows, prefixes.num_distinct

    tokens, rows, fewest = run()
    assert rows < 1.05 * fewest  # a row that was not read where it was computed
    monkeypatch.setattr(rain, "MAX_HELD", 0)
    others, rows, _ = run()
    assert others == tokens and rows > 1.2 * fewest


def test_restarts_do_not_change_the_text() -> None:
    def tokens(share: float) -> list[int]:
        with (
            LLM(SelfJudge(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm,
            Restarts(llm.engine, 3, share),
        ):
            return llm.generate(PROMPT, decoder="rain:k=3,simulations=8", **OPTIONS).tokens

    assert tokens(0.1) == tokens(0.0)


def test_constraints_and_log_probabilities() -> None:
    with LLM(SelfJudge(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        answer = llm.generate(
            PROMPT, decoder="rain:k=3,simulations=4", constraint=Regex("(cat|dog)+"), logprobs=0,
            **OPTIONS,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_a_second_prompt_is_refused() -> None:
    with letters_llm() as llm, pytest.raises(UnsupportedCombinationError, match="second prompt"):
        llm.generate("a", decoder="rain", guidance_scale=2.0, **OPTIONS)


def test_a_reward_beyond_its_bounds_is_refused() -> None:
    with letters_llm() as llm, pytest.raises(RewardError, match="from -1 to 1"):
        llm.generate("a", decoder=Rain(reward=lambda p, t: [2.0] * len(t)), **OPTIONS)


@pytest.mark.parametrize("options", [{"k": 0}, {"simulations": 0}, {"k": 21}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="rain needs k|allowed are"):
        catalogue.build("rain", **options)
