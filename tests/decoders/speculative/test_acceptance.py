"""Acceptance rules: exact rules follow the target's distribution; broken ones fail the tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.catalogue import Card
from anydecode.certification import certify as certifying
from anydecode.certification import checks as certificate_checks
from anydecode.certification.certify import certify_one, load_oracle_tests
from anydecode.certification.checks import Check, measure
from anydecode.certification.chi_square import (
    PROMPT,
    SAMPLING_OPTIONS,
    VOCABULARY,
    Alternating,
    expected,
    fit,
    sampled,
    small_llm,
    upper_gamma,
)
from anydecode.certification.oracles.speculative.acceptance_outcomes import (
    TableTrees,
    cases,
    outcome,
)
from anydecode.decoders.framework.acceptance import TopMAcceptance, TypicalAcceptance
from anydecode.decoders.framework.rejection import (
    RejectionSampling,
    acceptance_rule,
    rejection_steps,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.errors import InvalidRequestError


def passed(checks: Iterator[Check]) -> bool:
    found = list(checks)
    assert found
    failed = [check for check in found if not check.passed]
    assert not failed, failed
    return True


def total_error(kind: str, width: int, steps: object) -> float:
    return max(float(abs(outcome(p, q, kind, width, steps) - p).sum()) for p, q in cases())


def test_oracle_tests_pass() -> None:
    for key in ("typical-acceptance", "top-m-acceptance"):
        assert passed(load_oracle_tests()[key]())


@pytest.mark.parametrize("kind", ["wor", "iid", "point"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_outcome_probabilities_equal_the_target(kind: str, width: int) -> None:
    assert total_error(kind, width, rejection_steps) < 1e-12


def unconditional(p, q, kind, tokens):
    """Broken: siblings drawn without replacement are compared with the whole q."""
    return rejection_steps(p, q, "iid", tokens)


def no_residual(p, q, kind, tokens):
    """Broken: after a rejection the token is sampled from p itself."""
    return ((probability, p) for probability, _ in rejection_steps(p, q, kind, tokens))


def by_draft_probability(p, q, kind, tokens):
    """Broken: chosen siblings are treated as drawn ones."""
    return rejection_steps(p, q, "wor", tokens)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("wor", unconditional),
        ("wor", no_residual),
        ("iid", no_residual),
        ("point", by_draft_probability),
    ],
)
def test_broken_rules_fail_over_all_outcomes(kind: str, broken: object) -> None:
    assert total_error(kind, 2, broken) > 1e-2


def test_unconditional_q_fails_chi_square() -> None:
    p, q = np.array([0.05, 0.15, 0.3, 0.5]), np.array([0.5, 0.3, 0.15, 0.05])
    random = np.random.default_rng(3)

    def draw(steps) -> int:
        drawn = random.choice(4, 3, replace=False, p=q)
        rest = p
        for token, (probability, left) in zip(drawn, steps(p, q, "wor", drawn), strict=True):
            rest = left
            if random.random() < probability:
                return int(token)
        return int(random.choice(4, p=rest))

    wanted = {(token,): float(p[token]) for token in range(4)}
    assert fit([(draw(rejection_steps),) for _ in range(4000)], wanted).passed
    assert not fit([(draw(unconditional),) for _ in range(4000)], wanted).passed


class Broken(RejectionSampling):
    def steps(self, p, q, kind, tokens):
        return no_residual(p, q, kind, tokens)


@pytest.mark.parametrize("name", ["T=0.7 with top-p", "a grammar"])
def test_chains_through_the_engine_follow_the_target(name: str) -> None:
    with small_llm() as llm:
        decoder = catalogue.build("speculative-sampling", size=2, acceptance="rejection")
        found = fit(
            sampled(llm, decoder, SAMPLING_OPTIONS[name], 300), expected(SAMPLING_OPTIONS[name])
        )
    assert found.passed, found


@pytest.mark.parametrize("kind", ["wor", "iid", "point"])
def test_trees_through_the_engine_follow_the_target(kind: str) -> None:
    options = SAMPLING_OPTIONS["penalties"]
    with small_llm() as llm:
        decoder = Speculative(TableTrees(kind), acceptance=RejectionSampling())
        found = fit(sampled(llm, decoder, options, 300), expected(options))
        assert found.passed, found
        if kind == "wor":
            decoder = Speculative(TableTrees(kind, 1), acceptance=Broken())
            assert not fit(sampled(llm, decoder, options, 300), expected(options)).passed


def test_draft_distribution_without_processors_fails() -> None:
    """q must come from the same sampler as p: here the drafter ignores the temperature."""
    from anydecode.sampling.sampler import Sampler

    class IgnoresTemperature(TableTrees):
        def open(self, sequence):
            session = super().open(sequence)
            tables = session.propose

            def propose(size):
                tree = yield from tables(size)
                flat = Sampler(1.0).distribution(self.script(tuple(sequence.all_tokens)))
                tree.probabilities[-1] = flat.dense(VOCABULARY)
                return tree

            session.propose = propose
            return session

    options = {"temperature": 0.3}
    for drafter, right in ((TableTrees("wor", 1), True), (IgnoresTemperature("wor", 1), False)):
        with small_llm() as llm:
            decoder = Speculative(drafter, acceptance=RejectionSampling())
            found = fit(sampled(llm, decoder, options, 300), expected(options))
        assert found.passed is right, found


def test_samples_have_separate_constraint_states() -> None:
    with small_llm() as llm:
        texts = sampled(llm, catalogue.build("autoregressive"), SAMPLING_OPTIONS["a grammar"], 40)
    for text in texts:
        state = Alternating()
        for token in text:
            assert state.mask()[token]
            state.advance(token)


def test_equal_distributions_always_accept() -> None:
    p = np.array([0.25, 0.75])
    (probability, rest), *_ = rejection_steps(p, p, "wor", [1])
    assert probability == 1.0
    assert np.array_equal(rest, p)  # p - q is zero everywhere, so p is used


def test_greedy_rejection_equals_plain_greedy_decoding() -> None:
    with small_llm() as llm:
        plain = llm.generate(PROMPT, max_tokens=40, decoder="autoregressive")
        drafted = llm.generate(PROMPT, max_tokens=40, decoder="rejection-sampling")
    assert drafted.tokens == plain.tokens
    assert drafted.stats.passes < plain.stats.passes


def test_every_rule_returns_log_probabilities() -> None:
    with small_llm() as llm:
        for name in ("rejection", "typical", "top-m", "token-exact"):
            decoder = f"speculative-sampling:acceptance={name}"
            options = {"temperature": 0.9, "seed": 3, "logprobs": 1, "max_tokens": 30}
            answer = llm.generate(PROMPT, decoder=decoder, **options)
            assert len(answer.logprobs) == 30
            assert None not in answer.logprobs


def test_invalid_parameters_have_one_line_errors() -> None:
    for make in (
        lambda: RejectionSampling(0),
        lambda: TypicalAcceptance(epsilon=1.5),
        lambda: TopMAcceptance(0),
        lambda: acceptance_rule("majority"),
    ):
        with pytest.raises(InvalidRequestError) as error:
            make()
        assert "\n" not in str(error.value)


def test_upper_gamma_matches_chi_square_tables() -> None:
    # chi-square's 5% points for 1, 5 and 30 degrees of freedom, from any table
    for degrees, point in ((1, 3.841459), (5, 11.070498), (30, 43.772972)):
        assert upper_gamma(degrees / 2, point / 2) == pytest.approx(0.05, abs=1e-7)
    assert upper_gamma(2.0, 0.0) == 1.0


def test_impossible_outcome_fails_the_fit() -> None:
    assert fit([(0,)] * 50 + [(1,)] * 50, {(0,): 0.5, (1,): 0.5}).passed
    assert not fit([(0,)] * 50 + [(2,)], {(0,): 0.5, (1,): 0.5}).passed
    assert not fit([(0,)] * 80 + [(1,)] * 20, {(0,): 0.5, (1,): 0.5}).passed


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


def test_wrong_claim_of_exactness_fails_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("T=1", "penalties", "T=0.7 with top-p"):
        monkeypatch.delitem(SAMPLING_OPTIONS, name)
    card = Card("wrong", "speculative", "", "distribution-exact")
    make = lambda: Speculative(TableTrees("wor", 1), acceptance=Broken())  # noqa: E731
    checks = {check.name: check.passed for check in certifying.distribution_claim(card, make)}
    assert len(checks) == 1
    assert not any(checks.values())
