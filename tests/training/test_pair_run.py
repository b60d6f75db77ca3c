"""Training of an adapter on pairs: the loss, the held-out texts, and runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training.block_adapter import Pair
from anydecode.training.pair_run import PairRecipe, PairRun
from interrupted_runs import assert_resumes, trained

MODEL = "tiny-autoregressive"
TEXTS: list[list[Pair]] = [[([5, 6, number], [7, number, 1])] for number in range(10, 26)]


def _run(folder: Path, texts: list[list[Pair]] = TEXTS, **options: Any) -> PairRun:
    recipe = PairRecipe(**{"steps": 3, "batch": 2, "rank": 2, **options})
    return PairRun(load_checkpoint(MODEL), folder, recipe, lambda: texts, MODEL)


def test_the_loss_is_that_of_the_learned_tokens(tmp_path: Path) -> None:
    """Rows of two lengths, of which the shorter one is padded."""
    made = _run(tmp_path, [[([5, 6], [7, 8, 9])], [([5], [6, 1])]])
    logits = made.model(torch.tensor([[5, 6, 7, 8, 9]]), causal=True)[0]
    expected = functional.cross_entropy(logits[1:4], torch.tensor([7, 8, 9]))
    assert made.evaluate() == pytest.approx(expected.item(), abs=1e-4)
    other = made.model(torch.tensor([[5, 6, 1]]), causal=True)[0, :2]
    both = functional.cross_entropy(torch.cat([logits[1:4], other]), torch.tensor([7, 8, 9, 6, 1]))
    first: list[float] = []
    made.texts = [made.texts[0], [*made.texts[0], *made.texts[1]]]
    made.train(lambda done, loss: first.append(loss))
    assert first[0] == pytest.approx(both.item(), abs=1e-4)


def test_a_run_in_two_parts_gives_the_adapter_of_one(tmp_path: Path) -> None:
    _, resumed = assert_resumes(lambda name: _run(tmp_path / name))
    assert len(resumed.losses()) >= 3
    with pytest.raises(InvalidRequestError, match="another rank or model"):
        _run(tmp_path / "parts", rank=3)


def test_the_first_eighth_of_the_texts_is_held_out(tmp_path: Path) -> None:
    """Other texts there change nothing but the held-out loss."""
    first, *others = (
        trained(_run(tmp_path / str(number), texts, batch=16))
        for number, texts in enumerate(
            (TEXTS, [*[[([5], [9])]] * 2, *TEXTS[2:]], [*TEXTS[:2], [([5], [9])], *TEXTS[3:]])
        )
    )
    held_out, learned = (
        [torch.equal(a, b) for a, b in zip(first.trained, other.trained, strict=True)]
        for other in others
    )
    assert all(held_out) and not all(learned)
    assert others[0].losses() != first.losses()


@pytest.mark.parametrize(
    "options", [{}, {"steps": 1, "minutes": 1.0}, {"steps": 1, "rank": 0}, {"steps": 0}], ids=str
)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        PairRecipe(**options)


def test_bad_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least 2 texts, not 1"):
        _run(tmp_path, TEXTS[:1])
    with pytest.raises(InvalidRequestError, match="a row has 5000 tokens"):
        _run(tmp_path, [TEXTS[0], [([5], [6] * 4999)]])
