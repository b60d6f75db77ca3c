"""Training with groups of masks: what their rows see, the labels, runs that go on, and a model
whose masks predict."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.masks import (
    MaskRecipe,
    MaskRun,
    PromptRecipe,
    PromptRun,
    group_states,
)
from anydecode.training.transformer import Shape, Transformer
from drafted_texts import assert_names_of_plain_decoding
from interrupted_runs import assert_resumes
from train_commands import train_command

SHAPE = Shape(50, width=32, layers=3, heads=2, hidden=48)
TEXT, MASK = [5, 6, 7, 8, 9, 10], 3


def _separate(model: Transformer, end: int, masks: int) -> torch.Tensor:
    """The logits of the masks of one group, in a causal pass over the text before it."""
    return model(torch.tensor([[*TEXT[:end], *[MASK, 4][:masks]]]), causal=True)[0, end:]


def test_masks_see_the_text_before_their_group_and_their_group() -> None:
    torch.manual_seed(0)
    model = Transformer(SHAPE).eval()
    ends = torch.tensor([2, 3, 6])
    states = group_states(model, torch.tensor(TEXT), ends, torch.tensor([MASK, 4]))
    clean, masked = map(model.head, states)
    torch.testing.assert_close(clean, model(torch.tensor([TEXT]), causal=True)[0])
    for group, end in zip(masked, ends.tolist(), strict=True):
        torch.testing.assert_close(group, _separate(model, end, 2))


def test_the_loss_is_the_mean_over_the_text_and_the_masks(tmp_path: Path) -> None:
    """The mask behind n tokens at distance i predicts the token n + i + 1."""
    recipe = MaskRecipe(steps=1, answers=4, tokens=6, groups=2)
    made = MaskRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    pair, ends = (TEXT[:3], TEXT[3:] + [11]), torch.tensor([3, 4])
    loss = made.loss(pair, ends)
    text = [*pair[0], *pair[1]]
    clean = made.model(torch.tensor([text]), causal=True)[0]
    rows = [(clean[at], text[at + 1]) for at in (2, 3, 4, 5)]
    for end in (3, 4):
        tokens = torch.tensor([[*text[:end], made.mask, made.mask]])
        logits = made.model(tokens, causal=True)[0, end:]
        rows += [(logits[index], text[end + index + 1]) for index in range(2)]
    expected = sum(functional.cross_entropy(row, torch.tensor(label)) for row, label in rows)
    torch.testing.assert_close(loss, expected / len(rows))
    drawn = [made.draw_ends(pair, Random(seed)).tolist() for seed in range(20)]
    assert {tuple(ends) for ends in drawn} == {(3, 4)}


@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 1, "minutes": 1.0}, {"steps": 0}, {"steps": 1, "masks": 0},
     {"steps": 1, "answers": 1}, {"steps": 1, "rank": 0}],
    ids=str,
)  # fmt: skip
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        MaskRecipe(**options)


def test_a_mask_that_is_no_token_is_refused(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    with pytest.raises(InvalidRequestError, match="the mask token is 99999; allowed are 0 to"):
        MaskRun(checkpoint, tmp_path, MaskRecipe(steps=1, answers=2), mask=99999)


def test_a_run_in_two_parts_gives_the_model_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = MaskRecipe(steps=3, answers=8, tokens=8, batch=2)

    def opened(folder: str, mask: int | None = None) -> MaskRun:
        return MaskRun(checkpoint, tmp_path / folder, recipe, mask)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="another rank, mask or model"):
        opened("parts", mask=1)


def test_the_command_writes_a_model_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(capsys, "masks --answers 8 --steps 2 --masks 1", out=out, plot=plot)
    assert log["steps"] == 2 and plot.read_text().lstrip().startswith("<?xml")
    with LLM(log["path"]) as llm:
        assert llm.tokenizer.mask_id == log["group"][0]
        assert_names_of_plain_decoding(llm, "space:masks=1")


def test_the_model_has_the_chat_template_of_its_base(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(model))
    made = MaskRun(checkpoint, tmp_path, MaskRecipe(steps=1, answers=4, tokens=8, rank=1), mask=3)
    made.train()
    trained = load_checkpoint(str(made.model_folder)).tokenizer
    assert checkpoint.tokenizer is not None and trained is not None
    assert trained.chat_template == checkpoint.tokenizer.chat_template is not None


def test_the_loss_of_prompt_tokens_is_the_divergence_from_the_rows_of_the_text(
    tmp_path: Path,
) -> None:
    recipe = PromptRecipe(steps=1, answers=4, tokens=6, masks=2)
    made = PromptRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    pair, ends = (TEXT[:3], TEXT[3:] + [11]), torch.tensor([3, 4])
    with torch.no_grad():
        made.embedding.rows += 0.1 * torch.randn_like(made.embedding.rows)
    text, size = [*pair[0], *pair[1]], made.model.shape.vocab
    clean = made.model(torch.tensor([text]), causal=True)[0].softmax(-1)
    expected = 0.0
    for end in (3, 4):
        tokens = torch.tensor([[*text[:end], size, size + 1]])
        predicted = made.model(tokens, causal=True)[0, end:].softmax(-1)
        for distance in range(2):
            p, q = clean[end + distance], predicted[distance]
            expected += 0.8**distance * float((p * (p / q).log()).sum().detach()) / 2 / 2
    assert float(made.loss(pair, ends).detach()) == pytest.approx(expected, rel=1e-3)


def test_prompt_tokens_leave_the_model_as_it_is_and_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    log = train_command(capsys, "prompts --answers 24 --steps 12 --prompts 2", out=out)
    first, *_, last = (entry["text"] for entry in log["history"] if "text" in entry)
    assert first == last and log["steps"] == 12
    with LLM("tiny-autoregressive") as llm:
        assert_names_of_plain_decoding(llm, f"ppd:prompts={log['path']}", max_tokens=12)


@pytest.mark.slow
def test_training_makes_prompt_tokens_predict(tmp_path: Path) -> None:
    recipe = PromptRecipe(steps=100, answers=128, batch=8)
    made = PromptRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    made.train()
    first, *_, last = (entry["loss"] for entry in made.history if "loss" in entry)
    assert last < 0.9 * first, (first, last)


@pytest.mark.slow
def test_training_makes_masks_predict(tmp_path: Path) -> None:
    recipe = MaskRecipe(steps=100, answers=128, batch=8, rate=2e-3)
    made = MaskRun(load_checkpoint("tiny-autoregressive"), tmp_path, recipe)
    made.train()
    (_, first), *_, (_, last) = made.shares()
    assert sum(last) > 0.15 + sum(first), (first, last)
