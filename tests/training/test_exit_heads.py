"""Training of heads for early exits: the loss by its definition, runs that go on, and heads that
predict better than the exits themselves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_heads import ExitHeads
from anydecode.models.loading import load_checkpoint
from anydecode.training.exit_heads import (
    HeadMaps,
    HeadRecipe,
    HeadRun,
    divergence,
    exit_log_probabilities,
)
from anydecode.training.transformer import Shape, Transformer
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

TOKENS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]])
IS_ANSWER = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]).bool()


def test_the_loss_is_the_mean_divergence_of_the_exits_from_the_last_layer() -> None:
    torch.manual_seed(0)
    model = Transformer(Shape(50, width=32, layers=4, heads=2, hidden=48)).requires_grad_(False)
    maps = HeadMaps((1, 3), 32)
    for parameter in maps.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found, last = exit_log_probabilities(model, maps, TOKENS, IS_ANSWER)
    rows = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    states: dict[int, torch.Tensor] = {}
    rope = model.cos[:5], model.sin[:5]
    x = model.transformer["wte"](TOKENS)
    for layer, block in enumerate(model.blocks, 1):
        states[layer] = x = block(x, rope, True, None)
    total = 0.0
    for text, row in rows:
        p = model(TOKENS, causal=True)[text, row].softmax(-1)
        for exit in (1, 3):
            state, weights = states[exit][text, row], maps[str(exit)]
            mapped = state + weights.weight @ state + weights.bias
            q = model.transformer["ff_out"](model.transformer["ln_f"](mapped)).softmax(-1)
            total += float((p * (p / q).log()).sum().detach())
    assert float(divergence(found, last).detach()) == pytest.approx(total / 10, rel=1e-4)


def test_heads_start_as_the_exits_of_the_model_and_leave_it_as_it_is(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    made = HeadRun(checkpoint, tmp_path, HeadRecipe(steps=2, answers=4, tokens=4), _exits)
    before = {name: one.clone() for name, one in made.model.state_dict().items()}
    heads, states = made.heads(), np.ones((1, made.model.shape.width), np.float32)
    assert np.array_equal(heads(2, states), states)
    made.train()
    assert all(torch.equal(one, before[name]) for name, one in made.model.state_dict().items())
    assert not np.array_equal(ExitHeads.load(made.file)(2, states), states)


def _exits(num_layers: int) -> list[int]:
    return [1, 2]


def test_a_run_in_two_parts_gives_the_heads_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = HeadRecipe(steps=3, answers=6, tokens=6, batch=2)

    def opened(folder: str) -> HeadRun:
        return HeadRun(checkpoint, tmp_path / folder, recipe, _exits)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="a run of other exits or another model"):
        HeadRun(checkpoint, tmp_path / "parts", recipe, lambda num_layers: [1])


def test_bad_recipes_and_exits_are_refused(tmp_path: Path) -> None:
    for options in ({}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"steps": 1, "answers": 1}):
        with pytest.raises(InvalidRequestError):
            HeadRecipe(**options)
    checkpoint, recipe = load_checkpoint("tiny-autoregressive"), HeadRecipe(steps=1)
    for exits in ([], [0], [99]):
        with pytest.raises(InvalidRequestError, match=r"allowed are 1 to"):
            HeadRun(checkpoint, tmp_path, recipe, lambda num_layers, exits=exits: exits)


def test_the_command_writes_heads_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys,
        "depth --recipe specbound --answers 4 --steps 10 --decoder specbound:first=2,depth=2",
        out=out,
        plot=plot,
    )
    assert log["steps"] == 10 and log["exits"] == [2]
    assert plot.read_text().lstrip().startswith("<?xml")
    assert json.loads((out / "log.json").read_text())["history"] == log["history"]
    decoder = f"specbound:first=2,depth=2,threshold=0.1,heads={log['path']}"
    with LLM("tiny-autoregressive") as llm:
        assert_names_of_plain_decoding(llm, decoder)


@pytest.mark.slow
def test_training_brings_exits_nearer_to_the_last_layer(tmp_path: Path) -> None:
    recipe = HeadRecipe(steps=100, answers=256, batch=8)
    made = HeadRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe, _exits)
    made.train()
    first, *_, last = (one["held_out_loss"] for one in made.history if "held_out_loss" in one)
    assert last < 0.9 * first, (first, last)
