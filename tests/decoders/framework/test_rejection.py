"""Rejection rules follow the target's distribution; broken ones fail the tests."""

from __future__ import annotations

import re

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.chi_square import (
    SAMPLING_OPTIONS,
    VOCABULARY,
    expected,
    fit,
    sampled,
    small_llm,
)
from anydecode.certification.oracles.speculative.acceptance_outcomes import (
    TableTrees,
    cases,
    outcome,
)
from anydecode.decoders.framework.rejection import (
    CHAIN_NOISE,
    CHOSEN_NOISE,
    TREE_NOISE,
    RejectionSampling,
    exclude_token,
    rejection_steps,
)
from anydecode.decoders.framework.speculation import Speculative
from anydecode.sampling.noise import Noise


def total_error(kind: str, width: int, steps: object) -> float:
    return max(float(abs(outcome(p, q, kind, width, steps) - p).sum()) for p, q in cases())


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


def test_equal_distributions_always_accept() -> None:
    p = np.array([0.25, 0.75])
    (probability, rest), *_ = rejection_steps(p, p, "wor", [1])
    assert probability == 1.0
    assert np.array_equal(rest, p)  # p - q is zero everywhere, so p is used


def accepted_by_rule(p: np.ndarray, q: np.ndarray, width: int) -> float:
    """The probability that one of `width` siblings, drawn without replacement, is accepted."""

    def missed(tokens: list[int], rest: np.ndarray | None) -> float:
        if len(tokens) == width:
            chances = [chance for chance, _ in rejection_steps(p, q, "wor", tokens)]
            return float(np.prod([1 - chance for chance in chances]))
        assert rest is not None
        return sum(
            float(rest[token]) * missed([*tokens, token], exclude_token(rest, token))
            for token in np.flatnonzero(rest).tolist()
        )

    return 1 - missed([], q)


def accepted_with_shared_noise(p: np.ndarray, q: np.ndarray, width: int) -> float:
    """The share of positions at which the target's token is among the best `width` of the draft
    under the same noise."""
    noise, tokens, count = Noise(5), np.arange(len(p)), 20_000
    hits = 0
    for position in range(count):
        keys = noise.gumbel(tokens, position)
        best = np.argsort(-(np.log(q) + keys))[:width]
        hits += int((np.log(p) + keys).argmax()) in best
    return hits / count


def test_the_cards_say_what_sharing_noise_costs() -> None:
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    chain, tree = (
        [float(number) for number in re.findall(r"0\.\d{3}", text)]
        for text in (CHAIN_NOISE, TREE_NOISE)
    )
    assert chain == tree[:2]
    for width, (shared, published) in enumerate(zip(tree[::2], tree[1::2], strict=True), 1):
        assert accepted_by_rule(p, q, width) == pytest.approx(published, abs=5e-4)
        assert accepted_with_shared_noise(p, q, width) == pytest.approx(shared, abs=0.01)


@pytest.mark.slow
def test_the_cards_say_what_sharing_noise_changes_for_chosen_drafts() -> None:
    """The chance that two distributions have their largest keys at the same token is computed."""
    numbers = [
        [float(number) for number in re.findall(r"0\.\d+", case)]
        for case in CHOSEN_NOISE.split("for (")[1:]
    ]
    assert len(numbers) == 2
    for *distributions, shared, published in numbers:
        p, q = np.array(distributions[:3]), np.array(distributions[3:])
        (probability, _), *_ = rejection_steps(p, None, "point", [int(q.argmax())])
        assert probability == pytest.approx(published, abs=5e-4)
        both = [1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p))]
        assert sum(both) == pytest.approx(shared, abs=5e-4)
        assert accepted_with_shared_noise(p, q, 1) == pytest.approx(shared, abs=0.01)
