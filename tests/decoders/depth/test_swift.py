"""Drafts without sublayers that are searched for pass their certificate; other sets, trees and
searches do not. The set found is no worse than that of an exhaustive search."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.oracles.depth.skipped_parts import PartialForward
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth import layer_search, swift
from anydecode.decoders.depth.layer_search import LayerSearch, upper_bounds
from anydecode.errors import AnydecodeError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import (
    WRONG_RULES,
    assert_certified,
    assert_rejected,
    replace_defaults,
    replace_rejection_rule,
)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("swift")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults",
    [{"threshold": 0.5}, {"window": 31}, {"ratio": 0.55}, {"tree": False}, {"size": 2}],
    ids=str,
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "swift", **defaults)
    assert_rejected("swift")


@pytest.mark.slow
def test_other_widths_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift, "GREEDY_WIDTHS", swift.SAMPLING_WIDTHS)
    assert_rejected("swift")


@pytest.mark.slow
def test_a_search_that_keeps_the_last_set_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    record = LayerSearch.record
    monkeypatch.setattr(
        LayerSearch, "record", lambda self, skipped, score, best: record(self, skipped, score, 0.0)
    )
    assert_rejected("swift")


@pytest.mark.slow
def test_a_search_without_a_model_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_search, "MODEL_INTERVAL", 10**9)
    assert_rejected("swift")


@pytest.mark.slow
def test_drafts_that_skip_the_attention_of_another_layer_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = LayerSearch.parts

    def shifted(self: LayerSearch, skipped: frozenset[int]) -> Any:
        return parts(self, frozenset((one + 1) % self.size for one in skipped))

    monkeypatch.setattr(LayerSearch, "parts", shifted)
    assert_rejected("swift")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", WRONG_RULES)
def test_another_rejection_rule_is_rejected(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    replace_rejection_rule(monkeypatch, rule)
    assert_rejected("swift")


@pytest.mark.slow
def test_the_set_found_is_no_worse_than_that_of_an_exhaustive_search() -> None:
    """Three of the eight inner sublayers of six layers: 56 sets."""
    model = tiny_model(layers=6, residual=0.3)
    prompt, decoder = "the cat sat", swift.swift()
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        text = llm.generate(prompt, decoder=decoder, max_tokens=240, ignore_eos=True).tokens
    drafter: Any = decoder.drafter
    search = drafter.search(6)
    shares = {}
    for skipped in combinations(range(8), 3):
        forward = PartialForward(model.network)
        for token in prompt.encode():
            forward.step(token)
        parts = search.parts(frozenset(skipped))
        logits = [forward.step_without(one, parts.mixers, parts.mlps) for one in text[:32]]
        shares[frozenset(skipped)] = np.mean(np.argmax(logits, -1) == text[1:33])
    assert max(shares.values()) < 0.95, "or the search may end at a worse set"
    assert shares[search.best] == max(shares.values())


def test_the_bound_of_a_point_that_is_known_is_close_to_its_score() -> None:
    points = np.eye(8)
    scores = np.linspace(0, 1, 8)
    assert np.allclose(upper_bounds(points, scores, points), scores, atol=0.2)


def test_a_search_stops_at_a_high_score_and_without_gains() -> None:
    search = LayerSearch(6, 0.45)
    search.record(frozenset({1, 2, 3}), 0.96, 0.0)
    assert search.is_over and search.best == {1, 2, 3}
    search = LayerSearch(6, 0.45)
    for _ in range(layer_search.MAX_WITHOUT_GAIN + 1):
        assert not search.is_over
        search.record(frozenset({1, 2, 3}), 0.5, 0.5)
    assert search.is_over and not search.is_searched


def test_a_gain_starts_the_count_of_proposals_without_one_again() -> None:
    search = LayerSearch(6, 0.45)
    for _ in range(layer_search.MAX_WITHOUT_GAIN):
        search.record(frozenset({1, 2, 3}), 0.5, 0.5)
    search.record(frozenset({2, 3, 4}), 0.6, 0.5)
    for _ in range(layer_search.MAX_WITHOUT_GAIN):
        search.record(frozenset({1, 2, 3}), 0.5, 0.6)
        assert not search.is_over


def test_no_set_is_proposed_twice_on_a_text() -> None:
    search = LayerSearch(4, 0.5)
    tried: set[frozenset[int]] = set()
    while (found := search.propose(tried)) is not None:
        assert found not in tried and len(found) == 2
        tried.add(found)
        search.record(found, 0.1, 0.2)
    assert len(tried) == 6


def test_bad_parameters_and_models_are_refused_in_one_line() -> None:
    with LLM(ScriptedModel(num_layers=2), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="leaves out no sublayer"):
            llm.generate("a", decoder="swift")
        with pytest.raises(AnydecodeError, match="swift needs size"):
            llm.generate("a", decoder="swift:ratio=0.0")
        with pytest.raises(AnydecodeError, match="guidance"):
            llm.generate("a", decoder="swift", guidance_scale=2.0)
