"""Jump-forward decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.constraints.guidance_engine import GuidanceState
from anydecode.decoders.constrained import jump_forward
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("jump-forward")


def test_certificate_rejects_decoding_without_forced_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jump_forward, "constraint_state", lambda sampler: None)
    assert_rejected("jump-forward")


def test_certificate_rejects_half_of_the_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = GuidanceState.forced_tokens

    def half(self: GuidanceState) -> list[int]:
        tokens = forced(self)
        return tokens[: (len(tokens) + 1) // 2]

    monkeypatch.setattr(GuidanceState, "forced_tokens", half)
    assert_rejected("jump-forward")
