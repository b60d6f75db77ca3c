"""Training of mask tokens with an adapter and a head of their own: which rows have the adapter, the
loss, runs that go on, and files with which mtp-future drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.future_masks import FutureRecipe, FutureRun
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

TEXT = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("options", [{"rank": 0}, {"masks": 33}, {"masks": 0}], ids=str)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        FutureRecipe(steps=1, **options)


def _random_run(folder: Path) -> FutureRun:
    """A run whose trained weights are random."""
    recipe = FutureRecipe(steps=1, answers=4, tokens=6, rank=2)
    made = FutureRun(load_checkpoint("tiny-autoregressive"), folder, recipe)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in made.trained:
            weight += 0.1 * torch.randn_like(weight)
    return made


def test_the_loss_is_that_of_separate_passes(tmp_path: Path) -> None:
    """Of each mask: both cross-entropies, and the distance from the state of the text's row that
    predicts the same token, which the model has without an adapter."""
    made = _random_run(tmp_path)
    pair, ends = (TEXT[:3], TEXT[3:]), torch.tensor([3, 4])
    loss = made.loss(pair, ends)
    model, size = made.model, made.model.shape.vocab
    made.gate.first = len(TEXT)
    clean = model.states(torch.tensor([TEXT]), causal=True)[0]
    expected = torch.zeros(())
    for end in ends.tolist():
        made.gate.first = end
        tokens = torch.tensor([[*TEXT[:end], size, size + 1]])
        states = model.states(tokens, causal=True)[0]
        torch.testing.assert_close(states[:end], clean[:end])  # the text has no adapter
        for index, state in enumerate(states[end:]):
            label, before = torch.tensor(TEXT[end + index + 1]), torch.tensor(TEXT[end + index])
            own = made.head(made.embedding(before), state)
            for inputs in (state, own):
                expected = expected + functional.cross_entropy(model.head(inputs), label)
            expected = expected + (state - clean[end + index]).square().mean()
    torch.testing.assert_close(loss, expected / 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None for weight in made.trained)


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_weights_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = FutureRecipe(steps=3, answers=8, tokens=8, batch=2, rank=2)

    def opened(folder: str) -> FutureRun:
        return FutureRun(checkpoint, tmp_path / folder, recipe)

    assert_resumes(opened)


@pytest.mark.slow
def test_the_command_writes_files_with_which_the_text_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given, or in the model's folder."""
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(capsys, "future-masks --answers 24 --steps 12", out=out, plot=plot)
    first, *_, last = (entry["text"] for entry in log["history"] if "text" in entry)
    assert first == last and log["steps"] == 12
    assert plot.read_text().lstrip().startswith("<?xml")
    with LLM("tiny-autoregressive") as llm:
        assert_names_of_plain_decoding(llm, f"mtp-future:parts={log['path']}", max_tokens=12)


def test_the_engine_predicts_what_the_training_does(model: Path, tmp_path: Path) -> None:
    """The masks of the model's own folder, with the adapter rounded to bfloat16."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    recipe = FutureRecipe(steps=1, answers=4, tokens=8, rank=1)
    made = FutureRun(load_checkpoint(str(model)), tmp_path / "run", recipe)
    with torch.no_grad():
        for weight in made.trained:
            weight += 0.2 * torch.randn_like(weight)
            weight.copy_(weight.bfloat16().float())
    made.save()
    made.parts_folder.rename(folder / "future_masks")
    with LLM(str(folder)) as llm:
        answer = llm.generate(
            [5, 6, 7], decoder="mtp-future", max_tokens=8, trace=True, ignore_eos=True
        )
    assert answer.trace is not None
    first, second = answer.trace[:2]
    text = [5, 6, 7, *first["tokens"]]
    made.gate.first = 3
    size = made.model.shape.vocab
    states = made.model.states(torch.tensor([[5, 6, 7, size, size + 1]]), causal=True)[0, 3:]
    for state in states:
        best = made.model.head(state).topk(min(64, size)).indices
        row = made.model.head(made.head(made.embedding(torch.tensor(text[-1])), state))
        text.append(int(best[row[best].argmax()]))
    assert second["drafted"] == text[4:]


@pytest.mark.slow
def test_training_makes_masks_predict(tmp_path: Path) -> None:
    recipe = FutureRecipe(steps=150, answers=128, batch=8, rate=2e-3)
    made = FutureRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    made.train()
    (_, first), *_, (_, last) = made.shares()
    assert sum(last) > 0.15 + sum(first), (first, last)
