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
from anydecode.tasks.tasks import examples
from anydecode.training.masks import (
    MaskRecipe,
    MaskRun,
    PromptRecipe,
    PromptRun,
    UnitRecipe,
    UnitRun,
    group_states,
    lexical_units,
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


def test_units_are_runs_of_sure_tokens_behind_any_token() -> None:
    sure = [0.9, 0.2, 0.95, 0.9, 0.1, 0.3, 1.0, 1.0, 1.0, 0.5]
    found = [list(unit) for unit in lexical_units(sure, 0.9, 10)]
    assert found == [[1, 2, 3], [5, 6, 7, 8]]
    assert [list(unit) for unit in lexical_units(sure, 0.9, 3)] == [[1, 2, 3], [5, 6, 7]]
    assert [list(unit) for unit in lexical_units(sure, 0.96, 10)] == [[5, 6, 7, 8]]
    assert lexical_units([1.0], 0.5, 3) == lexical_units([0.1, 0.2], 0.5, 3) == []


def _unit_run(folder: Path, **options: Any) -> UnitRun:
    recipe = UnitRecipe(**{"steps": 1, "answers": 8, "tokens": 16, "masks": 3, **options})
    return UnitRun(load_checkpoint("tiny-autoregressive"), folder, recipe)


def test_masks_stand_at_units_of_the_untrained_model_and_predict_them_alone(tmp_path: Path) -> None:
    """Each unit in a pass of its own, behind the text before it."""
    made = _unit_run(tmp_path, confidence=0.6)
    sizes, num_last = set(), 0
    for pair, units in zip(made.pairs, made.units, strict=True):
        text, first = [*pair[0], *pair[1]], len(pair[0])
        clean = made.model(torch.tensor([text[:-1]]), causal=True)[0].detach()
        is_sure = [
            float(clean[at - 1].softmax(-1)[text[at]]) >= 0.6 for at in range(first, len(text))
        ]
        for start, size in units.items():
            assert all(is_sure[start + 1 : start + size]) and 2 <= size <= 4
            is_cut = size == 4
            assert is_cut or not is_sure[start + size : start + size + 1] == [True]
        assert sorted(made.draw_ends(pair, Random(0)).tolist()) == sorted(
            first + start for start in units
        )
        ends = torch.tensor([first + start for start in units])
        rows, every = [], []
        for start, size in units.items():
            end = first + start
            rows.append((clean[end - 1], text[end]))
            given = torch.tensor([[*text[:end], *[made.mask] * 3]])
            masked = made.model(given, causal=True)[0, end:].detach()
            behind = range(min(3, len(text) - end - 1))
            every += [(masked[index], text[end + index + 1]) for index in behind]
            rows += [(masked[index], text[end + index + 1]) for index in range(size - 1)]
            sizes.add(size)
            num_last += start + 4 > len(pair[1])
        ordinary = [(clean[at - 1], text[at]) for at in range(first, len(text))]
        loss = made.loss(pair, ends).detach()
        torch.testing.assert_close(loss, _mean_loss(ordinary) + _mean_loss(rows))
        if len(rows) < 4 * len(units):  # else all masks have a label
            assert abs(loss - _mean_loss(ordinary) - _mean_loss([*rows, *every])) > 1e-3
    assert len(sizes) > 1 and num_last  # also behind the last tokens of an answer


def test_accuracies_of_units_are_of_their_own_tokens(tmp_path: Path) -> None:
    """A mask predicts nothing behind the end of its unit."""
    made = _unit_run(tmp_path, confidence=0.6, answers=12)
    hits, totals = [0] * 3, [0] * 3
    for pair in made._held_out:
        text = [*pair[0], *pair[1]]
        for start, size in made.units[made.pairs.index(pair)].items():
            end = len(pair[0]) + start
            given = torch.tensor([[*text[:end], *[made.mask] * 3]])
            best = made.model(given, causal=True)[0, end:].argmax(-1).tolist()
            for index in range(size - 1):
                hits[index] += best[index] == text[end + index + 1]
                totals[index] += 1
    assert totals[2] < totals[0]
    _, *found = made.accuracies(1)
    expected = [hit / max(total, 1) for hit, total in zip(hits, totals, strict=True)]
    assert [one for (one,) in found] == pytest.approx(expected)


def _mean_loss(rows: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    losses = [functional.cross_entropy(row, torch.tensor(label)) for row, label in rows]
    return torch.stack(losses).mean()


def test_a_run_of_units_is_resumed_with_its_own_options_alone(tmp_path: Path) -> None:
    def opened(folder: str, **options: Any) -> UnitRun:
        return _unit_run(tmp_path / folder, steps=3, batch=2, **options)

    _, resumed = assert_resumes(opened)
    assert len(resumed.units) == len(resumed.pairs)
    with pytest.raises(InvalidRequestError, match="another rank, mask, confidence or model"):
        opened("parts", confidence=0.5)
    with pytest.raises(InvalidRequestError, match="another rank, mask or model"):
        recipe = MaskRecipe(steps=3, answers=8, tokens=16, masks=3)
        MaskRun(load_checkpoint("tiny-autoregressive"), tmp_path / "parts", recipe)


@pytest.mark.parametrize("confidence", [0.0, 1.5])
def test_a_confidence_that_is_no_probability_is_refused(confidence: float, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="allowed is a number above 0"):
        _unit_run(tmp_path, confidence=confidence)


def test_answers_without_units_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="lexical units at a confidence of 1.0"):
        _unit_run(tmp_path, confidence=1.0)


@pytest.mark.slow
def test_training_on_units_makes_passes_keep_more_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Than the model before its training, on prompts that it did not learn from."""
    command = "masks --units 0.8 --masks 3 --answers 128 --batch 8 --rate 2e-3 --steps"
    logs = [
        train_command(capsys, f"{command} {steps}", out=tmp_path / str(steps)) for steps in (1, 100)
    ]
    first, *_, last = (entry["loss"] for entry in logs[1]["history"] if "loss" in entry)
    assert last < 0.7 * first
    kept = [_tokens_per_pass(log["path"]) for log in logs]
    assert kept[1] > kept[0] + 0.3, kept


def _tokens_per_pass(path: str) -> float:
    prompts = [one.prompt for one in examples("copy", 16, seed=99)]
    with LLM(path) as llm:
        answers = llm.generate(prompts, decoder="mars:threshold=0.8", max_tokens=24)
    passes = sum(one.stats.passes for one in answers)
    return sum(len(one.tokens) for one in answers) / passes


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
