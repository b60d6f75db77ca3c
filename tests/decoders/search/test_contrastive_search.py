"""Contrastive search: its certificate, mistakes that the certificate rejects, and constraints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.certification.checks import measures_of, scripted_llm
from anydecode.certification.oracles.sampling.repetition import repetition
from anydecode.certification.oracles.search.contrastive_search import Reflecting
from anydecode.decoders.search import contrastive_search
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import toy_llm


def test_certificate() -> None:
    assert_certified("contrastive-search")


def test_certificate_rejects_similarity_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    states = contrastive_search.States
    monkeypatch.setattr(states, "max_cosine", lambda self, state: 0.0)
    (measure,) = measures_of("contrastive-search")
    assert measure.run(60) > measure.margin
    assert_rejected("contrastive-search")


def test_certificate_rejects_similarity_to_the_latest_state_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = contrastive_search.States
    monkeypatch.setattr(states, "max_cosine", lambda self, state: float(self.rows[-1] @ state))
    assert_rejected("contrastive-search")


def test_certificate_rejects_states_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrastive_search, "unit", lambda state: state)
    assert_rejected("contrastive-search")


def test_greedy_decoding_fails_its_measure() -> None:
    (measure,) = measures_of("contrastive-search")
    assert repetition(Reflecting(), 60) > measure.margin


def test_a_constraint_and_a_shared_prefix() -> None:
    prompt = "a long prompt that fills a block of the prefix cache: "
    options = {"max_tokens": 12, "decoder": "contrastive-search:k=3", "ignore_eos": True}
    constraint = JsonSchema({"enum": ["yes", "no", "maybe"]})
    with toy_llm() as llm:
        first, second = (llm.generate(prompt, **options).tokens for _ in range(2))
        bound = llm.generate(prompt, **{**options, "constraint": constraint, "logprobs": 1})
    assert first == second
    assert bound.text in ('"yes"', '"no"', '"maybe"')
    assert all(np.isfinite(token.logprob) for token in bound.logprobs)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([1.0, 3.0, 2.0, 0.0], [1, 2, 0]), ([2.0, 2.0, 3.0, 3.0], [2, 3, 0])],
)
def test_candidates_are_ordered_by_probability_and_then_by_token(
    logits: list[float], expected: list[int]
) -> None:
    """Of equal scores the first candidate wins."""
    decoder = contrastive_search.ContrastiveSearch(k=3)
    tokens, probabilities = decoder._candidates(Sampler(1.0), np.array(logits, np.float32))
    weights = np.exp(logits)
    assert tokens == expected
    assert probabilities == pytest.approx(weights[expected] / weights.sum())


@pytest.mark.parametrize("other", [{"k": 3}, {"alpha": 0.3}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "contrastive-search", **other)
    assert_rejected("contrastive-search")


def test_a_request_whose_candidates_do_not_fit_the_cache_is_refused_at_once() -> None:
    with scripted_llm() as llm:
        pool = llm.engine.runners["target"].pool
        options: dict[str, Any] = {"decoder": "contrastive-search:k=4", "ignore_eos": True}
        room = pool.num_slots - 3 - 4 + 1  # behind a prompt of three tokens
        llm.request("abc", max_tokens=room, **options)
        with pytest.raises(InvalidRequestError, match=f"it needs {pool.num_slots + 1} positions"):
            llm.request("abc", max_tokens=room + 1, **options)
