"""The area under the accuracy-parallelism curve, and its benchmark."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from anydecode.benchmarks.parallelbench import aup
from anydecode.benchmarks.parallelbench.aup import Point, area, crossing, curves, settings
from anydecode.benchmarks.parallelbench.bench import Row, diffusion_methods
from anydecode.cli import main


def test_one_point_is_a_rectangle() -> None:
    assert area([Point(2.0, 60.0)], best=90.0) == 120.0


def test_equal_accuracies_are_a_rectangle_up_to_the_fastest() -> None:
    assert area([Point(4.0, 80.0), Point(1.0, 80.0), Point(2.0, 80.0)], best=80.0) == 320.0


def test_less_accurate_points_count_less() -> None:
    """By hand: a rectangle of 1 x 80, and a trapezoid from 80 to 78 exp(-3 x 2 / 80)."""
    expected = 80 + 3 * (80 + 78 * math.exp(-3 * 2 / 80)) / 2
    found = area([Point(1.0, 80.0), Point(4.0, 78.0)], best=80.0)
    assert found == pytest.approx(expected)
    unweighted = 80 + 3 * (80 + 78) / 2  # the plausible mistake
    assert found < unweighted


def test_points_far_below_the_first_are_left_out() -> None:
    kept = [Point(1.0, 80.0), Point(2.0, 75.0)]
    assert area([*kept, Point(8.0, 74.9)], best=80.0) == area(kept, best=80.0)
    assert area([*kept, Point(8.0, 75.0)], best=80.0) > area(kept, best=80.0)


def test_nothing_right_is_no_area() -> None:
    assert area([Point(1.0, 0.0), Point(3.0, 0.0)], best=0.0) == 0.0


def _row(method: str, accuracy: float, passes: float, tokens: float = 8.0) -> Row:
    return Row(method, "copy", 3, 4, accuracy, accuracy, passes, tokens, 100.0, 0.01)


def test_settings_of_a_decoder_are_one_curve() -> None:
    rows = [
        _row("fast-dllm", 1.0, 8.0),
        _row("fast-dllm:threshold=0.8", 0.5, 4.0),
        _row("fast-dllm:threshold=0.8", 1.0, 4.0),
        _row("dimple", 0.75, 2.0),
    ]
    first, second = curves(rows, "m")
    assert first["decoder"] == "dimple" and first["aup"] == pytest.approx(4 * 75)
    assert second["points"] == {
        "fast-dllm": {"tokens_per_pass": 1.0, "accuracy": 100.0, "tokens_per_second": 800.0},
        "fast-dllm:threshold=0.8": {
            "tokens_per_pass": 2.0,
            "accuracy": 75.0,
            "tokens_per_second": 800.0,
        },
    }
    assert second["aup"] == pytest.approx(100.0)  # 75 % is more than 5 below 100 %
    assert (second["accuracy"], second["tokens_per_pass"]) == (100.0, 1.0)


def test_every_setting_is_of_a_decoder_and_can_be_built() -> None:
    from anydecode import catalogue

    assert set(aup.SETTINGS) <= set(diffusion_methods())
    for key in aup.SETTINGS:
        for setting in settings(key)[1:]:
            parameters = dict(part.split("=") for part in setting.split(":")[1].split(","))
            catalogue.build(key, **{name: _value(text) for name, text in parameters.items()})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_the_command_measures_decoders_on_both_shipped_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "aup.json"
    arguments = ["--methods", "dimple,sdar", "--tasks", "copy", "--count", "1"]
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "aup", *arguments, "--threads", "1", "--json", str(file)])
    assert not ended.value.code
    report = json.loads(file.read_text())
    found = {(line["decoder"], line["model"]) for line in report["decoders"]}
    assert found == {
        ("dimple", "tiny-diffusion"), ("dimple", "tiny-blocks"), ("sdar", "tiny-blocks"),
    }  # fmt: skip
    best = next(one for one in report["decoders"] if one["model"] == "tiny-diffusion")
    assert best["accuracy"] == 100 and best["aup"] > 100 and best["seconds"] > 0
    assert set(report["left_out"]) == {"sdar on tiny-diffusion"}
    printed = capsys.readouterr().out
    assert "dimple" in printed and "left out: sdar on tiny-diffusion" in printed


def test_where_a_curve_crosses_a_speed() -> None:
    """Between a setting that is faster and less accurate, and one that is slower."""
    points = [(100.0, 40.0), (400.0, 20.0), (200.0, 30.0)]
    assert crossing(points, 300.0) == pytest.approx(25.0)
    assert crossing(points, 200.0) == pytest.approx(30.0)
    assert crossing(points, 500.0) is None
    assert crossing(points, 50.0) == 40.0
    # A setting that another one beats in speed and accuracy counts for nothing.
    assert crossing([*points, (150.0, 10.0)], 120.0) == pytest.approx(38.0)


@pytest.mark.slow
def test_the_command_compares_with_a_causal_model_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "aup.json", tmp_path / "aup.svg"
    arguments = ["--methods", "sdar", "--models", "tiny-blocks", "--causal", "tiny-autoregressive"]
    arguments += ["--tasks", "copy", "--count", "1", "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "aup", *arguments, "--json", str(file), "--plot", str(plot)])
    assert not ended.value.code
    report = json.loads(file.read_text())
    [causal], [line] = report["causal"], report["decoders"]
    assert (causal["decoder"], causal["beside"]) == ("auto", "tiny-blocks")
    assert causal["model"] == "tiny-autoregressive" and causal["accuracy"] > 50
    speed = causal["points"]["auto"]["tokens_per_second"]
    found = [(one["tokens_per_second"], one["accuracy"]) for one in line["points"].values()]
    assert len(found) == 5 and line["faster_up_to"] == crossing(found, speed)
    printed = capsys.readouterr().out
    assert "faster up to" in printed and "auto (causal)" in printed
    assert "tokens per second" in plot.read_text()


@pytest.mark.slow
def test_models_of_random_tokens_run_their_decoders(tmp_path: Path) -> None:
    file = tmp_path / "aup.json"
    arguments = ["--methods", "duo,dimple", "--models", "tiny-diffusion", "--tasks", "copy"]
    with pytest.raises(SystemExit) as ended:
        main.run(
            ["bench", "aup", *arguments, "--count", "1", "--threads", "1", "--json", str(file)]
        )
    assert not ended.value.code
    report = json.loads(file.read_text())
    found = {(line["decoder"], line["model"]) for line in report["decoders"]}
    assert found == {("dimple", "tiny-diffusion"), ("duo", "tiny-uniform")}
    duo = next(line for line in report["decoders"] if line["decoder"] == "duo")
    assert len(duo["points"]) == 6 and not report["left_out"]


def test_unknown_decoders_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "aup", "--methods", "prompt-lookup"])
    assert ended.value.code == 2
    assert "'prompt-lookup' is no diffusion decoder" in capsys.readouterr().err
