"""Adaptive weighted rejection sampling: its certificate, mistakes that it rejects, and its
weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.certification.checks import scripted_llm
from anydecode.certification.oracles.constrained.trap_model import TRUTH, WORDS, distance, trap_llm
from anydecode.decoders.constrained import awrs
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.noise import Noise, stream_id
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("awrs")


def test_certificate_rejects_equal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recursive = awrs._recursive

    def unweighted(*given: Any) -> awrs.Draw:
        return replace(recursive(*given), log_weight=0.0)

    monkeypatch.setattr(awrs, "_recursive", unweighted)
    assert_rejected("awrs")


def test_certificate_rejects_rejection_without_the_second_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recursive = awrs._recursive

    def one_test(
        probabilities: Any, tokens: Any, allowed: Any, noise: Any, position: int
    ) -> awrs.Draw:
        seen: list[int] = []

        def until_first(token: int) -> bool:
            if any(map(allowed, seen)):
                return True
            seen.append(token)
            return bool(allowed(token))

        return recursive(probabilities, tokens, until_first, noise, position)

    monkeypatch.setattr(awrs, "_recursive", one_test)
    assert_rejected("awrs")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("likeliest", [0.3, 0.9], ids=["recursive", "geometric"])
@pytest.mark.parametrize("is_valid", [True, False], ids=["likely is valid", "likely is not"])
def test_weights_are_unbiased_with_few_tests(likeliest: float, is_valid: bool) -> None:
    rest = np.linspace(3, 1, 149)
    probabilities = np.concatenate([[likeliest], (1 - likeliest) * rest / rest.sum()])
    valid = {token for token in range(150) if token % 3 == (0 if is_valid else 1)}
    drawn = [
        awrs.draw(probabilities, np.arange(150), valid.__contains__, Noise(seed, stream_id(0)), 5)
        for seed in range(3000)
    ]
    weights = np.exp([one.log_weight for one in drawn])
    tokens = np.array([-1 if one.token is None else one.token for one in drawn])
    expected = probabilities[sorted(valid)].sum()
    error = weights.std() / np.sqrt(len(weights))
    assert abs(weights.mean() - expected) < 3 * error + 1e-9
    for token in sorted(valid)[:2]:
        found = np.where(tokens == token, weights, 0)
        bound = 3 * found.std() / np.sqrt(len(found)) + 2e-3
        assert abs(found.mean() - probabilities[token]) < bound
    assert np.mean([one.tests for one in drawn]) < 15
    # Control: wrong weights are detected as biased.
    assert abs(np.mean(weights / 1.5) - expected) > 3 * error


def test_no_token_is_drawn_if_none_is_allowed() -> None:
    for likeliest in (0.5, 0.9):
        probabilities = np.array([likeliest, 1 - likeliest])
        found = awrs.draw(probabilities, np.arange(2), lambda token: False, Noise(1, 0), 0)
        assert found.token is None and found.log_weight == -np.inf


@pytest.mark.slow
def test_more_particles_come_closer_to_the_conditional_distribution() -> None:
    few, many = distance(awrs.Awrs(1), 150), distance(awrs.Awrs(12), 120)
    assert many < 0.15 < 0.3 < few


@pytest.mark.slow
def test_the_evidence_is_unbiased_for_every_number_of_particles() -> None:
    for particles in (1, 3):
        decoder, values, num_tests = awrs.Awrs(particles), [], 0
        with trap_llm() as llm:
            for seed in range(200):
                request = llm.request(
                    "?", decoder=decoder, constraint=WORDS, temperature=1.0, seed=seed
                )
                llm.start(request, background=False)
                llm.driver.advance(lambda: request.done)  # noqa: B023
                try:
                    request.generation()
                except ConstraintError:
                    values.append(0.0)
                else:
                    state = request.jobs[0].sequence.state[awrs.STATE]
                    values.append(float(np.exp(state["evidence"])))
                    num_tests = max(num_tests, state["tests"])
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - sum(TRUTH.values())) < 3 * error
        assert 0 < num_tests < 20 * particles


def test_greedy_decoding_equals_plain_greedy_decoding() -> None:
    options: dict[str, Any] = {"constraint": Regex("(the |cat |on )+!"), "max_tokens": 24}
    with scripted_llm() as llm:
        plain = llm.generate("the cat", **options).tokens
        assert llm.generate("the cat", decoder="awrs", **options).tokens == plain


@pytest.mark.parametrize(("particles", "threshold"), [(0, 0.5), (61, 0.5), (4, 2.0)])
def test_invalid_options_are_refused(particles: int, threshold: float) -> None:
    with pytest.raises(InvalidRequestError):
        awrs.Awrs(particles, threshold)


@pytest.mark.parametrize("other", [{"particles": 1}, {"threshold": 0.0}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "awrs", **other)
    assert_rejected("awrs")


@pytest.mark.slow
def test_certificate_rejects_weights_that_resampling_forgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resampled = awrs.Awrs._resampled

    def forgetful(self: awrs.Awrs, sequence: Any, particles: Any, depth: int) -> Any:
        kept = resampled(self, sequence, particles, depth)
        for particle in kept if kept is not particles else ():
            particle.weight = 0.0
        return kept

    monkeypatch.setattr(awrs.Awrs, "_resampled", forgetful)
    assert_rejected("awrs")


def test_certificate_rejects_draws_that_forget_rejected_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the draws of tokens already rejected, the second round finds too much allowed."""
    monkeypatch.setattr(Noise, "coin", lambda *_: 1.0)
    assert_rejected("awrs")
