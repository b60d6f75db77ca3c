"""Exits and draft lengths that follow the text pass their certificate; others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.benchmarks.depth import measure
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth import del_
from anydecode.decoders.depth.del_ import LayerRates, head_cost
from anydecode.errors import AnydecodeError, InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("del")


@pytest.mark.parametrize(
    "defaults", [{"size": 3}, {"memory": 1.0}, {"head": 2.0}, {"head": 0.0}], ids=str
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "del", **defaults)
    assert_rejected("del")


def test_drafts_without_a_threshold_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerRates, "threshold", lambda self, index: 0.0)
    assert_rejected("del")


def test_evidence_behind_a_rejection_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = del_._Session.observe

    def all_rows(self: Any, drafts: list[int], num_accepted: int, scores: Any) -> None:
        observe(self, drafts, len(drafts), scores)

    monkeypatch.setattr(del_._Session, "observe", all_rows)
    assert_rejected("del")


def test_prompts_as_evidence_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(del_, "PROMPT_ROWS", 4)
    assert_rejected("del")


def test_the_layer_with_the_most_tokens_per_layer_is_chosen() -> None:
    rates = LayerRates([1, 2, 3], 1.0)
    rates.record(np.array([[False, True, True]] * 3), np.ones((3, 3)))
    assert rates.best(4, 17, 0.0) == (1, 17)
    assert LayerRates([1, 2, 3], 1.0).best(4, 17, 0.0) == (0, 0)


def test_the_cost_of_a_head_is_in_layers() -> None:
    model = tiny_model(layers=3)
    layer = sum(w.out_features * w.in_features for w in model.network.weights.layers[0].matrices)
    assert head_cost(model) == pytest.approx(259 * 64 / layer)
    assert head_cost(ScriptedModel()) == 0.0


def test_fewer_exits_and_rounds_of_evidence_compute_fewer_rows_of_the_head() -> None:
    """And the text stays that of plain decoding."""
    methods = ["del:head=0.0", "del:head=0.0,interval=2", "del:head=0.0,interval=2,every=4"]
    model = tiny_model(layers=8, residual=0.05)
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        _, every, half, eighth = measure(llm, methods, ["the cat sat", "ab"], 30, 1)
    assert every.free == half.free == eighth.free == 1.0
    assert min(one.drafted or 0 for one in (every, half, eighth)) > 0.5
    assert half.heads < 0.7 * every.heads and eighth.heads < 0.8 * half.heads


def test_bad_parameters_and_models_are_refused_in_one_line() -> None:
    with LLM(ScriptedModel(num_layers=1), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match="at least two layers"):
            llm.generate("a", decoder="del")
        with pytest.raises(InvalidRequestError, match="0 < memory <= 1"):
            llm.generate("a", decoder="del:memory=2")
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="interval is 0|interval >= 1"):
            llm.generate("a", decoder="del:interval=0")
        with pytest.raises(InvalidRequestError, match="interval=4 leaves no exit"):
            llm.generate("a", decoder="del:interval=4")
