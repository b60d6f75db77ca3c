"""DEER passes its certificate; wrong ways to draft the block do not. Penalties of drafts."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.rounds import rounds
from anydecode.decoders.speculative.diffusion_draft import DiffusionSession
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected

marginals = DiffusionSession.marginals


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("deer")


def test_rows_that_are_one_position_late_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: DiffusionSession, count: int) -> Generator[Any, Any, list[np.ndarray]]:
        rows = yield from marginals(self, count + 1)
        return rows[1:]

    monkeypatch.setattr(DiffusionSession, "marginals", late)
    assert_rejected("deer")


def test_drafts_sampled_with_other_noise_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def independent(self: Sequence, sampler: Any, row: np.ndarray, position: int) -> int:
        noise = self.noise.with_purpose("draft").gumbel(range(len(row)), position)
        scores = sampler.distribution(row).dense(len(row))
        with np.errstate(divide="ignore"):
            return int((np.log(scores) + noise).argmax())

    monkeypatch.setattr(Sequence, "sample", independent)
    assert_rejected("deer")


def test_a_draft_counts_for_the_penalties_of_those_after_it() -> None:
    row = np.zeros(ByteTokenizer.vocab_size, np.float32)
    row[[97, 98, 99]] = 3, 2, 1
    target, draft = ScriptedModel(lambda seen: row), ScriptedModel(lambda seen: row, causal=False)
    with LLM(target, tokenizer=ByteTokenizer(), draft=draft, cache_positions=256) as llm:
        trace = rounds(llm, "deer:size=3", "x", 4, presence_penalty=1.5)
    assert trace[0].tokens == [97, 98, 97] == trace[0].generated[:3]
