"""The check of methods beside other requests on the default draft policy, and what it rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.checks import PROMPTS, Check, scripted_llm
from anydecode.certification.oracles.speculative.company import company_checks
from anydecode.decoders.speculative.smartspec_server import ServerGoodput


def checks(decoder: str) -> list[Check]:
    """Whether `decoder` passes."""
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    with scripted_llm() as llm:
        plain = [one.tokens for one in llm.generate(list(PROMPTS), **options)]  # type: ignore[call-overload]
    return list(company_checks("scripted", scripted_llm, decoder, PROMPTS, plain, **options))


@pytest.mark.parametrize("decoder", ["suffix", "speculative-sampling", "saguaro", "layerskip"])
def test_methods_draft_beside_others(decoder: str) -> None:
    text, drafts = checks(decoder)
    assert text.passed and drafts.passed


def test_methods_without_drafts_are_not_tested() -> None:
    assert checks("autoregressive") == []


def test_methods_that_stop_drafting_beside_others_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServerGoodput, "count", lambda self, share: 0)
    text, drafts = checks("speculative-sampling")
    assert text.passed and not drafts.passed
