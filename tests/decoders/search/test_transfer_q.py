"""Transfer Q*: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.oracles.search.deal import share_reward
from anydecode.decoders.search import looking_ahead, transfer_q
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.decoders.search.transfer_q import TransferQ
from anydecode.errors import InvalidRequestError, RewardError
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("transfer-q")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["transfer-q"]())
    assert len(checks) == 10 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "other",
    [{"k": 2}, {"length": 1}, {"weight": 3.0}, {"reward": "length:max_words=3"}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "transfer-q", **other)
    assert_rejected("transfer-q")


def test_certificate_rejects_continuations_of_the_model_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Looking.__init__

    def build(self: Any, k: int, length: int, temperature: float, *given: Any) -> None:
        made(self, k, length, temperature, "target", given[-1])

    monkeypatch.setattr(Looking, "__init__", build)
    assert_rejected("transfer-q")


def test_certificate_rejects_continuations_with_the_same_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking_ahead, "_STREAMS", 1)
    assert_rejected("transfer-q")


def test_certificate_rejects_rewards_outside_of_the_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the reward were added to logits that the temperature has divided."""
    choice = TransferQ._choice

    def wrong(sequence: Any, tokens: Any, totals: Any) -> int:
        temperature = sequence.sampler.temperature or 1.0
        return choice(sequence, tokens, totals * temperature)

    monkeypatch.setattr(TransferQ, "_choice", staticmethod(wrong))
    assert_rejected("transfer-q")


def test_certificate_rejects_an_indirect_reward_without_its_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_q, "_indirect", lambda reward, source: reward - source)
    assert_rejected("transfer-q")


def test_certificate_rejects_probabilities_as_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Looking.ahead

    def uniform(self: Looking, *given: Any) -> Any:
        found = yield from ahead(self, *given)
        return replace(found, logprobs=0.5 * found.logprobs)

    monkeypatch.setattr(Looking, "ahead", uniform)
    assert_rejected("transfer-q")


def test_prefixes_are_computed_once_by_each_model() -> None:
    """The target computes the prompt and one row per token, the aligned model the rest."""
    with letters_llm() as llm:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 6}
        stats = llm.generate("ab" * 10, decoder=TransferQ(3, 2, reward=share_reward), **options)
    assert stats.stats.rows == 20 + 5


def test_several_samples_and_a_constraint() -> None:
    with letters_llm() as llm:
        found = llm.generate(
            "a", decoder=TransferQ(4, 3, reward=share_reward), constraint=Regex("[abc]{4}"),
            temperature=1.0, seed=1, n=6, logprobs=0,
        )  # fmt: skip
    texts = [one.text for one in found.samples]
    assert all(len(text) == 4 and set(text) <= set("abc") for text in texts)
    assert len(set(texts)) > 1 and None not in (found.logprobs or ())


def test_rewards_that_are_too_far_apart_are_one_line() -> None:
    far = TransferQ(2, 1, 1.0, lambda p, t: [900.0] * len(t), lambda p, t: [0.0] * len(t))
    with letters_llm() as llm:
        with pytest.raises(RewardError, match="they may differ by at most 100"):
            llm.generate("a", decoder=far, max_tokens=4)
        llm.engine.check_integrity()


@pytest.mark.parametrize("options", [{"k": 0}, {"length": -1}, {"weight": -1.0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="transfer-q needs|allowed are"):
        catalogue.build("transfer-q", **options)
