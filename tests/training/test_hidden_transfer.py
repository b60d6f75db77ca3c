"""Training of maps of hidden states: what the rows of pseudo states see, the regression they begin
from, runs that go on, and files with which hidden-transfer drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.loading import load_checkpoint
from anydecode.training.hidden_transfer import Maps, TransferRecipe, TransferRun
from anydecode.training.transformer import Shape, Transformer
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

SHAPE = Shape(50, width=32, layers=4, heads=2, hidden=48)
TEXT = [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "options",
    [{"layers": (2, 1)}, {"layers": (-1, 1)}, {"layers": (1,)}, {"masks": 17}, {"masks": 0}],
    ids=str,
)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        TransferRecipe(steps=1, **options)


def test_layers_outside_the_model_are_refused() -> None:
    assert TransferRecipe(steps=1).layers_of(30) == [20, 20]
    assert TransferRecipe(steps=1, masks=3, layers=(3, 4, 5)).layers_of(6) == [3, 4, 5]
    with pytest.raises(InvalidRequestError, match="allowed are 0 to 5"):
        TransferRecipe(steps=1, layers=(3, 6)).layers_of(6)


def _random_maps(layers: list[int]) -> tuple[Transformer, Maps]:
    torch.manual_seed(0)
    model = Transformer(SHAPE).eval()
    for weight in model.parameters():
        weight.data *= 4
    maps = Maps(model, layers)
    for map in maps.maps:
        map.data += 0.2 * torch.randn_like(map)
    return model, maps


@torch.no_grad()
def _separate(model: Transformer, maps: Maps, end: int) -> list[torch.Tensor]:
    """The states of one group, from the keys and values of the text, layer by layer."""
    rows = model.transformer["wte"](torch.tensor([TEXT[:end]]))
    states, number = [rows], 0
    for index, block in enumerate(model.blocks):
        while number < len(maps.layers) and maps.layers[number] == index:
            before = states[-1]
            states[-1] = torch.cat([before, before[:, end - 1 : end] @ maps.maps[number].T], 1)
            number += 1
        count = states[-1].shape[1]
        rope = model.cos[:count], model.sin[:count]
        states.append(block(states[-1], rope, True, None))
    found: torch.Tensor = model.transformer["ln_f"](states[-1])
    return list(found[0, end:])


@pytest.mark.parametrize("layers", [[1, 1], [0, 3], [2]], ids=str)
def test_pseudo_states_see_the_text_before_them_and_their_group(layers: list[int]) -> None:
    model, maps = _random_maps(layers)
    ends = torch.tensor([2, 3, 6])
    with torch.no_grad():
        clean, pseudo = maps.states(model, torch.tensor(TEXT), ends)
        torch.testing.assert_close(clean, model.states(torch.tensor([TEXT]), causal=True)[0])
    for group, end in zip(pseudo, ends.tolist(), strict=True):
        expected = torch.stack(_separate(model, maps, end))
        torch.testing.assert_close(group, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_loss_is_the_mean_divergence_from_the_rows_of_the_text(tmp_path: Path) -> None:
    recipe = TransferRecipe(steps=1, answers=4, tokens=6, layers=(1, 2))
    made = TransferRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    torch.manual_seed(0)
    for map in made.maps.maps:
        map += 0.1 * torch.randn_like(map)
    clean = made.model(torch.tensor([TEXT]), causal=True)[0].log_softmax(-1)
    expected = torch.zeros(())
    for end in (2, 3):
        pseudo = torch.stack(_separate(made.model, made.maps, end))
        predicted = made.model.head(pseudo).log_softmax(-1)
        for distance in range(2):
            p, q = clean[end + distance], predicted[distance]
            expected = expected + (p.exp() * (p - q)).sum() / 2 / 2
    loss = made.loss((TEXT[:2], TEXT[2:]), torch.tensor([2, 3]))
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_maps_begin_as_the_regression_of_later_states() -> None:
    """No small change of a map brings the predicted states nearer to those of the texts."""
    model, maps = _random_maps([2, 2])
    texts = [torch.randint(4, 50, (40,)).tolist() for _ in range(8)]
    maps.fit(model, texts)
    states = []
    for text in texts:
        x = model.transformer["wte"](torch.tensor([text]))
        for block in model.blocks[:2]:
            x = block(x, (model.cos[:40], model.sin[:40]), True, None)
        states.append(x[0])

    def error(number: int, map: torch.Tensor) -> float:
        pairs = [(x[: -number - 1], x[number + 1 :]) for x in states]
        total = sum(((before @ map.T - after) ** 2).sum() for before, after in pairs)
        square = sum((before**2).sum() for before, _ in pairs) / 32
        return float(total + 0.01 * square * (map**2).sum())

    for number in range(2):
        best = error(number, maps.maps[number])
        for _ in range(4):
            changed = maps.maps[number] + 0.05 * torch.randn(32, 32)
            assert error(number, changed) > best


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_maps_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = TransferRecipe(steps=3, answers=8, tokens=8, batch=2)

    def opened(folder: str, **changes: Any) -> TransferRun:
        changed = TransferRecipe(steps=3, answers=8, tokens=8, batch=2, **changes)
        return TransferRun(checkpoint, tmp_path / folder, changed)

    whole, _ = assert_resumes(opened)
    assert whole.recipe == recipe
    with pytest.raises(InvalidRequestError, match="another rank, mask or model"):
        opened("parts", layers=(1, 2))


def test_the_engine_predicts_what_the_training_does(model: Path, tmp_path: Path) -> None:
    """The maps of the model's own folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    recipe = TransferRecipe(steps=1, answers=4, tokens=8, layers=(2, 4))
    made = TransferRun(load_checkpoint(str(model)), tmp_path / "run", recipe)
    made.save()
    accuracies = np.array([[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]], np.float32)
    replace(HiddenTransfer.load(made.file), accuracies=accuracies).save(folder / made.file.name)
    with LLM(str(folder)) as llm:
        answer = llm.generate(
            [5, 6, 7], decoder="hidden-transfer", max_tokens=8, trace=True, ignore_eos=True
        )
    assert answer.trace is not None
    first, second = answer.trace[:2]
    with torch.no_grad():
        _, pseudo = made.maps.states(made.model, torch.tensor([5, 6, 7]), torch.tensor([3]))
        ranked = made.model.head(pseudo[0]).argsort(-1, descending=True).tolist()
    assert not first["drafted"] and second["drafted"]
    depths: list[int] = []
    for token, parent in zip(second["drafted"], second["parents"], strict=True):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        siblings = sum(other == parent for other in second["parents"][: len(depths) - 1])
        assert token == ranked[depths[-1]][siblings]


@pytest.mark.slow
def test_the_command_writes_maps_with_which_the_text_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys, "hidden-transfer --answers 24 --layers 1,2 --steps 12", out=out, plot=plot
    )
    first, *_, last = (entry["text"] for entry in log["history"] if "text" in entry)
    assert first == last and log["steps"] == 12 and log["group"] == [1, 2]
    assert plot.read_text().lstrip().startswith("<?xml")
    with LLM("tiny-autoregressive") as llm:
        assert_names_of_plain_decoding(llm, f"hidden-transfer:maps={log['path']}", max_tokens=12)


@pytest.mark.slow
def test_training_makes_pseudo_states_predict(tmp_path: Path) -> None:
    recipe = TransferRecipe(steps=100, answers=128, batch=8, rate=1e-3)
    made = TransferRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    made.train()
    first, *_, last = (entry["loss"] for entry in made.history if "loss" in entry)
    assert last < 0.9 * first, (first, last)
