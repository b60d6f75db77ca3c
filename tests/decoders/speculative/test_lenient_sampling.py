"""Lenient sampling: its certificate, mistakes that the certificate rejects, and its drafts under
constraints."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import pytest

from anydecode import Regex
from anydecode.certification.checks import scripted_llm
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.speculative import lenient_sampling
from certificates import assert_certified, assert_rejected

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("lenient-sampling")


def test_certificate_rejects_a_lenience_that_is_ignored(monkeypatch: Patch) -> None:
    monkeypatch.setattr(lenient_sampling, "LenientSampling", lambda *_: RejectionSampling())
    assert_rejected("lenient-sampling")


@pytest.mark.slow
def test_certificate_rejects_a_lenience_without_effect_at_temperature_0(monkeypatch: Patch) -> None:
    monkeypatch.setattr(lenient_sampling, "LenientSampling", RejectionSampling)
    assert_rejected("lenient-sampling")


@pytest.mark.slow
@pytest.mark.parametrize(
    "bound",
    [lambda lenience: -log(lenience), lambda lenience: lenience - 1.5],
    ids=["above the largest", "of logits"],
)
def test_certificate_rejects_other_bounds_at_temperature_0(
    monkeypatch: Patch, bound: Callable[[float], float]
) -> None:
    monkeypatch.setattr(lenient_sampling, "log", bound)
    assert_rejected("lenient-sampling")


def test_a_constraint_holds_at_temperature_0() -> None:
    with scripted_llm() as llm:
        answer = llm.generate(
            "1234567",
            decoder="lenient-sampling:lenience=0.01",
            constraint=Regex("[a-z]{12}"),
            max_tokens=12,
            temperature=0.0,
            logprobs=1,
        )
    assert len(answer.text) == 12 and answer.text.isalpha() and answer.text.islower()
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.tokens)
