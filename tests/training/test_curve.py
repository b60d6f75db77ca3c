"""Training curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydecode.training.curve import draw_agreement, draw_held_out, draw_training


def test_a_training_run_has_a_line_per_stage(tmp_path: Path, figures: list[Any]) -> None:
    history = [
        {"seconds": 60.0, "stage": "autoregressive", "loss": 2.0},
        {"seconds": 120.0, "stage": "autoregressive", "accuracy": {"all": 0.25}},
        {"seconds": 180.0, "stage": "diffusion", "loss": 0.0},
        {"seconds": 240.0, "stage": "diffusion", "accuracy": {"all": 0.5}},
    ]
    draw_training({"history": history}, tmp_path / "x.svg")
    (figure,) = figures
    lines = [[line.get_xydata().tolist() for line in panel.lines] for panel in figure.axes]
    assert lines == [[[[1.0, 2.0]], [[3.0, 1e-4]]], [[[2.0, 0.25]], [[4.0, 0.5]]]]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["autoregressive", "diffusion"]


def test_an_adapter_run_has_a_line_per_kind_of_text(tmp_path: Path, figures: list[Any]) -> None:
    history = [
        {"seconds": 0.0, "held_out": {"tasks": 3.0, "prose": 4.0}},
        {"seconds": 60.0, "loss": 2.0},
        {"seconds": 120.0, "held_out": {"tasks": 1.0, "prose": 2.0}},
    ]
    draw_held_out({"history": history}, tmp_path / "x.svg")
    (panel,) = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.lines}
    assert lines == {
        "training": [[1.0, 2.0]],
        "held-out tasks": [[0.0, 3.0], [2.0, 1.0]],
        "held-out prose": [[0.0, 4.0], [2.0, 2.0]],
    }


def test_a_run_of_exits_has_its_loss_and_a_line_per_exit(
    tmp_path: Path, figures: list[Any]
) -> None:
    history = [
        {"seconds": 0.0, "agreement": [0.1, 0.2]},
        {"seconds": 60.0, "loss": 2.0},
        {"seconds": 60.0, "agreement": [0.3, 0.6]},
    ]
    draw_agreement({"history": history, "exits": [6, 10]}, tmp_path / "x.svg")
    loss, agreement = figures[0].axes
    assert [line.get_xydata().tolist() for line in loss.lines] == [[[1.0, 2.0]]]
    lines = {line.get_label(): line.get_xydata().tolist() for line in agreement.lines}
    assert lines == {
        "6 layers": [[0.0, 0.1], [1.0, 0.3]],
        "10 layers": [[0.0, 0.2], [1.0, 0.6]],
    }


def test_a_run_of_all_layers_shows_some_of_them(tmp_path: Path, figures: list[Any]) -> None:
    """Of thirty layers, five, each a sixth of the depth from the next."""
    draw_agreement({"history": [{"seconds": 0.0, "agreement": [0.5] * 30}]}, tmp_path / "x.svg")
    labels = [line.get_label() for line in figures[0].axes[1].lines]
    assert labels == [f"{layers} layers" for layers in (5, 10, 15, 20, 25)]
