"""The general claims of a certificate: a method that breaks one fails under the name of that
claim."""

from __future__ import annotations

from typing import Any

from anydecode.catalogue import Card
from anydecode.certification.certify import claim
from anydecode.decoders.decoder import Decoder
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
    assert failed(GreedyIsWrong) == {"equals plain decoding, scripted, T=0.0"}
    fits = [name for name in results(GreedyIsWrong) if name.startswith("follows the target's")]
    assert len(fits) == 4
