"""APAR: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.search.apar import PROMPT, forking_model, scripted_list
from anydecode.decoders.search import apar
from anydecode.decoders.search.apar import Apar, Row
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm


def test_certificate() -> None:
    assert_certified("apar")


@pytest.mark.parametrize(
    "other", [{"rows": 4}, {"depth": 1}, {"depth": 3}, {"child": "\x10"}, {"fork": "a"}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Apar, name, value)
    assert_rejected("apar")


def test_certificate_rejects_details_behind_their_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """All details at the end of the text."""

    def late(row: Row, marks: tuple[int, int], ends: frozenset[int]) -> list[int]:
        own = [one for one in row.tokens[row.start :] if one not in marks and one not in ends]
        return [*own, *(token for one in row.details for token in late(one, marks, ends))]

    monkeypatch.setattr(apar, "assembled", late)
    assert_rejected("apar")


def test_certificate_rejects_details_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Apar._take

    def shared(self: Apar, sequence: Any, rows: list[Row], *given: Any) -> None:
        before = len(rows)
        take(self, sequence, rows, *given)
        if 1 < before < len(rows):
            rows[-1].tokens[-1:] = [*rows[-2].tokens[rows[-2].start :], rows[-1].tokens[-1]]
            rows[-1].start = len(rows[-1].tokens)

    monkeypatch.setattr(Apar, "_take", shared)
    assert_rejected("apar")


def test_certificate_rejects_details_with_the_noise_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = Apar._take

    def shared(self: Apar, sequence: Any, rows: list[Row], *given: Any) -> None:
        take(self, sequence, rows, *given)
        rows[-1].noise = sequence.noise

    monkeypatch.setattr(Apar, "_take", shared)
    assert_rejected("apar")


def test_the_shared_beginning_is_computed_once() -> None:
    """Rows: the prompt, what the text reads, and of each detail the child token and its own."""
    with LLM(scripted_list(), tokenizer=ByteTokenizer(), cache_positions=2048) as llm:
        stats = llm.generate(PROMPT, decoder="apar", max_tokens=20).stats
    assert stats.rows <= len(PROMPT) + 4 + 2 * 2 + 3


def test_restarts_do_not_change_the_text() -> None:
    def tokens(share: float) -> list[list[int]]:
        with (
            LLM(forking_model(), tokenizer=ByteTokenizer(), cache_positions=8192) as llm,
            Restarts(llm.engine, 3, share),
        ):
            options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40}
            return [
                llm.generate(PROMPT, decoder="apar", seed=seed, **options).tokens
                for seed in range(8)
            ]

    assert tokens(0.4) == tokens(0.0)


def test_what_it_cannot_do_is_refused() -> None:
    refused: list[dict[str, Any]] = [
        {"constraint": Regex("a+")}, {"repetition_penalty": 1.2}, {"logprobs": 0},
        {"guidance_scale": 2.0},
    ]  # fmt: skip
    with letters_llm() as llm:
        for options in refused:
            with pytest.raises(UnsupportedCombinationError, match="apar"):
                llm.generate("ab", decoder="apar", max_tokens=4, **options)


def test_marks_must_be_tokens() -> None:
    model = ScriptedModel(vocab_size=3)
    with (
        LLM(model, tokenizer=PieceTokenizer("a", "b")) as llm,
        pytest.raises(UnsupportedCombinationError, match="a token for each of"),
    ):
        llm.generate("ab", decoder="apar:fork=ab,child=b")


@pytest.mark.parametrize("options", [{"rows": 0}, {"depth": -1}, {"fork": "\x0f"}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="apar needs|allowed are"):
        catalogue.build("apar", **options)
