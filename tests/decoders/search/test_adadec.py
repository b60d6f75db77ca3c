"""AdaDec: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.api.llm import LLM
from anydecode.certification.certify import load_oracle_tests
from anydecode.certification.oracles.search.adadec import clear_or_uniform_model
from anydecode.certification.oracles.search.beam import ShortTokenizer
from anydecode.decoders.framework.rollouts import Rollouts
from anydecode.decoders.search import adadec
from anydecode.decoders.search.adadec import AdaDec
from anydecode.decoders.search.looking_ahead import Looking
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default
from toy_models import letters_llm


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("adadec")


@pytest.mark.slow
def test_oracle() -> None:
    checks = list(load_oracle_tests()["adadec"]())
    assert len(checks) == 6 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "other", [{"threshold": 1.6}, {"threshold": 1.9}, {"k": 2}, {"length": 4}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    for name, value in other.items():
        replace_class_default(monkeypatch, AdaDec, name, value)
    assert_rejected("adadec")


def test_certificate_rejects_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    nats = adadec.entropy
    monkeypatch.setattr(adadec, "entropy", lambda *given: nats(*given) / np.log(2))
    assert_rejected("adadec")


def test_certificate_rejects_sampled_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Looking.__init__

    def build(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "temperature": 1.0})

    monkeypatch.setattr(Looking, "__init__", build)
    assert_rejected("adadec")


def test_certificate_rejects_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every continuation had the same number of tokens; those that end have fewer."""
    texts = Rollouts.texts

    def equally_long(self: Rollouts) -> Any:
        length = len(self.sequence.tokens) + 1
        return [replace(one, num_tokens=length) for one in texts(self)]

    monkeypatch.setattr(Rollouts, "texts", equally_long)
    assert_rejected("adadec")


def test_certificate_rejects_a_token_without_its_own_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Looking.ahead

    def uniform(self: Looking, *given: Any) -> Any:
        found = yield from ahead(self, *given)
        return replace(found, logprobs=0 * found.logprobs)

    monkeypatch.setattr(Looking, "ahead", uniform)
    assert_rejected("adadec")


def test_only_uncertain_tokens_cost_continuations() -> None:
    """Rows: the prompt, one per token, and those of the continuations where there are any."""
    with LLM(clear_or_uniform_model(4), tokenizer=ShortTokenizer(), cache_positions=2048) as llm:
        plain = llm.generate([0, 1], decoder="adadec:threshold=64", max_tokens=12)
        found = llm.generate([0, 1], decoder="adadec:threshold=1,k=2,length=2", max_tokens=12)
        always = llm.generate([0, 1], decoder="adadec:threshold=0,k=2,length=2", max_tokens=12)
    assert plain.stats.rows == 2 + len(plain.tokens) - 1
    assert plain.stats.rows < found.stats.rows < always.stats.rows


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        found = llm.generate(
            "a", decoder="adadec:threshold=0", constraint=Regex("(cat|dog)+x"), logprobs=0,
            max_tokens=9,
        )  # fmt: skip
    assert set(found.text) <= set("catdogx") and len(found.logprobs or ()) == len(found.tokens)
    assert None not in (found.logprobs or ())


@pytest.mark.parametrize("options", [{"k": 0}, {"length": -1}, {"threshold": -1.0}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="adadec"):
        catalogue.build("adadec", **options)
