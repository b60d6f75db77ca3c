"""Jump-forward decoding: its certificate, mistakes that the certificate rejects, and its drafts."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from anydecode import JsonSchema, Regex
from anydecode.certification.checks import scripted_llm
from anydecode.constraints.guidance_engine import GuidanceState
from anydecode.decoders.constrained import jump_forward
from anydecode.decoders.framework.speculation import Speculative
from anydecode.decoders.speculative.prompt_lookup import PromptLookupDrafter
from certificates import assert_certified, assert_rejected

SCHEMA = {
    "type": "object",
    "properties": {"first": {"enum": ["one", "two"]}, "second": {"type": "boolean"}},
    "required": ["first", "second"],
    "additionalProperties": False,
}


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


def test_the_tokens_of_plain_decoding_in_fewer_passes() -> None:
    constraint = JsonSchema(SCHEMA, whitespace="")
    with scripted_llm() as llm:
        for temperature, limit in product((0.0, 0.9), (5, 100)):
            options: dict[str, Any] = {
                "constraint": constraint,
                "temperature": temperature,
                "seed": 1,
                "max_tokens": limit,
            }
            plain = llm.generate("x", decoder="autoregressive", **options)
            fast = llm.generate("x", decoder="jump-forward", **options)
            assert fast.tokens == plain.tokens and fast.finish_reason == plain.finish_reason
            assert fast.stats.passes * 2 < plain.stats.passes


def test_wrongly_forced_tokens_are_not_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = JsonSchema(SCHEMA, whitespace="")
    correct = GuidanceState.forced_tokens

    def wrong(self: GuidanceState) -> list[int]:
        allowed = np.flatnonzero(self.mask())
        return [int(allowed[-1])] if len(allowed) > 1 else correct(self)

    decoder = Speculative(jump_forward.JumpForward(PromptLookupDrafter()), 4)
    with scripted_llm() as llm:
        expected = llm.generate("x", constraint=constraint, decoder="autoregressive").tokens
        monkeypatch.setattr(GuidanceState, "forced_tokens", wrong)
        assert llm.generate("x", decoder=decoder, constraint=constraint).tokens == expected
