"""Training of blocks: the passes are those of the engine, and runs go on where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode.certification.oracles.families.blockffn import Forward
from anydecode.cli.main import run
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training import blockffn
from anydecode.training.blockffn import BlockRecipe, BlockRun, BlockShape, forward
from anydecode.training.tokenizer import build_tokenizer
from interrupted_runs import trained
from tiny_models import built, chain, logits

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7]


def small(**sizes: int) -> BlockShape:
    given = {"width": 32, "layers": 2, "blocks": 8, "block_size": 8, "nope": 4, "rope": 4}
    given |= {"query_rank": 16, "rank": 12, "heads": 2, **sizes}
    return BlockShape(build_tokenizer(20).get_vocab_size(), **given)


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockffn, "build_tokenizer", lambda: build_tokenizer(20))


def test_the_model_that_is_written_has_the_logits_of_the_training(tmp_path: Path) -> None:
    run = BlockRun(tmp_path, BlockRecipe(steps=1, batch=4), small())
    run.train()
    checkpoint = load_checkpoint(run.model_folder)
    weights = {
        name: torch.from_numpy(np.asarray(tensor, np.float32))
        for name, tensor in checkpoint.tensors.items()
    }
    expected = forward(weights, run.shape, torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(Forward(checkpoint).logits(TOKENS) - expected).max() < 1e-3
    found = logits(built(checkpoint), chain(TOKENS))
    assert np.abs(found - expected).max() < 1e-3


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    recipe = BlockRecipe(steps=3, batch=4)
    whole = trained(BlockRun(tmp_path / "whole", recipe, small()))
    with pytest.raises(KeyboardInterrupt):
        trained(BlockRun(tmp_path / "parts", recipe, small()), 2)
    resumed = trained(BlockRun(tmp_path / "parts", recipe, small()))
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name])
    with pytest.raises(InvalidRequestError, match="another shape or other losses") as caught:
        BlockRun(tmp_path / "parts", BlockRecipe(steps=3, chunk=4), small())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": None}, "either minutes or steps"),
        ({"chunk": 0}, "more than 0"),
        ({"chunk_weight": -1.0}, "0 or more"),
    ],
)
def test_wrong_recipes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        BlockRecipe(**{"steps": 1, **wrong})  # type: ignore[arg-type]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(blockffn, "BlockShape", lambda vocab: small())
    command = ["train", "blocks", "--out", str(tmp_path), "--steps", "1", "--batch", "2", "--json"]
    with pytest.raises(SystemExit, match="0"):
        run([*command, "--chunk", "4"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["path"] == str(tmp_path / "model") and printed["steps"] == 1
    assert load_checkpoint(tmp_path / "model").config["ffn_type"] == "block"
