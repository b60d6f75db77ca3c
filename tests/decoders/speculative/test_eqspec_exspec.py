"""EqSpec and ExSpec: their certificate, and mistakes that it rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.framework.acceptance import AcceptanceResult, TokenExact
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("eqspec-exspec")


def test_certificate_rejects_rounds_that_leave_the_last_accepted_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walk = TokenExact.walk

    def shorter(self: TokenExact, tree: Any, scores: Any) -> AcceptanceResult:
        result = walk(self, tree, scores)
        if not result.path:
            return result
        return AcceptanceResult(result.path[:-1], result.tokens[:-1])

    monkeypatch.setattr(TokenExact, "walk", shorter)
    assert_rejected("eqspec-exspec")
