"""Training of accelerators: the stream by its definition, runs that go on, and a stream that agrees
more with the last layer than before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.accelerators import Accelerators
from anydecode.models.loading import load_checkpoint
from anydecode.training.accelerators import AcceleratorRecipe, AcceleratorRun, log_probabilities
from anydecode.training.transformer import rotate
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
IS_ANSWER = torch.tensor([[0, 0, 0, 1, 1]]).bool()


def _run(folder: Path, **recipe: int) -> AcceleratorRun:
    options = {"steps": 2, "answers": 4, "tokens": 4, "exit": 3, "rank": 4, **recipe}
    return AcceleratorRun(
        load_checkpoint("tiny-autoregressive"), folder, AcceleratorRecipe(**options)
    )


@torch.no_grad()
def test_the_stream_is_that_of_the_engine(tmp_path: Path) -> None:
    """With weights of its adapters drawn at random."""
    made = _run(tmp_path)
    torch.manual_seed(1)
    for parameter in made.adapters.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found, _, _ = log_probabilities(made.model, made.adapters, TOKENS, IS_ANSWER)
    model, given = made.model, TOKENS[:, :-1]
    rope = model.cos[: given.shape[1]], model.sin[: given.shape[1]]
    with LLM("tiny-autoregressive") as llm:
        spec = llm.model.spec
    for number, position in enumerate((2, 3)):
        x = model.transformer["wte"](given)
        stored = {}
        for layer, block in enumerate(model.blocks):
            if layer == 1:
                state = x[0, position].numpy()
            _, k, v = block.heads(x, rope)
            end = position + 1
            stored[layer] = (
                k[0, :, :end].transpose(0, 1).numpy(),
                v[0, :, :end].transpose(0, 1).numpy(),
            )
            x = block(x, rope, True, None)
        p = made.accelerators()(spec, state, position, stored.__getitem__)
        logits = model.transformer["ff_out"](model.transformer["ln_f"](torch.tensor(p)))
        assert torch.allclose(logits.log_softmax(-1), found[number], atol=1e-3)
    assert not torch.equal(rotate(k, rope), k)


def test_the_stream_starts_as_the_state_and_the_model_stays(tmp_path: Path) -> None:
    made = _run(tmp_path)
    before = {name: one.clone() for name, one in made.model.state_dict().items()}
    accelerators = made.accelerators()
    assert accelerators.layers == [1, 2]
    assert not any(np.any(one) for one in accelerators.output_up.values())
    made.train()
    assert all(torch.equal(one, before[name]) for name, one in made.model.state_dict().items())
    assert all(np.any(one) for one in Accelerators.load(made.file).output_up.values())


def test_a_run_in_two_parts_gives_the_accelerators_of_one(tmp_path: Path) -> None:
    assert_resumes(lambda folder: _run(tmp_path / folder, steps=3, answers=6, tokens=6))
    with pytest.raises(InvalidRequestError, match="a run of other layers, another rank"):
        _run(tmp_path / "parts", rank=2)


def test_bad_recipes_and_layers_are_refused(tmp_path: Path) -> None:
    for options in ({}, {"steps": 1, "rank": 0}, {"steps": 1, "first": 0}):
        with pytest.raises(InvalidRequestError):
            AcceleratorRecipe(**options)
    for layers in ({"exit": 1}, {"exit": 99}, {"first": 9, "exit": None}):
        with pytest.raises(InvalidRequestError, match="the exit must be behind that layer"):
            _run(tmp_path, **layers)


def test_the_command_writes_accelerators_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(capsys, "depth --recipe m2r2 --answers 4 --steps 10", out=out, plot=plot)
    assert log["steps"] == 10 and log["layers"] == [1]
    assert plot.read_text().lstrip().startswith("<?xml")
    assert json.loads((out / "log.json").read_text())["history"] == log["history"]
    with LLM("tiny-autoregressive") as llm:
        assert_names_of_plain_decoding(llm, f"m2r2:accelerators={log['path']}")


@pytest.mark.slow
def test_training_brings_the_stream_nearer_to_the_last_layer(tmp_path: Path) -> None:
    made = _run(tmp_path, steps=100, answers=256, tokens=64, batch=8, rank=16)
    made.train()
    first, *_, last = made.agreements()
    assert last[0] > first[0], (first, last)
