"""Blocks that are taken early pass their certificate; other iterations and caches do not."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.rounds import scripted, wordy
from anydecode.decoders.depth import ceed
from anydecode.decoders.depth.ceed import Ceed
from anydecode.errors import AnydecodeError
from anydecode.scoring.score import Scores
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("ceed")


@pytest.mark.parametrize("defaults", [{"passes": 7}, {"block": 15}], ids=str)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "ceed", **defaults)
    assert_rejected("ceed")


def test_blocks_that_start_as_copies_of_the_last_token_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copies(self: Ceed, sequence: Sequence) -> list[int]:
        return [sequence.prompt[-1]] * (min(self.block, sequence.remaining) - 1)

    monkeypatch.setattr(Ceed, "_first_tokens", copies)
    assert_rejected("ceed")


@pytest.mark.parametrize("moves", [False, True])
def test_blocks_that_start_as_the_prompt_are_rejected(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    def pieces(self: Ceed, sequence: Sequence) -> list[int]:
        prompt, first = sequence.prompt, sequence.length if moves else 0
        size = min(self.block, sequence.remaining) - 1
        return [prompt[(first + i) % len(prompt)] for i in range(size)]

    monkeypatch.setattr(Ceed, "_first_tokens", pieces)
    assert_rejected("ceed")


def test_what_changed_tokens_have_stored_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceed, "num_unchanged", lambda fed, tokens: len(fed))
    assert_rejected("ceed")


def test_predictions_one_position_late_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Scores.sample

    def late(self: Scores, row: int) -> int:
        return sample(self, max(0, row - 1))

    monkeypatch.setattr(Scores, "sample", late)
    assert_rejected("ceed")


def test_the_first_tokens_of_a_block_are_those_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    with scripted(wordy()) as llm:
        plain = llm.generate("abcabc", decoder="autoregressive", **options).tokens
        for passes in range(1, 6):
            found = llm.generate("abcabc", decoder=f"ceed:passes={passes}", **options).tokens
            assert found[:passes] == plain[:passes]


def test_what_needs_the_tokens_before_is_refused_in_one_line() -> None:
    with scripted(wordy()) as llm:
        with pytest.raises(AnydecodeError, match="constraints, penalties or guidance"):
            llm.generate("a", decoder="ceed", presence_penalty=1.0)
        with pytest.raises(AnydecodeError, match="passes is 0; allowed are 1 to"):
            llm.generate("a", decoder="ceed:passes=0")
