"""φ-Decoding: its certificate, mistakes that the certificate rejects, clusters, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.decoders.framework.clusters import k_means, word_vectors
from anydecode.decoders.search import phi
from anydecode.decoders.search.phi import Foresight, Phi, log_shares
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 10}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("phi")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["phi"]())
    assert len(checks) == 5 and all(check.passed for check in checks), checks


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [{"width": 3}, {"k": 3}, {"step": "x"}, {"step_tokens": 2}, {"rounds": 3}, {"min_rounds": 1},
     {"sigma": 0.0}, {"share": 0.3}, {"temperature": 1.0}],
    ids=str,
)  # fmt: skip
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, Phi, name, value)
    assert_rejected("phi")


@pytest.mark.slow
def test_certificate_rejects_values_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advantage is that of the rest, not of the step."""
    foresee = Phi._foresee

    def steps(self: Phi, group: Any, numbers: Any, noises: Any, means: Any, before: Any) -> Any:
        found = yield from foresee(self, group, numbers, noises, means, before)
        return Foresight(found.rollouts, found.texts, means, np.array(means) - np.array(before))

    monkeypatch.setattr(Phi, "_foresee", steps)
    assert_rejected("phi")


@pytest.mark.slow
def test_certificate_rejects_a_pool_with_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foresight, "pool", property(lambda self: np.arange(len(self.advantages))))
    assert_rejected("phi")


@pytest.mark.slow
def test_certificate_rejects_draws_without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Phi, "_clusters", lambda *given: None)
    assert_rejected("phi")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_certificate_rejects_another_number_of_last_clusters(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(phi, "_LAST_CLUSTERS", count)
    assert_rejected("phi")


@pytest.mark.slow
def test_certificate_rejects_draws_at_another_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phi, "SHARPNESS", 1.0)
    assert_rejected("phi")


def test_clusters_of_words() -> None:
    texts = ["red fox", "red Fox fox", "blue whale", "the blue whale", "a blue whale", "?"]
    vectors = word_vectors(texts)
    assert vectors.shape == (6, 5) and not vectors[5].any()
    assert np.linalg.norm(vectors[:5], axis=1) == pytest.approx(np.ones(5))
    points = np.array([[0, 0], [0, 0.1], [9, 9], [9, 9.1]])
    for seed in range(8):
        labels = k_means(points, 2, np.random.default_rng(seed).random(2))
        assert labels[0] == labels[1] != labels[2] == labels[3]
    assert k_means(np.ones((4, 2)), 3, np.array([0.2, 0.5, 0.9])).tolist() == [0] * 4


def test_shares_sum_to_one() -> None:
    shares = np.exp(log_shares(np.array([0.0, 0.1, -3.0])))
    assert shares.sum() == pytest.approx(1) and shares[1] / shares[0] == pytest.approx(np.e)


def test_prefixes_are_computed_once() -> None:
    """Rows of one round: the prompt, and one per token but the last of every text."""
    with letters_llm() as llm:
        stats = llm.generate(
            "ab" * 10, decoder="phi:width=2,k=2,rounds=1,step_tokens=3", **OPTIONS
        ).stats
    steps, rests, last = 4 * 3, 4 * 7, 2 * 7
    assert stats.rows <= 20 + steps + rests + last


def test_one_text_without_choice_is_a_sample_in_steps() -> None:
    """With width 1 and k 1 every step is kept: temperature 0.6, then 1."""
    with letters_llm() as llm:
        decoder = "phi:width=1,k=1,rounds=1,step_tokens=64"
        found = llm.generate("a", decoder=decoder, **OPTIONS)
    assert len(found.tokens) == 10


def test_the_other_texts_are_returned() -> None:
    with letters_llm("ab\n") as llm:
        found = llm.generate("a", decoder="phi", n=4, **OPTIONS)
    assert len({tuple(one.tokens) for one in found.samples}) == len(found.samples) > 1


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="phi:step_tokens=2,rounds=2", constraint=Regex("(cat|dog)+"), logprobs=0,
            **OPTIONS,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": 0}, "k is 0; allowed are 1 to 1024"),
        ({"step": ""}, "phi needs a step"),
        ({"share": 2.0}, "a share from 0 to 1"),
        ({"rounds": 200}, "make more than 4095 texts"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        catalogue.build("phi", **options)
