"""Training of diffusion models to draft: the losses by their definitions, their data, and the
target's passes that they save."""

from __future__ import annotations

from pathlib import Path
from random import Random

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
    Draft,
    check_target,
    cut,
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


def _draft(size: int, counts: list[int], length: int = 9) -> Draft:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 40, (len(counts), length), generator=generator)
    return Draft(tokens, size, torch.tensor(counts))


def _probabilities(model: Transformer, draft: Draft) -> torch.Tensor:
    """The probability of each of the drafted tokens, all masked."""
    canvas = draft.tokens.clone()
    canvas[:, -draft.size :] = MASK_ID
    shares = without_mask(model(canvas)).softmax(-1)
    return torch.stack(
        [
            torch.stack([row[at, tokens[at]] for at in range(-draft.size, 0)])
            for row, tokens in zip(shares, draft.tokens, strict=True)
        ]
    )


@torch.no_grad()
def test_a_streak_is_the_sum_of_products(model: Transformer) -> None:
    """Up to the end of the answer: the second has two tokens of the draft."""
    draft = _draft(4, [4, 2, 4])
    q = _probabilities(model, draft)
    streak = q[:, 0] + q[:, 0] * q[:, 1]
    streak += (q[:, :3].prod(-1) + q.prod(-1)) * torch.tensor([1, 0, 1])
    torch.testing.assert_close(missed_streak(model, draft), -streak.sum() / 10)


@torch.no_grad()
def test_tokens_next_to_the_text_weigh_most_in_refinement(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_distillation, "ALPHA", 2.0)
    draft = _draft(3, [3, 1])
    losses = -_probabilities(model, draft).log()
    expected = (4 * losses[:, 0].sum() + 2 * losses[0, 1] + losses[0, 2]) / 11
    torch.testing.assert_close(refined_continuation(model, draft), expected)


@torch.no_grad()
def test_the_first_stage_divides_by_the_share_that_is_masked(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mean over masks it is the loss of one masked token, whatever the share."""
    draft, seen = _draft(4, [4, 2]), []

    def losses(student: Transformer, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        seen.append(masked)
        one = torch.ones(tokens.shape)
        one[1, -2:] = 100.0  # behind the end of the answer
        return one[masked]

    monkeypatch.setattr(draft_distillation, "_losses", losses)
    generator = torch.Generator().manual_seed(2)
    means = [float(masked_continuation(model, draft, generator)) for _ in range(600)]
    assert abs(sum(means) / len(means) - 1) < 0.1
    assert not any(masked[:, :5].any() for masked in seen)
    assert {int(masked[0].sum()) for masked in seen} == {0, 1, 2, 3, 4}


def test_drafts_begin_within_the_longest_answer() -> None:
    """And padding behind an answer's end does not count."""
    tokens, generator = _draft(0, [0, 0], 14).tokens, torch.Generator().manual_seed(3)
    drafts = [cut(tokens, 4, torch.tensor([4, 2]), 5, generator) for _ in range(60)]
    counts = {draft.tokens.shape[1] - 5: draft.counts.tolist() for draft in drafts}
    assert counts == {4: [4, 2], 5: [3, 1], 6: [2, 0], 7: [1, 0]}
    assert all(torch.equal(one.tokens, tokens[:, : one.tokens.shape[1]]) for one in drafts)
    long = [cut(tokens, 4, torch.tensor([10, 2]), 8, generator) for _ in range(60)]
    assert {draft.tokens.shape[1] for draft in long} == {12, 13, 14}


def test_the_stages_of_deer_follow_each_other(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("masked_continuation", "refined_continuation", "missed_streak"):
        monkeypatch.setattr(
            distillation, name, lambda *_, name=name: [called.append(name), torch.ones(())][1]
        )
    canvases = [Canvases(_draft(0, [0, 0], 12).tokens, 4, torch.tensor([8, 8]))]
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


def _rounds(draft: Path, method: str) -> int:
    """Passes of the target over 60 short answers."""
    random = Random(5)
    names = ["Ada", "Ben", "Carl", "Dora", "Leo", "Mia", "Noah", "Zoe"]
    prompts = [
        f"{task} {' '.join(random.sample(names, 3))}:"
        for task in ("copy", "sort", "reverse")
        for _ in range(20)
    ]
    with LLM("tiny-autoregressive", draft=str(draft)) as llm:
        drafted = llm.generate(
            prompts, decoder=f"{method}:size=8", max_tokens=24, temperature=0.0, trace=True
        )
    return sum(len(one.trace or ()) for one in drafted)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["deer", "specdiff-2"])
def test_training_saves_passes(method: str, tmp_path: Path) -> None:
    """Of a model whose weights were disturbed. A fifth is saved; a smaller training's gain would
    depend on the machine's arithmetic."""
    teacher = open_teacher(resolve("tiny-diffusion"))
    student = teacher.model
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in student.parameters():
            weight += 0.7 * weight.std() * torch.randn_like(weight) if weight.dim() == 2 else 0
    save_student(teacher, student.state_dict(), tmp_path / "worse")
    recipe = DistillationRecipe(method, steps=150, batch=16, rate=5e-4)
    losses = distil(tmp_path / "worse", tmp_path / "better", recipe)
    assert len(losses) == 150
    assert _rounds(tmp_path / "better", method) < _rounds(tmp_path / "worse", method)
