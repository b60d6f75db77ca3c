"""Diverse beam search: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anydecode import Regex, catalogue
from anydecode.certification.checks import measures_of
from anydecode.certification.oracles.search.diverse_beam import distinct
from anydecode.decoders.search import diverse_beam
from anydecode.decoders.search.beam_group import BeamGroup
from anydecode.decoders.search.diverse_beam import DiverseBeam
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import toy_llm


def test_certificate() -> None:
    assert_certified("diverse-beam")


@pytest.mark.parametrize("other", [{"strength": 0.0}, {"strength": 0.4}, {"groups": 2}])
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, float]
) -> None:
    replace_defaults(monkeypatch, "diverse-beam", **other)
    assert_rejected("diverse-beam")


def test_certificate_rejects_a_cost_for_any_number_of_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Once(diverse_beam.Counter):  # type: ignore[type-arg]
        def update(self, tokens: Any = ()) -> None:
            super().update(set(tokens or ()) - set(self))

    monkeypatch.setattr(diverse_beam, "Counter", Once)
    assert_rejected("diverse-beam")


def test_certificate_rejects_costs_that_only_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running sum of a hypothesis contains the costs."""
    expand = BeamGroup._expand

    def forgetful(self: BeamGroup, rows: Any, costs: Any) -> Any:
        found = expand(self, rows, costs)
        return [
            replace(one, total=one.total + costs.get(one.token, 0.0), costs=0.0) for one in found
        ]

    monkeypatch.setattr(BeamGroup, "_expand", forgetful)
    assert_rejected("diverse-beam")


def test_certificate_rejects_scores_with_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiverseBeam, "_without_costs", lambda self, text: text)
    assert_rejected("diverse-beam")


def test_beam_search_fails_its_measure() -> None:
    (measure,) = measures_of("diverse-beam")
    assert distinct(8, "beam") - distinct(8, "diverse-beam:strength=0,groups=1") > measure.margin


@pytest.mark.parametrize(
    "options", [{"width": 0}, {"groups": 3}, {"groups": 0}, {"strength": -1.0}, {"penalty": 99.0}]
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="diverse-beam needs|allowed are"):
        catalogue.build("diverse-beam", **options)


def test_a_constraint_bounds_every_group() -> None:
    words = Regex("cat|dog|cow|hen")
    with toy_llm() as llm:
        answer = llm.generate(
            "a", n=3, decoder="diverse-beam:strength=100", constraint=words, logprobs=0
        )
    texts = {one.text for one in answer.samples}
    assert len(texts) == len(answer.samples) > 1 and texts <= {"cat", "dog", "cow", "hen"}
