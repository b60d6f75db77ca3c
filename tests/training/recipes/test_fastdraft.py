"""Draft models from random weights: their certificate, and mistakes that it rejects."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import catalogue
from anydecode.errors import InvalidRequestError
from anydecode.training import draft_model
from anydecode.training.recipes.draft_recipe import DraftRecipe
from certificates import assert_certified, assert_rejected, replace_defaults

fresh_shape = draft_model.fresh_shape


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("fastdraft")


def wide_mlp(target: Any, layers: int, width: int) -> Any:
    return replace(fresh_shape(target, layers, width), hidden=4 * width)


@pytest.mark.slow
def test_certificate_rejects_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "fresh_shape", wide_mlp)
    assert_rejected("fastdraft")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults",
    [{"pretraining": 0.0}, {"pretraining": 1.0}, {"pretraining": 0.1}, {"width": 512}],
    ids=str,
)
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "fastdraft", **defaults)
    assert_rejected("fastdraft")


@pytest.mark.slow
def test_certificate_rejects_greedy_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = draft_model.answers_to_learn_from
    monkeypatch.setattr(draft_model, "answers_to_learn_from", lambda *given, **_: own(*given))
    assert_rejected("fastdraft")


def answers_throughout(self: Any) -> Any:
    """Without the pre-training."""
    return self._sample(Random(self.step)), "cross-entropy"


def texts_throughout(self: Any) -> Any:
    """Without the target's answers."""
    return self.texts, "cross-entropy"


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [answers_throughout, texts_throughout])
def test_certificate_rejects_other_texts(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model.DraftModelRun, "step_rows", mistake)
    assert_rejected("fastdraft")


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_certificate_rejects_a_half_without_training(
    half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = draft_model.DraftModelRun._learn

    def learn(self: Any, loss: Any) -> float:
        rate = 0.0 if (self.progress >= 0.5) == bool(half) else None
        return own(self, loss, rate)

    monkeypatch.setattr(draft_model.DraftModelRun, "_learn", learn)
    assert_rejected("fastdraft")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("fastdraft:width=0", "width is 0; allowed are 1 to 65536"),
        ("fastdraft:layers=-1", "layers is -1"),
        ("fastdraft:pretraining=2", "from 0 to 1"),
        ("fastdraft:divergence=tv", "divergence"),
        ("scylla", "'scylla' is not a recipe; it is selected by anydecode train scaling"),
        ("autoregressive", "'autoregressive' is not a recipe"),
    ],
)
def test_bad_recipes_are_refused(choice: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        catalogue.build_as(choice, "a recipe", DraftRecipe)
    assert "\n" not in str(error.value)


def test_the_default_shape_is_that_of_the_card() -> None:
    recipe = catalogue.build_as("fastdraft", "a recipe", DraftRecipe)
    target = draft_model.Shape(49152, width=576, layers=30, heads=9, kv_heads=3, hidden=1536)
    shape = fresh_shape(target, recipe.layers, recipe.width)
    assert (shape.layers, shape.width, shape.hidden, shape.heads) == (4, 256, 688, 4)
    assert shape.is_tied and shape.vocab == 49152 and shape.head_width == 64
