"""Routers learn which states the later layers change little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_routers import ExitRouters, model_fingerprint
from anydecode.training.exit_routers import RouterRecipe, are_similar, fit_router, train_routers


def test_a_router_separates_states_by_their_label() -> None:
    random = np.random.default_rng(0)
    states = random.standard_normal((400, 8), np.float32)
    positive = states[:, 0] > 0
    recipe = RouterRecipe(width=16, epochs=300, rate=1e-2)
    down, up = fit_router(states[:300], positive[:300], recipe)
    scores = ExitRouters({3: down}, {3: up}, "")(3, states[300:])
    assert ((scores > 0.5) == positive[300:]).mean() > 0.85


def test_states_are_similar_by_their_direction() -> None:
    states = np.array([[3.0, 0.1], [1.0, 0.5], [0.1, 2.0]], np.float32)
    last = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], np.float32)
    assert are_similar(states, last, 0.98).tolist() == [True, False, False]


@pytest.mark.slow
def test_routers_of_a_model_run_in_it(tmp_path: Path) -> None:
    recipe = RouterRecipe(interval=1, width=4, tokens=8, epochs=2, label="token")
    with LLM("tiny-autoregressive") as llm:
        routers, qualities = train_routers(llm, recipe, ["copy Ada", "a b c", "one two"])
        depth, network = llm.model.spec.num_layers, _network(llm)
        assert routers.exits == [one.exit for one in qualities] == list(range(1, depth))
        assert routers.fingerprint == model_fingerprint(network)
        routers.save(tmp_path / "routers.safetensors")
        decoder = f"tide:min_layers=0,threshold=0.2,routers={tmp_path / 'routers.safetensors'}"
        assert len(llm.generate("a", decoder=decoder, max_tokens=8, ignore_eos=True).tokens) == 8


def _network(llm: LLM) -> Any:
    return llm.model.network  # type: ignore[attr-defined]


def test_bad_recipes_are_refused_in_one_line() -> None:
    with pytest.raises(InvalidRequestError, match="choose from cosine, token"):
        RouterRecipe(label="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must be 1 or more"):
        RouterRecipe(width=0)
