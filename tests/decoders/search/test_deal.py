"""DeAL: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.oracles.search.deal import PROMPT, share_reward
from anydecode.decoders.framework.rollouts import Rollout, Rollouts
from anydecode.decoders.search import looking_ahead
from anydecode.decoders.search.deal import Deal
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.errors import InvalidRequestError, RewardError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("deal")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["deal"]())
    assert len(checks) == 6 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "other",
    [{"k": 2}, {"length": 1}, {"weight": 20.0}, {"reward": "length:max_words=3"}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "deal", **other)
    assert_rejected("deal")


def test_certificate_rejects_sampled_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Looking.__init__

    def build(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "temperature": 1.0})

    monkeypatch.setattr(Looking, "__init__", build)
    assert_rejected("deal")


@pytest.mark.slow
def test_certificate_rejects_rewards_of_the_continuation_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = Rollouts.texts

    def alone(self: Rollouts) -> Any:
        skipped = len(self.sequence.stop_checker.text)  # type: ignore[attr-defined]
        return [replace(one, text=one.text[skipped:]) for one in texts(self)]

    monkeypatch.setattr(Rollouts, "texts", alone)
    assert_rejected("deal")


def test_certificate_rejects_a_token_without_its_own_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Looking.ahead

    def uniform(self: Looking, *given: Any) -> Any:
        found = yield from ahead(self, *given)
        return replace(found, logprobs=0 * found.logprobs)

    monkeypatch.setattr(Looking, "ahead", uniform)
    assert_rejected("deal")


@pytest.mark.slow
def test_certificate_rejects_a_kept_continuation_that_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(rollout: Rollout, **changes: Any) -> Rollout:
        return replace(rollout, **{"finish_reason": "length", **changes})

    monkeypatch.setattr(looking_ahead, "replace", ended)
    assert_rejected("deal")


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["deal:length=6", "transfer-q:length=6", "adadec:threshold=0"])
@pytest.mark.parametrize("stop", [[], ["ba"]], ids=str)
def test_kept_continuations_do_not_change_the_text(
    monkeypatch: pytest.MonkeyPatch, decoder: str, stop: list[str]
) -> None:
    texts, rows = [], []
    options: dict[str, Any] = {"max_tokens": 14, "stop": stop, "temperature": 0.0, "logprobs": 0}
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(looking_ahead, "_Kept", lambda *given: None)
        with LLM(ScriptedModel(seed=1), tokenizer=ByteTokenizer(), draft="none") as llm:
            found = llm.generate(["ab", "abc", "cab" * 5], decoder=decoder, **options)
            llm.engine.check_integrity()
        texts.append([(one.text, one.logprobs) for one in found])
        rows.append(sum(one.stats.rows for one in found))
    assert texts[0] == texts[1] and rows[0] < rows[1]


def test_prefixes_are_computed_once() -> None:
    """Rows: the prompt, one per token, and those of the continuations, of which one goes on from
    the token before."""
    with letters_llm() as llm:
        stats = llm.generate("ab" * 10, decoder="deal:k=3,length=2", max_tokens=6).stats
    ahead = 3 * 2 + 3 * (1 + 2 * 2) + 2 * 1  # no text goes beyond the limit of tokens
    assert (stats.rows, stats.passes) == (20 + 5 + ahead, 6 + 2 * 4 + 1)


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        decoder = Deal(3, 4, 5.0, lambda prompt, texts: [float("dog" in text) for text in texts])
        found = llm.generate("a", decoder=decoder, constraint=Regex("(cat|dog)+x"), logprobs=0,
                             max_tokens=9)  # fmt: skip
        assert "dog" in found.text and len(found.logprobs or ()) == len(found.tokens)
        assert None not in (found.logprobs or ())


def test_a_failing_reward_frees_the_branches() -> None:
    with letters_llm() as llm:
        with pytest.raises(RewardError, match="failed: ZeroDivisionError"):
            llm.generate(PROMPT, decoder=Deal(reward=lambda prompt, texts: [1 / 0]))
        llm.engine.check_integrity()
        assert llm.generate("a", decoder=Deal(2, 2, reward=share_reward), max_tokens=3).text


@pytest.mark.parametrize("options", [{"k": 0}, {"length": -1}, {"weight": -1.0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="deal needs|allowed are"):
        catalogue.build("deal", **options)
