"""P-Aligner: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.search.p_aligner import INSTRUCTION, writing_model
from anydecode.decoders.search import p_aligner
from anydecode.decoders.search.p_aligner import Node, PAligner, has_code
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm, toy_llm

OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 8}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("p-aligner")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["p-aligner"]())
    assert len(checks) == 9 and all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [{"iterations": 4}, {"samples": 2}, {"reward": "likelihood"}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, PAligner, name, value)
    assert_rejected("p-aligner")


@pytest.mark.slow
def test_certificate_rejects_another_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p_aligner, "EXPLORATION", 0.3)
    assert_rejected("p-aligner")


@pytest.mark.slow
def test_certificate_rejects_another_request_to_a_trained_rewriter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(p_aligner, "TRAINED_REQUEST", p_aligner.REQUEST)
    assert_rejected("p-aligner")


@pytest.mark.slow
def test_certificate_rejects_the_best_value_as_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(node: Node) -> float:
        return max([node.value, *(child.quality for child in node.children.values())])

    monkeypatch.setattr(Node, "quality", property(best))
    assert_rejected("p-aligner")


@pytest.mark.slow
def test_certificate_rejects_code_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p_aligner, "has_code", lambda text: False)
    assert_rejected("p-aligner")


@pytest.mark.parametrize(
    "text",
    ["[1, 2]", "class A:\n    x = 1", "int main() {\n  return 0;\n}", "#include <stdio.h>",
     "SELECT a FROM b;", "<p>hi</p>", "import os\nos.getcwd()", "for i in y:\n    print(i)",
     "function f(a) { return a }", "Why does this fail?\n```\nf(1)\n```"],
)  # fmt: skip
def test_code_and_json_are_recognised(text: str) -> None:
    assert has_code(text)


@pytest.mark.parametrize(
    "text",
    ["", "Explain (briefly) why.", "Solve x = 5 for x", "If I had a car, where to go?",
     "Write a function that adds two numbers", "import cars from Germany", "Is {a} a set?",
     "[citation needed] explain", "Question: why is 2 + 2 = 4?", "What does print(x) do?",
     "List three:\n- red\n- blue"],
)  # fmt: skip
def test_instructions_are_no_code(text: str) -> None:
    assert not has_code(text)


def test_long_prompts_are_no_code() -> None:
    for text in ("a, " * 50_000, "class " * 20_000, " \n" * 50_000, "[" * 100_000):
        assert not has_code(text)


def test_iterations_fill_the_first_level_first() -> None:
    root = Node("a", visits=5)
    for rule in range(5):
        assert PAligner.selected(root) == [root]
        root.children[rule] = Node(str(rule), value=rule / 10, visits=1)
    assert [node.text for node in PAligner.selected(root)] == ["a", "4"]


def test_the_exploration_has_the_visits_of_the_parent() -> None:
    """ln 7 chooses the visited child, ln 8 the other one."""
    for visits, chosen in ((7, "visited"), (8, "other")):
        root = Node("a", visits=visits)
        root.children = {rule: Node("bad", value=-9.0, visits=1) for rule in range(5)}
        root.children[1] = Node("visited", value=1.0, visits=3)
        root.children[2] = Node("other", value=0.4, visits=1)
        assert PAligner.selected(root)[1].text == chosen


def test_an_instruction_that_stays_as_it_is_has_the_answer_of_plain_decoding() -> None:
    with LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        options: dict[str, Any] = {"temperature": 0.8, **OPTIONS}
        decoder = PAligner(2, 1, lambda prompt, texts: [1.0] * len(texts))
        found = llm.generate(INSTRUCTION, decoder=decoder, **options)
        plain = llm.generate(INSTRUCTION, decoder="autoregressive", **options)
    assert found.tokens == plain.tokens


def test_rewards_read_the_instruction_as_it_was_given() -> None:
    seen: set[str] = set()

    def reward(prompt: str, texts: list[str]) -> list[float]:
        seen.add(prompt)
        return [float(len(text)) for text in texts]

    with LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm:
        llm.generate(INSTRUCTION, decoder=PAligner(3, 2, reward), **OPTIONS)
    assert seen == {INSTRUCTION}


def test_restarts_do_not_change_the_text() -> None:
    def tokens(share: float) -> list[int]:
        with (
            LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm,
            Restarts(llm.engine, 3, share),
        ):
            return llm.generate(INSTRUCTION, decoder="p-aligner:iterations=3", **OPTIONS).tokens

    assert tokens(0.1) == tokens(0.0)


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="p-aligner:iterations=2", constraint=Regex("(cat|dog)+"), logprobs=0,
            **OPTIONS,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_chats_and_second_prompts_are_refused() -> None:
    with toy_llm() as llm:
        with pytest.raises(UnsupportedCombinationError, match="use generate, not chat"):
            llm.generate([97, 257, 98], decoder="p-aligner")
        with pytest.raises(UnsupportedCombinationError, match="second prompt"):
            llm.generate("a", decoder="p-aligner", guidance_scale=2.0)


def test_without_a_rewriter_none_is_trained() -> None:
    with (
        LLM(writing_model(), tokenizer=ByteTokenizer(), cache_positions=512) as llm,
        pytest.raises(UnsupportedCombinationError, match="needs a trained rewriter"),
    ):
        llm.generate("a", decoder="p-aligner:trained=true")


@pytest.mark.parametrize("options", [{"samples": 0}, {"iterations": -1}, {"iterations": 600}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="p-aligner needs|allowed are"):
        catalogue.build("p-aligner", **options)
