"""Predictors learn from what they read while the model generates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.certification.tiny import predicting_model
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_predictors import ExitPredictors
from anydecode.training.exit_predictors import PredictorRecipe, PredictorRun, first_exits


def test_exits_that_are_always_checked_are_those_that_come_first_most_often() -> None:
    labels = {
        3: torch.tensor([False, False, True, False]),
        6: torch.tensor([True, True, False, False]),
        9: torch.tensor([True, True, True, False]),
    }
    assert first_exits(labels, 2) == {3, 6}
    assert first_exits(labels, 9) == {3, 6, 9}


def test_predictors_of_a_model_run_in_it(tmp_path: Path) -> None:
    """Rows have the labels of the last layer: the share of positive ones rises towards it."""
    recipe = PredictorRecipe(steps=3, width=8, tokens=12, always=4)
    prompts = ["copy Ada", "a b c", "one two", "the cat"]
    with predicting_model() as llm:
        run = PredictorRun(llm, tmp_path, recipe, prompts)
        run.train()
        assert list(run.rows.inputs) == list(range(1, 16))
        ((count, width),) = {tuple(one.shape) for one in run.rows.inputs.values()}
        assert count > 8 and width == 12
        shares = [float(one.double().mean()) for one in run.rows.labels.values()]
        assert shares[0] < shares[14] and shares[14] > 0.3
        features = run.rows.inputs[1]
        assert torch.allclose(features[:, 4:8].sum(-1), torch.ones(count))
        assert torch.equal(features[:, 4:8], features[:, 8:])  # the first check
        assert torch.allclose(
            run.rows.inputs[2][:, 8:], run.rows.inputs[2][:, 4:8] - features[:, 4:8], atol=1e-6
        )
        loaded = ExitPredictors.load(run.path)
        assert len(loaded.always) == 4 and loaded.exits == list(range(1, 16))
        found = llm.generate(
            "abc", decoder=f"specee:predictors={run.path}", max_tokens=8, ignore_eos=True
        )
        assert len(found.tokens) == 8


def test_bad_runs_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="always must be 1 or more"):
        PredictorRecipe(steps=1, always=0)
    with LLM("tiny-autoregressive", draft="none") as llm:
        with pytest.raises(InvalidRequestError, match="draft"):
            PredictorRun(llm, tmp_path, PredictorRecipe(steps=1, tokens=2), ["a", "b"])
