"""Particle filtering: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.benchmarks.search import observed
from anydecode.decoders.search import particle_filtering
from anydecode.decoders.search.particle_filtering import ParticleFiltering
from anydecode.errors import InvalidRequestError, RewardError
from anydecode.rewards.programmatic import Likelihood
from anydecode.rewards.reward import FunctionReward
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("particle-filtering")


@pytest.mark.parametrize(
    "other",
    [
        {"n": 6},
        {"temperature": 0.5},
        {"step": "\n"},
        {"step_tokens": 4},
        {"weights": "increment"},
        {"answer": "draw"},
        {"reward": "length:max_words=2"},
    ],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "particle-filtering", **other)
    assert_rejected("particle-filtering")


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"max_steps": 39}, {"step_tokens": 1000}], ids=str)
def test_certificate_rejects_other_bounds_of_steps(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "particle-filtering", **other)
    assert_rejected("particle-filtering")


@pytest.mark.slow
def test_certificate_rejects_weights_without_the_potential_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The increments are those of the slot, not of the ancestor."""
    weights = ParticleFiltering._weights
    monkeypatch.setattr(
        ParticleFiltering, "_weights", lambda self, after, before: weights(self, after, [])
    )
    assert_rejected("particle-filtering")


def test_certificate_rejects_rewards_as_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParticleFiltering, "_potential", lambda self, value: np.log(value))
    assert_rejected("particle-filtering")


def test_certificate_rejects_draws_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        particle_filtering, "drawn", lambda weights, noise, step: list(range(len(weights)))
    )
    assert_rejected("particle-filtering")


def test_certificate_rejects_copies_with_the_noise_of_their_ancestors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resample(self: Any, group: Any, state: Any, ancestors: Any) -> None:
        group.resample(ancestors, [group.rollouts[one].noise for one in ancestors])
        for number, particle in enumerate(group.rollouts):
            particle.start, particle.start_text = len(particle.tokens), len(group.text(number))

    monkeypatch.setattr(ParticleFiltering, "_resample", resample)
    assert_rejected("particle-filtering")


def test_the_texts_of_all_particles_are_returned_once() -> None:
    with letters_llm("ab") as llm:
        found = llm.generate("a", decoder="particle-filtering:step_tokens=2", n=8, **OPTIONS)
    texts = [tuple(one.tokens) for one in found.samples]
    scores = [one.score for one in found.samples]
    assert len(set(texts)) == len(texts) and scores == sorted(scores, reverse=True)


def test_the_last_step_goes_on_to_the_end() -> None:
    with letters_llm() as llm:
        decoder = "particle-filtering:step_tokens=2,max_steps=2"
        assert len(llm.generate("a", decoder=decoder, **OPTIONS).tokens) == 12


def test_prefixes_are_not_computed_twice() -> None:
    """Rows: the prompt, and at most one per particle and token but the last."""
    with letters_llm() as llm, observed(llm.model, llm.encode("ab" * 10)) as prefixes:
        llm.generate("ab" * 10, decoder="particle-filtering:step_tokens=3", **OPTIONS)
    assert 20 + 11 < prefixes.num_rows == prefixes.num_distinct < 20 + 8 * 11


def test_a_constraint_bounds_every_particle() -> None:
    with letters_llm() as llm:
        decoder = "particle-filtering:step_tokens=1"
        answer = llm.generate("a", decoder=decoder, constraint=Regex("(cat|dog)+"), **OPTIONS)
    assert set(answer.text) <= set("catdog")


def test_rewards_outside_of_their_range_are_refused() -> None:
    with letters_llm() as llm:
        decoder = ParticleFiltering(2, lambda prompt, texts: [1.5] * len(texts), step_tokens=2)
        with pytest.raises(RewardError, match="returned 1.5; its values must be from 0 to 1"):
            llm.generate("a", decoder=decoder, **OPTIONS)
        llm.engine.check_integrity()
    bounded = FunctionReward(lambda prompt, texts: [], bounds=(-1, 1))
    with pytest.raises(InvalidRequestError, match="the reward is between -1 and 1"):
        ParticleFiltering(2, bounded)
    decoder = ParticleFiltering(2, Likelihood(), step_tokens=2)
    with letters_llm() as llm, pytest.raises(RewardError, match="must be from 0 to 1"):
        llm.generate("a", decoder=decoder, **OPTIONS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n": 0}, "n is 0"),
        ({"n": 200}, "their product at most 4095"),
        ({"step_tokens": 0}, "step_tokens is 0; allowed are 1 to 65536"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"weights": "x"}, "replace or increment"),
        ({"answer": "x"}, "best or draw"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("particle-filtering", **options)
