"""Segmented rollouts: their certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.segment_rollout import Segment, UnfinishedSample
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
