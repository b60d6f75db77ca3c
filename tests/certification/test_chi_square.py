"""The chi-square test of samples: its tables, and what it rejects."""

from __future__ import annotations

import pytest

from anydecode import catalogue
from anydecode.certification.chi_square import (
    SAMPLING_OPTIONS,
    Alternating,
    fit,
    sampled,
    small_llm,
    upper_gamma,
)


def test_upper_gamma_matches_chi_square_tables() -> None:
    # chi-square's 5% points for 1, 5 and 30 degrees of freedom, from any table
    for degrees, point in ((1, 3.841459), (5, 11.070498), (30, 43.772972)):
        assert upper_gamma(degrees / 2, point / 2) == pytest.approx(0.05, abs=1e-7)
    assert upper_gamma(2.0, 0.0) == 1.0


def test_impossible_outcome_fails_the_fit() -> None:
    assert fit([(0,)] * 50 + [(1,)] * 50, {(0,): 0.5, (1,): 0.5}).passed
    assert not fit([(0,)] * 50 + [(2,)], {(0,): 0.5, (1,): 0.5}).passed
    assert not fit([(0,)] * 80 + [(1,)] * 20, {(0,): 0.5, (1,): 0.5}).passed


def test_samples_have_separate_constraint_states() -> None:
    with small_llm() as llm:
        texts = sampled(llm, catalogue.build("autoregressive"), SAMPLING_OPTIONS["a grammar"], 40)
    for text in texts:
        state = Alternating()
        for token in text:
            assert state.mask()[token]
            state.advance(token)
