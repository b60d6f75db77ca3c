"""Lexical Unit Decoding: its certificate, mistakes that the certificate rejects, and texts in
company, with a small cache, in chunks and in number formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.chi_square import PROMPT
from anydecode.certification.oracles.speculative import lud as oracle
from anydecode.certification.oracles.speculative.mars import marginal_llm
from anydecode.certification.rounds import rounds, scripted
from anydecode.decoders.speculative.lud import Lud
from anydecode.decoders.speculative.mars import Mars
from anydecode.models.scripted import MASK
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import CONDITIONS, PROMPTS, generate
from masked_models import tiny_masked_llm

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("lud")


@pytest.mark.parametrize("defaults", [{"masks": 2}, {"threshold": 0.7}, {"repeats": True}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    replace_defaults(monkeypatch, "lud", **defaults)
    assert_rejected("lud")


@pytest.mark.parametrize("other", ["autoregressive", "mars"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    replace_method(monkeypatch, "lud", other)
    assert_rejected("lud")


def test_certificate_rejects_units_without_a_repeated_token_anywhere(monkeypatch: Patch) -> None:
    """The rule is about a placeholder's token and the one before it: the first token of a unit may
    equal the last one of the text."""
    own = Lud._tokens

    def tokens(self: Lud, sequence: Sequence, scores: Any, mask: int) -> list[int]:
        kept = own(self, sequence, scores, mask)
        return kept[: max(1, next((i for i, one in enumerate(kept) if one in kept[:i]), len(kept)))]

    monkeypatch.setattr(Lud, "_tokens", tokens)
    assert_rejected("lud")


def test_certificate_rejects_a_first_token_that_must_be_sure(monkeypatch: Patch) -> None:
    """A pass would generate nothing: here it then generates the most probable token."""
    own = Lud._tokens

    def tokens(self: Lud, sequence: Sequence, scores: Any, mask: int) -> list[int]:
        kept, row = own(self, sequence, scores, mask), scores.row(0)
        return kept if self.is_confident(row, kept[0]) else [int(row.argmax())]

    monkeypatch.setattr(Lud, "_tokens", tokens)
    assert_rejected("lud")


def test_certificate_rejects_placeholders_in_the_text(monkeypatch: Patch) -> None:
    own = Lud._tokens
    monkeypatch.setattr(
        Lud, "_tokens", lambda self, sequence, scores, mask: own(self, sequence, scores, 0)
    )
    assert_rejected("lud")


def test_certificate_rejects_a_sure_token_behind_one_that_is_not(monkeypatch: Patch) -> None:
    own = Lud._tokens

    def tokens(self: Lud, sequence: Sequence, scores: Any, mask: int) -> list[int]:
        kept = own(self, sequence, scores, mask)
        for row in (scores.row(number) for number in range(len(kept) + 1, len(scores))):
            row[mask] = -np.inf
            if Mars.is_confident(self, row, int(row.argmax())):
                return [*kept, int(row.argmax())]
        return kept

    monkeypatch.setattr(Lud, "_tokens", tokens)
    assert_rejected("lud")


def test_the_measured_texts_have_units() -> None:
    with marginal_llm() as llm:
        answer = llm.generate(
            PROMPT, decoder="lud", n=60, temperature=1.0, seed=2, max_tokens=16, ignore_eos=True
        )
    assert sum(one.stats.passes for one in answer.samples) < 0.98 * 60 * 16


def test_unsure_units_lose_more_than_the_margin(monkeypatch: Patch) -> None:
    replace_defaults(monkeypatch, "lud", threshold=0.0)
    assert oracle.loss(60) > 0.3


def test_a_token_is_repeated_behind_the_unit_only() -> None:
    row = np.zeros(MASK + 1, np.float32)
    row[97] = 30
    with scripted(lambda seen: row) as llm:
        trace = rounds(llm, "lud", "x", 3, logit_bias={MASK: -100})
        repeated = rounds(llm, "lud:repeats=true", "x", 3, logit_bias={MASK: -100})
    assert [one.generated for one in trace] == [[97]] * 3
    assert [one.generated for one in repeated] == [[97] * 3]


@CONDITIONS
def test_the_text_does_not_depend_on_company(options: dict[str, Any], temperature: float) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    key = "lud:threshold=0.3"
    with tiny_masked_llm(prefix_cache=False) as llm:
        expected = [generate(llm, one, key, temperature=temperature) for one in PROMPTS]
    with tiny_masked_llm(**options) as llm:
        together = generate(llm, PROMPTS, key, temperature=temperature)
        llm.engine.check_integrity()
    if "backend" not in options:  # whose sums differ in the last bits
        assert [one.tokens for one in together] == [one.tokens for one in expected]
    assert any(one.stats.tokens_per_pass > 1 for one in together)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_placeholders_the_text_is_that_of_plain_decoding(temperature: float) -> None:
    with tiny_masked_llm() as llm:
        plain, units = (
            generate(llm, PROMPTS, key, temperature=temperature)
            for key in ("autoregressive", "lud:masks=0")
        )
    assert [one.tokens for one in units] == [one.tokens for one in plain]
