"""Mirostat: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.mirostat import Mirostat
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
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


def offered(*tokens: int) -> Candidates:
    """Equally probable candidates."""
    return Candidates(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32))


def test_the_surprise_of_a_candidate_moves_the_estimate() -> None:
    rule = Mirostat(target=3.0, rate=0.5)
    rule.apply(offered(2, 5, 7, 9))  # 2 bits each
    rule.advance(7)
    assert rule.mu == pytest.approx(6.0 - 0.5 * (2.0 - 3.0))


@pytest.mark.parametrize("token", [0, 3, 6, 10])
def test_tokens_that_were_no_candidates_do_not(token: int) -> None:
    rule = Mirostat(target=3.0, rate=0.5)
    rule.apply(offered(2, 5, 7, 9))
    rule.advance(token)
    assert rule.mu == 6.0
    rule.advance(5)  # forced: there was no distribution
    assert rule.mu == 6.0


def test_the_estimate_stays_within_its_bounds() -> None:
    rule = Mirostat(target=1.0, rate=100.0)
    rule.apply(offered(1, 2, 3, 4))
    rule.advance(1)
    assert rule.mu == 0.0
    rule.apply(offered(1))
    rule.advance(1)  # no surprise
    assert rule.mu == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"tau": 4.5}, {"eta": 0.2}, {"version": 1}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "mirostat", **other)
    assert_rejected("mirostat")
