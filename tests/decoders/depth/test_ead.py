"""Entropy adaptive decoding: its certificate, mistakes that the certificate rejects, and its
options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.oracles.depth.ead import uneven_models
from anydecode.decoders.depth import ead
from anydecode.decoders.depth.ead import Ead, Switch
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm, toy_llm


def test_certificate() -> None:
    assert_certified("ead")


@pytest.mark.parametrize(
    "other",
    [{"threshold": 1.5 * 0.6931}, {"window": 4}, {"min_tokens": 5}, {"clear": True}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """The first threshold is that in nats."""
    replace_defaults(monkeypatch, "ead", **other)
    assert_rejected("ead")


def test_certificate_rejects_a_first_entropy_that_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched = Ead.switched

    def twice(self: Ead, before: Switch, bits: float) -> Switch:
        first = before if before.entropies else Switch(entropies=(bits,))
        return switched(self, first, bits)

    monkeypatch.setattr(Ead, "switched", twice)
    assert_rejected("ead")


def test_certificate_rejects_a_switch_that_comes_a_token_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched = Ead.switched

    def late(self: Ead, before: Switch, bits: float) -> Switch:
        """The mean without the newest entropy decides."""
        after = switched(self, replace(before, entropies=()), bits)
        entropies = (*before.entropies, bits)[-self.window :]
        if before.entropies:
            after = switched(self, replace(before, entropies=before.entropies[:-1]),
                             before.entropies[-1])  # fmt: skip
        return replace(after, entropies=entropies)

    monkeypatch.setattr(Ead, "switched", late)
    assert_rejected("ead")


def test_certificate_rejects_a_first_switch_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    switched = Ead.switched
    monkeypatch.setattr(
        Ead,
        "switched",
        lambda self, before, bits: switched(
            self, before if before.entropies else replace(before, num_tokens=0), bits
        ),
    )
    assert_rejected("ead")


def test_certificate_rejects_the_min_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ead, "entropy", lambda log_p, p: float(-log_p.max()))
    assert_rejected("ead")


def test_a_switch_reads_what_was_missed_in_one_pass() -> None:
    """The target's rows: the prompt and all tokens that it has read."""
    large, small = uneven_models()
    with LLM(large, tokenizer=ByteTokenizer(), draft=small) as llm:
        stats = llm.generate("ab" * 8, decoder="ead", max_tokens=60, ignore_eos=True).stats
    assert stats.rows <= 16 + 60 and stats.passes < 40


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="ead", constraint=Regex("(cat|dog)+"), logprobs=0, max_tokens=12,
            temperature=1.0, seed=2,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_a_draft_model_with_fewer_tokens_is_refused() -> None:
    """It cannot read a text that has one of the others."""
    small = ScriptedModel(seed=3, vocab_size=257)
    with (
        LLM(ScriptedModel(seed=4), tokenizer=ByteTokenizer(), draft=small) as llm,
        pytest.raises(UnsupportedCombinationError, match="it has 257 tokens, the target 259"),
    ):
        llm.generate("ab", decoder="ead:threshold=64", max_tokens=20, ignore_eos=True)


def test_guidance_is_refused() -> None:
    with toy_llm() as llm, pytest.raises(UnsupportedCombinationError, match="guidance"):
        llm.generate("a", decoder="ead", guidance_scale=2.0)


@pytest.mark.parametrize("options", [{"window": 0}, {"min_tokens": -1}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="ead needs a window|allowed are"):
        catalogue.build("ead", **options)
