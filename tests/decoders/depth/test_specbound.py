"""Drafts that leave at the first exit that is sure pass their certificate; other rules do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.depth import specbound
from anydecode.decoders.depth.specbound import SpecBound
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("specbound")


@pytest.mark.parametrize(
    "defaults",
    [
        {"size": 7},
        {"threshold": 0.6},
        {"slope": 0.0},
        {"first": 2},
        {"interval": 2},
        {"depth": 3},
    ],
    ids=str,
)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specbound", **defaults)
    assert_rejected("specbound")


def test_a_temperature_that_rises_with_depth_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def rising(self: Any, row: np.ndarray, layers: int) -> float:
        temperature = 1 + self.method.slope * layers / self.sequence.num_layers
        return float(1 / np.exp((row - row.max()) / temperature).sum())

    monkeypatch.setattr(specbound._Session, "_confidence", rising)
    assert_rejected("specbound")


def test_a_token_that_left_at_no_exit_and_runs_again_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def again(self: Any, drafts: list[int]) -> Any:
        if self.is_last_read:
            self.sequence.truncate(self.sequence.kv_cache().length - 1)
            last = drafts[-1] if drafts else self.sequence.all_tokens[-1]
            has_pending = bool(self.sequence.kv_cache().partials)
            return self.sequence.complete([last]) if has_pending else self.sequence.score([last])
        return self.sequence.complete(drafts[-1:])

    monkeypatch.setattr(specbound._Session, "verification", again)
    assert_rejected("specbound")


def test_texts_of_weights_are_those_of_plain_decoding() -> None:
    """With weights, a key that is missing in a layer would change the text."""
    model = tiny_model(layers=8, residual=0.1)
    options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 3}
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        for temperature in (0.0, 0.9):
            options["temperature"] = temperature
            plain = llm.generate("the cat sat", decoder="autoregressive", **options)
            decoder = "specbound:threshold=0.2,slope=0.2,depth=7"
            found = llm.generate("the cat sat", decoder=decoder, trace=True, **options)
            assert found.tokens == plain.tokens
            assert sum(len(entry["accepted"]) for entry in found.trace or ()) > 20


def test_bad_parameters_and_models_are_refused_in_one_line() -> None:
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match=r"exits \[\] of 4 layers"):
            llm.generate("a", decoder="specbound:first=3,depth=2")
        with pytest.raises(InvalidRequestError, match=r"exits .* of 4 layers"):
            llm.generate("a", decoder="specbound:depth=9")
        with pytest.raises(InvalidRequestError, match="0 <= threshold <= 1"):
            llm.generate("a", decoder="specbound:threshold=2")


def test_exits_of_a_model_of_thirty_layers() -> None:
    assert SpecBound().exits(30) == [6, 10, 14, 18]
