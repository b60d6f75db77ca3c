"""Rejection sampling: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anydecode.certification.chi_square import PROMPT, small_llm
from anydecode.decoders.framework.rejection import RejectionSampling
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("rejection-sampling")


def test_certificate_rejects_a_rejected_token_sampled_from_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = RejectionSampling.steps

    def no_residual(
        self: RejectionSampling, p: np.ndarray, q: np.ndarray, kind: str, tokens: list[int]
    ) -> Iterator[tuple[float, np.ndarray]]:
        return ((probability, p) for probability, _ in steps(self, p, q, kind, tokens))

    monkeypatch.setattr(RejectionSampling, "steps", no_residual)
    assert_rejected("rejection-sampling")


def test_greedy_tokens_equal_those_of_plain_decoding() -> None:
    with small_llm() as llm:
        plain = llm.generate(PROMPT, max_tokens=40, decoder="autoregressive")
        drafted = llm.generate(PROMPT, max_tokens=40, decoder="rejection-sampling")
    assert drafted.tokens == plain.tokens
    assert drafted.stats.passes < plain.stats.passes
