"""Training on a schedule of layers: the passes are those of the decoder, runs that go on, and a
model whose short passes predict better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.depth.skipdecode import SkipDecode
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.block_adapter import open_llama
from anydecode.training.own_answers import padded
from anydecode.training.schedule import (
    ScheduleRecipe,
    ScheduleRun,
    scheduled_layers,
    scheduled_logits,
)
from interrupted_runs import assert_resumes
from train_commands import train_command


def test_passes_are_those_of_the_decoder(model: Path) -> None:
    """On a text that the decoder generates, the most probable tokens are the text's, and without
    the schedule some are not."""
    decoder, checkpoint = SkipDecode(max_layers=4, min_layers=2), load_checkpoint(str(model))
    prompts = [[3, 4, 5], [7]]
    with LLM(checkpoint.path) as llm:
        answers = [
            llm.generate(one, decoder=decoder, max_tokens=24, temperature=0.0, ignore_eos=True)
            for one in prompts
        ]
    pairs = [(one, list(answer.tokens)) for one, answer in zip(prompts, answers, strict=True)]
    network = open_llama(checkpoint)
    tokens, is_answer = padded(pairs)
    runs, rows = scheduled_layers(decoder, 6, pairs, 24)[..., :-1], is_answer[:, 1:]
    found = scheduled_logits(network, tokens[:, :-1], runs, rows).argmax(-1)
    assert torch.equal(found, tokens[:, 1:][rows])
    whole = scheduled_logits(network, tokens[:, :-1], torch.ones_like(runs), rows).argmax(-1)
    assert not torch.equal(whole, tokens[:, 1:][rows])


def test_prompts_run_all_layers_and_answers_the_first_and_the_last_ones() -> None:
    pairs = [([1, 2], [3, 4, 5, 6]), ([1], [2])]
    runs = scheduled_layers(SkipDecode(max_layers=4, min_layers=2), 6, pairs, 4)
    assert runs[:, 0].sum(0).tolist() == [6, 6, 4, 4, 3, 3]
    assert runs[:, 0, 2].tolist() == [True, False, False, True, True, True]
    assert runs[:, 1, :2].sum(0).tolist() == [6, 4]


@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"steps": 1, "answers": 1},
     {"steps": 1, "rank": 0}],
    ids=str,
)  # fmt: skip
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        ScheduleRecipe(**options)


def test_a_run_in_two_parts_gives_the_model_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = ScheduleRecipe(steps=3, answers=6, tokens=6, batch=2)

    def opened(folder: str, **options: Any) -> ScheduleRun:
        decoder = SkipDecode(**options)
        return ScheduleRun(checkpoint, tmp_path / folder, recipe, decoder)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="another rank, schedule or model"):
        opened("parts", max_layers=3)
    with pytest.raises(InvalidRequestError, match="must rise in this order"):
        opened("other", max_layers=99)


def test_the_command_writes_a_model_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys, "depth --recipe skipdecode --answers 4 --steps 2 --tokens 8", out=out, plot=plot
    )
    assert log["steps"] == 2 and plot.read_text().lstrip().startswith("<?xml")
    assert json.loads((out / "log.json").read_text())["history"] == log["history"]
    with LLM(log["path"]) as llm:
        options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
        assert len(llm.generate("copy Ada:", decoder="skipdecode", **options).tokens) == 8


@pytest.mark.slow
def test_training_makes_short_passes_predict(tmp_path: Path) -> None:
    recipe = ScheduleRecipe(steps=100, answers=128, tokens=24, batch=8)
    made = ScheduleRun(
        load_checkpoint("tiny-autoregressive"), tmp_path, recipe, SkipDecode(min_layers=2)
    )
    made.train()
    first, *_, last = made.held_out_losses()
    assert last < 0.8 * first, (first, last)
