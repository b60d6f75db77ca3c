"""Adaptive weighted rejection sampling: its certificate, and mistakes that it rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode.decoders.constrained import awrs
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("awrs")


def test_certificate_rejects_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recursive = awrs._recursive

    def unweighted(*given: Any) -> awrs.Draw:
        return replace(recursive(*given), log_weight=0.0)

    monkeypatch.setattr(awrs, "_recursive", unweighted)
    assert_rejected("awrs")


def test_certificate_rejects_rejection_without_the_second_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recursive = awrs._recursive

    def one_test(
        probabilities: Any, tokens: Any, allowed: Any, noise: Any, position: int
    ) -> awrs.Draw:
        seen: list[int] = []

        def until_first(token: int) -> bool:
            if any(map(allowed, seen)):
                return True
            seen.append(token)
            return bool(allowed(token))

        return recursive(probabilities, tokens, until_first, noise, position)

    monkeypatch.setattr(awrs, "_recursive", one_test)
    assert_rejected("awrs")
