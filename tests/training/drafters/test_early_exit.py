"""The early exits of EESD and Kangaroo in training: their logits are those of the oracle, and the
engine reads the written files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.bandit import ExitForward  # noqa: E402
from anydecode.errors import CheckpointError, UnsupportedCombinationError  # noqa: E402
from anydecode.models.early_exit import load_early_exit  # noqa: E402
from anydecode.training.drafters.early_exit import EarlyExit, KangarooAdapter  # noqa: E402
from learners import TinyLearner  # noqa: E402

RECIPES = pytest.mark.parametrize("recipe", [EarlyExit, KangarooAdapter])


@RECIPES
def test_logits_equal_the_oracles(recipe: type[EarlyExit], tmp_path: Path) -> None:
    tiny = TinyLearner(recipe, 1)
    checkpoint = tiny.checkpoint(tmp_path, has_head=False)
    found = tiny.logits()
    assert len(found) == len(tiny.tokens)
    forward = ExitForward(checkpoint, tiny.target)
    for known, token in enumerate(tiny.tokens, 1):
        tiny.assert_equal(0, found[known, 0], forward.step(token))


@RECIPES
@pytest.mark.parametrize("has_head", [True, False])
def test_the_drafter_has_the_first_layers_of_its_target(
    has_head: bool, recipe: type[EarlyExit], tmp_path: Path
) -> None:
    tiny = TinyLearner(recipe, 1)
    network = load_early_exit(tiny.checkpoint(tmp_path, has_head), tiny.target)
    assert network.spec.num_layers == 2 and network.spec.head_size == len(tiny.vocabulary)
    assert (network.weights.layers[1].mlp is not None) == recipe.has_mlp
    assert network.weights.layers[0] is tiny.target.weights.layers[0]
    assert np.array_equal(network.weights.head_tokens, tiny.vocabulary)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCombinationError, match="depth=1"):
        TinyLearner(EarlyExit, 2)
    tiny = TinyLearner(EarlyExit, 1)
    checkpoint = tiny.checkpoint(tmp_path)
    checkpoint.config["exit_after"] = 6
    with pytest.raises(CheckpointError, match="exit_after"):
        load_early_exit(checkpoint, tiny.target)
