"""Mirostat: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.checks import measures_of
from anydecode.sampling.mirostat import Mirostat
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("mirostat")


def test_certificate_rejects_a_limit_that_never_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirostat, "advance", lambda self, token: None)
    (measure,) = measures_of("mirostat")
    assert measure.run(600) > measure.margin
    assert_rejected("mirostat")


def test_certificate_rejects_a_limit_that_moves_the_wrong_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Mirostat.__init__

    def inverted(self: Mirostat, target: float = 5.0, rate: float = 0.1) -> None:
        made(self, target, -rate)

    monkeypatch.setattr(Mirostat, "__init__", inverted)
    assert_rejected("mirostat")


def test_certificate_rejects_version_2_for_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anydecode.sampling.params.MirostatZipf", Mirostat)
    assert_rejected("mirostat")
