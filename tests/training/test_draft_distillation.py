"""Training of diffusion models to draft: the losses by their definitions, their data, and
acceptance that rises."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import resolve
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.training import distillation, draft_distillation
from anydecode.training.distillation import Canvases, DistillationRecipe, distil
from anydecode.training.draft_distillation import (
    check_target,
    drafted_part,
    masked_continuation,
    missed_streak,
    refined_continuation,
    target_answers,
)
from anydecode.training.objectives import without_mask
from anydecode.training.teachers import open_teacher, save_student
from anydecode.training.tokenizer import EOS_ID, MASK_ID, build_tokenizer
from anydecode.training.transformer import Shape, Transformer

SHAPE = Shape(build_tokenizer().get_vocab_size(), width=32, layers=1, heads=2, hidden=48)
PROMPTS = ["copy Ada Ben Carl:", "sort Leo Ada Ben:", "reverse a b c d:"]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE).eval()


def _part(count: int = 3, length: int = 9) -> torch.Tensor:
    return torch.randint(5, 40, (count, length), generator=torch.Generator().manual_seed(1))


def _probabilities(model: Transformer, part: torch.Tensor, size: int) -> torch.Tensor:
    """The probability of each of the last `size` tokens, all masked."""
    canvas = part.clone()
    canvas[:, -size:] = MASK_ID
    shares = without_mask(model(canvas)).softmax(-1)
    return torch.stack(
        [
            torch.stack([shares[row, at, part[row, at]] for at in range(-size, 0)])
            for row in range(len(part))
        ]
    )


@torch.no_grad()
def test_a_streak_is_the_sum_of_products(model: Transformer) -> None:
    part = _part()
    q = _probabilities(model, part, 4)
    streak = q[:, 0] + q[:, 0] * q[:, 1] + q[:, :3].prod(-1) + q.prod(-1)
    torch.testing.assert_close(missed_streak(model, part, 4), -streak.sum() / 12)


@torch.no_grad()
def test_tokens_next_to_the_text_weigh_most_in_refinement(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_distillation, "ALPHA", 2.0)
    part = _part()
    losses = -_probabilities(model, part, 3).log()
    expected = (4 * losses[:, 0] + 2 * losses[:, 1] + losses[:, 2]).mean() / 7
    torch.testing.assert_close(refined_continuation(model, part, 3), expected)


@torch.no_grad()
def test_the_first_stage_divides_by_the_share_that_is_masked(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mean over masks it is the loss of one masked token, whatever the share."""
    part, seen = _part(1, 9), []
    monkeypatch.setattr(
        draft_distillation,
        "_losses",
        lambda student, rows, masked: [seen.append(masked), torch.ones(int(masked.sum()))][1],
    )
    generator = torch.Generator().manual_seed(2)
    losses = [float(masked_continuation(model, part, 4, generator)) for _ in range(600)]
    assert abs(sum(losses) / len(losses) - 1) < 0.1
    assert not any(masked[:, :5].any() for masked in seen)
    assert {int(masked.sum()) for masked in seen} == {0, 1, 2, 3, 4}


def test_parts_end_behind_a_random_cut_of_the_answer() -> None:
    tokens, generator = _part(2, 12), torch.Generator().manual_seed(3)
    parts = [drafted_part(tokens, 4, 5, generator) for _ in range(60)]
    assert {part.shape[1] for part in parts} == {9, 10, 11, 12}
    assert all(torch.equal(part, tokens[:, : part.shape[1]]) for part in parts)


def test_the_stages_of_deer_follow_each_other(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("masked_continuation", "refined_continuation", "missed_streak"):
        monkeypatch.setattr(
            distillation, name, lambda *_, name=name: [called.append(name), torch.ones(())][1]
        )
    canvases = [Canvases(_part(2, 12), 4, torch.tensor([8, 8]))]
    for method, progress in (("deer", 0.4), ("deer", 0.5), ("specdiff-2", 0.1)):
        recipe, generator = DistillationRecipe(method, block=4), torch.Generator()
        assert distillation.drafting(model, canvases, progress, recipe, generator) == 1
    assert called == ["masked_continuation", "refined_continuation", "missed_streak"]


def test_answers_are_the_targets() -> None:
    with LLM("tiny-autoregressive") as llm:
        prompts = [llm.encode(prompt) for prompt in PROMPTS]
        answers = target_answers(llm, prompts, 12, 0.0, seed=1)
        plain = [llm.generate(prompt, max_tokens=12, temperature=0.0).tokens for prompt in prompts]
    assert [answer[: len(own)] for answer, own in zip(answers, plain, strict=True)] == plain
    rests = [answer[len(own) :] for answer, own in zip(answers, plain, strict=True)]
    assert all(len(answer) == 12 for answer in answers)
    assert {token for rest in rests for token in rest} == {EOS_ID}


def test_a_target_with_another_vocabulary_is_refused(model: Transformer) -> None:
    scripted = ScriptedModel(lambda seen: np.zeros(259, np.float32))
    with LLM(scripted, tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(InvalidRequestError, match="needs the vocabulary of its target"):
            check_target(llm, model)


def _accepted(draft: Path, method: str) -> int:
    with LLM("tiny-autoregressive", draft=str(draft)) as llm:
        drafted = llm.generate(
            PROMPTS, decoder=f"{method}:size=8", max_tokens=24, temperature=0.0, trace=True
        )
    return sum(len(event["accepted"]) for one in drafted for event in one.trace or ())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["deer", "specdiff-2"])
def test_training_raises_acceptance(method: str, tmp_path: Path) -> None:
    """Of a model whose weights were disturbed."""
    teacher = open_teacher(resolve("tiny-diffusion"))
    student = teacher.model
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in student.parameters():
            weight += 0.4 * weight.std() * torch.randn_like(weight) if weight.dim() == 2 else 0
    save_student(teacher, student.state_dict(), tmp_path / "worse")
    recipe = DistillationRecipe(method, steps=40, batch=16, rate=1e-3)
    losses = distil(tmp_path / "worse", tmp_path / "better", recipe)
    assert len(losses) == 40
    assert _accepted(tmp_path / "better", method) > _accepted(tmp_path / "worse", method)
