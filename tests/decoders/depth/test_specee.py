"""Exits by predictors over a draft's candidates pass their certificate; other exits, features and
contents of the cache do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import predicting_model, tiny_model
from anydecode.decoders.depth import specee
from anydecode.decoders.depth.specee import PredictedExit
from anydecode.errors import AnydecodeError
from anydecode.kernels.routes import RoutedPass
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("specee")


def test_another_threshold_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "specee", threshold=0.8)
    assert_rejected("specee")


@pytest.mark.parametrize(
    ("name", "value"),
    [("NEAR", ()), ("NEAR", (-1, 0, 1)), ("NUM_RECENT", 4), ("NUM_CANDIDATES", 3)],
    ids=str,
)
def test_other_schedules_and_candidates_are_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    if name == "NUM_CANDIDATES":
        features = PredictedExit.features

        def padded(self: PredictedExit, routed: RoutedPass, row: int) -> np.ndarray:
            return np.insert(features(self, routed, row), [3, 6, 9], 0.0)

        monkeypatch.setattr(PredictedExit, "features", padded)
    monkeypatch.setattr(specee, name, value)
    assert_rejected("specee")


def test_exits_that_the_head_does_not_confirm_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(self: RoutedPass, active: np.ndarray) -> np.ndarray:
        logits = np.zeros((len(active), 259), np.float32)
        logits[0, self.guides[active[0]].candidates[0]] = 1.0
        return logits

    monkeypatch.setattr(RoutedPass, "head", head)
    assert_rejected("specee")


def test_changes_since_the_first_check_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    features = PredictedExit.features

    def first(self: PredictedExit, routed: RoutedPass, row: int) -> np.ndarray:
        before = routed.guides[row].probabilities
        result = features(self, routed, row)
        if before is not None:
            routed.guides[row].probabilities = before
        return result

    monkeypatch.setattr(PredictedExit, "features", first)
    assert_rejected("specee")


@pytest.mark.parametrize("policy", ["propagate", "copy"])
def test_layers_that_store_something_behind_an_exit_are_rejected(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    def store(self: RoutedPass, active: np.ndarray, layer: int) -> None:
        getattr(self, policy)(active, layer, self.num_layers)
        for row in active.tolist():
            self.guides[row].num_layers = layer

    monkeypatch.setattr(RoutedPass, "stop", store)
    monkeypatch.setattr(PredictedExit, "leaves_holes", False)
    assert_rejected("specee")


def test_later_tokens_read_nothing_of_a_token_in_the_layers_that_it_has_not_run() -> None:
    """Whatever stands in a token's slots behind its exit: the bits of later tokens stay."""
    options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    stop, num_filled = RoutedPass.stop, 0

    def filled(self: RoutedPass, active: np.ndarray, layer: int) -> None:
        nonlocal num_filled
        stop(self, active, layer)
        for row in active.tolist():
            slot = int(self._rows.slots[row])
            for behind in range(layer, self.num_layers):
                self._cache.keys[behind][slot] = 1e3
                self._cache.values[behind][slot] = np.nan
                num_filled += 1

    texts = []
    for patched in (False, True):
        with pytest.MonkeyPatch.context() as patch, predicting_model() as llm:
            if patched:
                patch.setattr(RoutedPass, "stop", filled)
            found = llm.generate(["abcabc", "the cat sat", "q"], decoder="specee", **options)
            texts.append([[(t.token, t.logprob) for t in one.logprobs] for one in found])
    assert num_filled > 100
    assert texts[0] == texts[1]


def test_predictors_that_never_fire_give_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with predicting_model() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options)
        assert llm.generate("abc", decoder="specee:threshold=1", **options).tokens == plain.tokens
        assert llm.generate("abc", decoder="specee", **options).tokens != plain.tokens


def test_predictors_of_a_file_replace_those_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "predictors.safetensors"
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with predicting_model() as llm:
        own: Any = llm.model.exit_predictors  # type: ignore[attr-defined]
        own.save(file)
        assert ExitPredictors.load(file).always == own.always
        found = llm.generate("abc", decoder="specee", **options).tokens
        llm.model.exit_predictors = None  # type: ignore[attr-defined]
        again = llm.generate("abc", decoder=f"specee:predictors={file}", **options).tokens
        assert found == again


def test_bad_predictors_and_models_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "predictors.safetensors"
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer(), draft=ScriptedModel()) as llm:
        with pytest.raises(AnydecodeError, match="needs exit predictors"):
            llm.generate("a", decoder="specee")
    with predicting_model() as llm:
        llm.model.exit_predictors.save(file)  # type: ignore[attr-defined]
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer(), draft=ScriptedModel()) as llm:
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("a", decoder=f"specee:predictors={file}")
    model = tiny_model(layers=4)
    with LLM(model, tokenizer=ByteTokenizer(), draft=tiny_model()) as llm:
        with pytest.raises(AnydecodeError, match="another model"):
            llm.generate("a", decoder=f"specee:predictors={file}")
        (tmp_path / "broken").write_text("no tensors")
        with pytest.raises(AnydecodeError, match="exit predictors"):
            llm.generate("a", decoder=f"specee:predictors={tmp_path / 'broken'}")
