"""Lenient sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.speculative import lenient_sampling
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("lenient-sampling")


def test_certificate_rejects_a_lenience_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lenient_sampling, "RejectionSampling", lambda *_: RejectionSampling())
    assert_rejected("lenient-sampling")
