"""Segmented rollouts: their certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.segment_rollout import Segment, UnfinishedSample
from anydecode.certification.checks import scripted_llm
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("segment-rollout")


def test_certificate_rejects_samples_without_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of a sample selects its noise."""
    samples = Segment.samples

    def renumbered(self: Segment, *given: Any) -> list[UnfinishedSample]:
        found = samples(self, *given)
        return [UnfinishedSample(n, one.tokens) for n, one in enumerate(found[::-1])][::-1]

    monkeypatch.setattr(Segment, "samples", renumbered)
    assert_rejected("segment-rollout")


def test_certificate_rejects_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "seed", property(lambda self: 6 if self.resume else None))
    assert_rejected("segment-rollout")


@pytest.mark.parametrize(
    "key",
    [
        "typical-acceptance",
        "quickprefill",
        "speculative-sampling:acceptance=rejection",
    ],
)
def test_segments_need_a_token_exact_decoder_however_it_is_built(key: str) -> None:
    """Factories build some of these, classes the others."""
    with scripted_llm() as llm:
        assert llm.generate("abc", decoder="prompt-lookup", segment=2, max_tokens=4).resume
        with pytest.raises(UnsupportedCombinationError, match="need a token-exact decoder"):
            llm.request("abc", decoder=key, segment=2)


@pytest.mark.parametrize("token", [-1, 10, 11])
def test_a_resumed_token_must_be_in_the_vocabulary(token: int) -> None:
    def resumed(tokens: list[int]) -> list[UnfinishedSample]:
        unfinished = {"seed": 1, "samples": [{"number": 2, "tokens": tokens}]}
        return Segment(resume=unfinished).samples(1, 10)

    assert resumed([0, 9]) == [UnfinishedSample(2, (0, 9))]
    with pytest.raises(InvalidRequestError, match=f"token {token} is not in the vocabulary"):
        resumed([0, token])
