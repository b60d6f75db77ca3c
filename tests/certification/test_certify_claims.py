"""The general claims of a certificate: a method that breaks one fails under the name of that
claim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anydecode.catalogue import Card
from anydecode.certification import certify as certifying
from anydecode.certification import checks as certificate_checks
from anydecode.certification.certify import certify_one, claim
from anydecode.certification.checks import measure
from anydecode.certification.chi_square import SAMPLING_OPTIONS
from anydecode.certification.oracles.speculative.acceptance_outcomes import TableTrees
from anydecode.decoders.decoder import Decoder
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.framework.speculation import Speculative
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class Crowded(Decoder):
    """Bans a token while another sequence is running: its text depends on the batch."""

    card = Card("crowded", "speculative", paper="", exactness="lossy")

    def __init__(self) -> None:
        self.num_running = 0

    def decode(self, sequence: Sequence) -> Decoding:
        self.num_running += 1
        try:
            while not sequence.finished:
                scores = yield sequence.score()
                sequence.emit([66 if self.num_running > 1 else scores.sampled[-1]])
        finally:
            self.num_running -= 1


class GreedyIsWrong(Decoder):
    """Samples as the target does, but emits one fixed token at temperature 0."""

    card = Card("greedy-is-wrong", "speculative", paper="", exactness="distribution-exact")

    def decode(self, sequence: Sequence) -> Decoding:
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([66 if sequence.sampler.is_greedy else scores.sampled[-1]])


def results(method: Any) -> dict[str, Any]:
    return {check.name: check.passed for check in claim(method.card, method)}


def failed(method: Any) -> set[str]:
    return {name for name, passed in results(method).items() if not passed}


def test_a_method_whose_text_depends_on_the_batch_fails() -> None:
    names = failed(Crowded)
    for temperature in (0.0, 0.8):
        assert f"batched equals alone, scripted, T={temperature}" in names
    assert not any(name.startswith("equals plain") for name in names)


def test_a_distribution_exact_method_is_compared_with_plain_decoding_when_greedy() -> None:
    found = results(GreedyIsWrong)
    failures = {name for name, passed in found.items() if not passed}
    assert failures == {"equals plain decoding, scripted, T=0.0"}
    assert sum(name.startswith("follows the target's") for name in found) == 4


def test_lossy_certificate_requires_a_measure_within_its_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificate_checks, "MEASURES", {})
    monkeypatch.setattr(certifying, "claim", lambda card, make: iter(()))
    monkeypatch.setattr(certifying, "load_oracle_tests", lambda: {"typical-acceptance": lambda: []})
    assert not certify_one("typical-acceptance").passed
    measure("typical-acceptance", "loss", samples=3, margin=0.5)(lambda samples: 0.1 * samples)
    assert certify_one("typical-acceptance").passed
    measure("typical-acceptance", "loss", samples=9, margin=0.5)(lambda samples: 0.1 * samples)
    assert not certify_one("typical-acceptance").passed


class NoResidual(RejectionSampling):
    """Samples a rejected token from p itself."""

    def steps(self, p: Any, q: Any, kind: str, tokens: list[int]) -> Iterator[tuple[float, Any]]:
        steps = super().steps(p, q, kind, tokens)
        return ((probability, p) for probability, _ in steps)


def test_wrong_claim_of_exactness_fails_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("T=1", "penalties", "T=0.7 with top-p"):
        monkeypatch.delitem(SAMPLING_OPTIONS, name)
    card = Card("wrong", "speculative", "", "distribution-exact")
    make = lambda: Speculative(TableTrees("wor", 1), acceptance=NoResidual())  # noqa: E731
    checks = {check.name: check.passed for check in certifying.distribution_claim(card, make)}
    assert len(checks) == 1
    assert not any(checks.values())
