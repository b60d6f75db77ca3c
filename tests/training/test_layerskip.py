"""Training for early exits: dropout, weights and loss by their definitions, runs that go on, and
exits that predict better."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.layerskip import (
    LayerSkipRecipe,
    LayerSkipRun,
    agreement,
    dropout_rates,
    early_exit_loss,
    exit_weights,
)
from anydecode.training.nested import first_layers
from anydecode.training.transformer import Shape, Transformer
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

SHAPE = Shape(50, width=32, layers=4, heads=2, hidden=48)
TEXTS = (
    torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]),
    torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]).bool(),
)


def _model(layers: int = 4) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(Shape(**{**vars(SHAPE), "layers": layers}))
    return model.eval().requires_grad_(False)


def _expected_loss(model: Transformer) -> torch.Tensor:
    """The loss of the whole `model`, by its own forward pass."""
    logits = model(TEXTS[0], causal=True)
    rows = [logits[0, 2], logits[0, 3], logits[1, 0], logits[1, 1], logits[1, 2]]
    return functional.cross_entropy(torch.stack(rows), torch.tensor([8, 9, 6, 7, 8]))


def test_dropout_rises_from_the_first_layer_to_the_last() -> None:
    """p_max * (e^(l ln 2 / (L - 1)) - 1), equation 1 of the paper at a constant rate."""
    expected = [0.3 * (math.exp(layer * math.log(2) / 4) - 1) for layer in range(5)]
    assert dropout_rates(5, 0.3) == pytest.approx(expected)
    assert expected[0] == 0 and expected[-1] == pytest.approx(0.3)


def test_weights_are_those_of_the_exits_of_the_step() -> None:
    """Sums of layer numbers by the scale, and those of the last layer, divided by their sum."""
    raw = [0.5 * sum(range(layer + 1)) for layer in range(5)] + [5 + 0.5 * sum(range(5))]
    for step in range(6):
        exits = [layer for layer in range(5) if (layer - step) % 3 == 0] + [5]
        total = sum(raw[layer] for layer in exits)
        expected = {layer: raw[layer] / total for layer in exits if layer}
        assert exit_weights(6, 0.5, 3, step) == pytest.approx(expected)


def test_the_loss_is_that_of_models_of_the_first_layers() -> None:
    model = _model()
    all_layers = torch.ones(4, 2, dtype=torch.bool)
    expected = 0.25 * _expected_loss(first_layers(model, 2)) + 0.75 * _expected_loss(model)
    loss = early_exit_loss(model, *TEXTS, {1: 0.25, 3: 0.75}, all_layers)
    torch.testing.assert_close(loss, expected)


def test_a_dropped_layer_is_left_out_for_its_text_only() -> None:
    model, without = _model(), _model(3)
    kept = {f"transformer.blocks.{new}.": f"transformer.blocks.{old}." for new, old in
            enumerate((0, 2, 3))}  # fmt: skip
    state = model.state_dict()
    for name in without.state_dict():
        source = next((name.replace(new, old) for new, old in kept.items() if new in name), name)
        without.state_dict()[name].copy_(state[source])
    is_kept = torch.ones(4, 2, dtype=torch.bool)
    is_kept[1, 0] = False
    loss = early_exit_loss(model, *TEXTS, {3: 1.0}, is_kept)
    rows = [without(TEXTS[0][:1], causal=True)[0, 2:4], model(TEXTS[0][1:], causal=True)[0, :3]]
    expected = functional.cross_entropy(torch.cat(rows), torch.tensor([8, 9, 6, 7, 8]))
    torch.testing.assert_close(loss, expected)


def test_agreement_is_with_the_last_layer() -> None:
    model = _model()
    rows = TEXTS[1][:, 1:]
    last = model(TEXTS[0], causal=True)[:, :-1][rows].argmax(-1)
    expected = [
        float((first_layers(model, depth)(TEXTS[0], causal=True)[:, :-1][rows].argmax(-1) == last)
              .double().mean())
        for depth in range(1, 5)
    ]  # fmt: skip
    assert agreement(model, *TEXTS) == expected and expected[-1] == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"steps": 1, "dropout": 1.5},
     {"steps": 1, "answers": 1}, {"steps": 1, "exit_scale": -1.0}],
    ids=str,
)  # fmt: skip
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        LayerSkipRecipe(**options)


def test_a_run_in_two_parts_gives_the_model_of_one(tmp_path: Path) -> None:
    """Also the layers, dropout and texts of each step depend on the seed and the step alone."""
    checkpoint = load_checkpoint("tiny-autoregressive")

    def opened(folder: str) -> LayerSkipRun:
        recipe = LayerSkipRecipe(steps=3, answers=4, tokens=4, dropout=0.5, every=2)
        return LayerSkipRun(checkpoint, tmp_path / folder, recipe)

    assert_resumes(opened)


def test_the_command_writes_a_model_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys, "depth --recipe layerskip --answers 4 --steps 2", out=out, plot=plot
    )
    assert log["steps"] == 2 and plot.read_text().lstrip().startswith("<?xml")
    with LLM(log["path"]) as llm:
        assert_names_of_plain_decoding(llm, "layerskip")


@pytest.mark.slow
def test_training_raises_the_agreement_of_exits(tmp_path: Path) -> None:
    recipe = LayerSkipRecipe(steps=120, answers=256, batch=8, rate=5e-4, exit_scale=1.0, every=1)
    made = LayerSkipRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    made.train()
    first, *_, last = made.agreements()
    # A run without training gains nothing, and this one about 0.11.
    assert sum(last[1:3]) > sum(first[1:3]) + 0.02, (first, last)
