"""EqSpec and ExSpec: their certificate, and mistakes that it rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.framework.acceptance import AcceptanceResult, TokenExact
from anydecode.decoders.speculative import draft_model
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


def test_certificate_rejects_drafts_after_a_token_that_is_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = draft_model.draft_chain

    def twice(sequence: Any, prefix: list[int], size: int, runner: str, **given: Any) -> Any:
        last = sequence.all_tokens[-1]
        return (yield from chain(sequence, [last, *prefix], size, runner, **given))

    monkeypatch.setattr(draft_model, "draft_chain", twice)
    assert_rejected("eqspec-exspec")
