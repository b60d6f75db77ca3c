"""Jump-forward decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import Regex
from anydecode.certification.checks import scripted_llm
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


@pytest.mark.parametrize(("max_forced", "expected"), [(2, [2, 2, 2]), (3, [3, 3]), (64, [8])])
def test_a_round_drafts_at_most_so_many_forced_tokens(max_forced: int, expected: list[int]) -> None:
    decoder = f"jump-forward:max_forced={max_forced},size=1"
    options: dict[str, Any] = {"max_tokens": 20, "trace": True}
    with scripted_llm() as llm:
        answer = llm.generate("x", decoder=decoder, constraint=Regex("abcdefgh"), **options)
    assert answer.text == "abcdefgh"
    drafted = [len(one["drafted"]) for one in answer.trace if len(one["drafted"]) > 1]
    assert drafted == expected
