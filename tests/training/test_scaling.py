"""Studies of draft models: what is stored, how they go on, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode import catalogue
from anydecode.errors import AnydecodeError
from anydecode.models.loading import load_checkpoint
from anydecode.training.draft_model import DraftOptions
from anydecode.training.scaling import ScalingStudy
from train_commands import train_command

COMMAND = "scaling --answers 8 --tokens 8 --recipe scylla:layers=1-2,tokens=40-80,batches=1-2-3"


def study(folder: Path, **options: Any) -> ScalingStudy:
    recipe = catalogue.build("scylla", layers="1-2", tokens="40-80", batches="1-2-3")
    settings = DraftOptions(steps=1, answers=8, tokens=8, **options)
    return ScalingStudy(load_checkpoint("tiny-autoregressive"), folder, recipe, settings)


def stored(folder: Path, **changed: Any) -> None:
    """The file of a study that has been measured."""
    point = {"layers": 1, "parameters": 100, "tokens": 40, "accepted": 2.5}
    content = {"settings": study(folder).settings, "points": [point], "speeds": [], **changed}
    (folder / "results.json").write_text(json.dumps(content))


def test_a_study_goes_on_from_its_file(tmp_path: Path) -> None:
    stored(tmp_path)
    assert study(tmp_path).points[0]["accepted"] == 2.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"settings": {}}, "holds another study"),
        ({"points": None}, "has no measurements"),
        ({"points": {"layers": 1}}, "has no measurements"),
        ({"points": [{"layers": 1}]}, "has no measurements"),
        ({"speeds": [1]}, "has no measurements with layers, batch, tokens_per_second"),
        ({"speeds": [{"layers": 1, "batch": 1, "tokens_per_second": "x"}]}, "no measurements"),
        ({"speeds": [{"layers": 1, "batch": True, "tokens_per_second": 1}]}, "no measurements"),
    ],
    ids=str,
)
def test_malformed_studies_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stored(tmp_path, **changed)
    with pytest.raises(AnydecodeError, match=message) as error:
        study(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"answers": 1}', '{"answers": [["x", 1]]}'])
def test_malformed_answers_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text(content)
    with pytest.raises(AnydecodeError) as error:
        study(tmp_path).run()
    assert "\n" not in str(error.value)


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    with pytest.raises(AnydecodeError, match="holds another study"):
        study(tmp_path, rate=1.0)


def test_a_draft_model_of_too_many_layers_is_refused_before_any_is_trained(tmp_path: Path) -> None:
    recipe = catalogue.build("scylla", layers="1-5", tokens="40-80")
    settings = DraftOptions(steps=1, answers=8, tokens=8)
    one = ScalingStudy(load_checkpoint("tiny-autoregressive"), tmp_path, recipe, settings)
    with pytest.raises(AnydecodeError, match="layers is 5; the model has 4 layers"):
        one.run()
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_fits_and_recommends_and_is_not_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "study", tmp_path / "laws.svg"
    results = [train_command(capsys, COMMAND, out=out, plot=plot) for _ in range(2)]
    assert results[0] == results[1]  # also the times
    assert plot.read_text().lstrip().startswith("<?xml")
    assert len(results[0]["points"]) == 4 and len(results[0]["speeds"]) == 9
    assert {*results[0]["laws"]["accepted"]["slopes"]} == {"tokens", "parameters"}
    assert [one["batch"] for one in results[0]["recommended"]] == [1, 2, 3]
    assert results[0]["planned"] == 80
