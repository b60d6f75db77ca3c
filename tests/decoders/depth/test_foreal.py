"""FoReaL-Decoding: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.decoders.depth import foreal
from anydecode.decoders.depth.foreal import Foreal, Sentence
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.scoring.sequence import TARGET, Sequence
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm, toy_llm


def test_certificate() -> None:
    assert_certified("foreal")


@pytest.mark.parametrize("other", [{"lead": 14}, {"probability": 0.9}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "foreal", **other)
    assert_rejected("foreal")


def test_certificate_rejects_sentences_that_end_within_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        foreal,
        "ends_sentence",
        lambda sequence: (
            sequence.tokenizers[TARGET]
            .token_bytes(sequence.tokens[-1])
            .endswith((b".", b"?", b"!", b"\n"))
        ),
    )
    assert_rejected("foreal")


def test_certificate_rejects_sentences_without_exclamations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreal, "_ENDS", (b".", b"?", b"\n"))
    assert_rejected("foreal")


def test_certificate_rejects_sentences_that_end_within_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def within(sequence: Sequence) -> bool:
        text = b"".join(map(sequence.tokenizers[TARGET].token_bytes, sequence.all_tokens))
        last = sequence.tokenizers[TARGET].token_bytes(sequence.tokens[-1])
        return re.search(rb"[?!\n]|(?<![0-9])\.", text[len(text) - len(last) :]) is not None

    monkeypatch.setattr(foreal, "ends_sentence", within)
    assert_rejected("foreal")


def test_certificate_rejects_one_coin_for_all_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: Foreal, sequence: Sequence) -> Sentence:
        state = sequence.state.get(foreal._STATE)
        start = len(sequence.tokens)
        if state is not None and not foreal.ends_sentence(sequence):
            start = state.start
        coin = sequence.noise.with_purpose("coin").coin(0)
        return Sentence(start, coin < self.probability)

    monkeypatch.setattr(Foreal, "_sentence", first)
    assert_rejected("foreal")


def test_certificate_rejects_a_model_that_leads_until_its_sentence_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_defaults(monkeypatch, "foreal", lead=4096)
    assert_rejected("foreal")


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="foreal:lead=3", constraint=Regex("(cat|dog)+"), logprobs=0, max_tokens=12,
            temperature=1.0, seed=2,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_guidance_is_refused() -> None:
    with toy_llm() as llm, pytest.raises(UnsupportedCombinationError, match="guidance"):
        llm.generate("a", decoder="foreal", guidance_scale=2.0)


@pytest.mark.parametrize("options", [{"lead": -1}, {"probability": 1.5}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="foreal needs|allowed are 0 to 65536"):
        catalogue.build("foreal", **options)
