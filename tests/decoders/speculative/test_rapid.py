"""RAPID: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import rapid as oracle
from anydecode.certification.rounds import scripted, wordy
from anydecode.decoders.speculative import rapid
from anydecode.decoders.speculative.rapid import ShiftedTarget, retrieve_chunks
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("rapid")


@pytest.mark.parametrize(
    "defaults", [{"size": 9}, {"chunk": 65}, {"count": 7}, {"query": 127}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "rapid", **defaults)
    assert_rejected("rapid")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "rapid", "speculative-sampling")
    assert_rejected("rapid")


def test_certificate_rejects_the_query_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rapid, "retrieve_chunks", lambda prompt, chunk, count, query: prompt[-query:]
    )
    assert_rejected("rapid")


def test_retrieved_prompt_ends_with_the_query() -> None:
    assert retrieve_chunks([1, 2, 3], 4, 2, 8) == [1, 2, 3]
    assert retrieve_chunks(list(range(20)), 5, 1, 3)[-3:] == [17, 18, 19]


def test_rare_words_of_the_query_outweigh_frequent_ones() -> None:
    frequent, rare, other = [1, 1, 1, 1], [2, 5, 6, 7], [1, 8, 8, 8]
    prompt = [*frequent, *other, *rare, *frequent, 1, 2]
    assert retrieve_chunks(prompt, 4, 1, 2) == [*rare, 1, 2]


def test_the_target_is_shifted_towards_the_draft() -> None:
    rule = ShiftedTarget(10.0)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.7, 0.1])
    shifted = rule.shifted(p, q)
    assert shifted[1] > p[1] and shifted.sum() == pytest.approx(1.0)
    assert rule.exactness == "lossy"


@pytest.mark.slow
@pytest.mark.parametrize(
    "residual",
    [lambda p, moved, q: np.maximum(p - q, 0), lambda p, moved, q: p],
    ids=["of the rejection rule", "none"],
)
def test_other_residuals_of_the_shifted_target_are_noticed(
    monkeypatch: pytest.MonkeyPatch, residual: Any
) -> None:
    def steps(self: ShiftedTarget, p: Any, q: Any, kind: str, tokens: list[int]) -> Any:
        moved = self.shifted(p, q)
        rest = residual(p, moved, q)
        yield min(1.0, moved[tokens[0]] / q[tokens[0]]), rest / rest.sum()

    monkeypatch.setattr(ShiftedTarget, "steps", steps)
    assert not all(check.passed for check in oracle._shifted_target())


@pytest.mark.slow
def test_an_unshifted_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShiftedTarget, "shifted", lambda self, p, q: p)
    assert not all(check.passed for check in oracle._shifted_target())


@pytest.mark.parametrize(
    "decoder", ["rapid:eta=0", "rapid:eta=1000", "rapid:eta=5,acceptance=rejection"]
)
def test_mistakes_are_one_line(decoder: str) -> None:
    with scripted(wordy(), wordy()) as llm, pytest.raises(InvalidRequestError) as refusal:
        llm.generate("abc", decoder=decoder)
    assert "eta" in str(refusal.value) and "\n" not in str(refusal.value)
