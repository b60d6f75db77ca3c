"""Speculative sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.chi_square import PROMPT, small_llm
from anydecode.certification.rounds import VirtualClock, blurred, rounds, scripted, wordy
from anydecode.decoders.framework.rejection import RejectionSampling
from anydecode.decoders.speculative import draft_model
from anydecode.sampling.noise import Noise
from certificates import assert_certified, assert_rejected

TARGET, DRAFT = wordy(), blurred(wordy())


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("speculative-sampling")


def test_certificate_rejects_greedy_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = draft_model.fit_vocab
    monkeypatch.setattr(draft_model, "fit_vocab", lambda sequence, row: 100 * fit(sequence, row))
    assert_rejected("speculative-sampling")


def test_certificate_rejects_a_rejected_token_sampled_from_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = RejectionSampling.steps

    def no_residual(
        self: RejectionSampling, p: np.ndarray, q: np.ndarray, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        return ((probability, p) for probability, _ in steps(self, p, q, kind, tokens))

    monkeypatch.setattr(RejectionSampling, "steps", no_residual)
    assert_rejected("speculative-sampling")


def test_greedy_tokens_of_the_rejection_rule_equal_those_of_plain_decoding() -> None:
    with small_llm() as llm:
        plain = llm.generate(PROMPT, max_tokens=40, decoder="autoregressive")
        key = "speculative-sampling:acceptance=rejection"
        drafted = llm.generate(PROMPT, max_tokens=40, decoder=key)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.passes < plain.stats.passes


def test_sequential_drafting_has_no_overlap() -> None:
    """The clock that measures overlap measures none for sequential drafting."""
    with scripted(TARGET, DRAFT) as llm:
        clock = VirtualClock(llm, target=4.0, draft=1.0)
        rounds(llm, "speculative-sampling", "abc")
    assert len(clock.passes) > 10 and clock.overlap == 0


def test_the_card_says_what_shared_noise_costs() -> None:
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    by_rule = float(np.minimum(p, q).sum())
    noise, size = Noise(3), 20_000
    keys = np.stack([noise.gumbel(range(3), position) for position in range(size)])
    same = ((np.log(p) + keys).argmax(axis=1) == (np.log(q) + keys).argmax(axis=1)).mean()
    by_noise = sum(1 / np.maximum(p / p[token], q / q[token]).sum() for token in range(3))
    assert same == pytest.approx(by_noise, abs=0.015)
    assert by_noise >= by_rule / (2 - by_rule)
    said = " ".join(catalogue.find("speculative-sampling").card.deviations)
    assert f"{by_noise:.3f} of them against {by_rule:.3f}" in said
