"""Reinforcement learning along decoding paths (CJ-GRPO): the answers are those of the decoder, the
log-probabilities are those of the canvases that it saw, and training raises the reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.loading import resolve
from anydecode.training.decoding_path import (
    PathRecipe,
    path_logprobs,
    path_loss,
    sample_path,
    train_on_paths,
)
from anydecode.training.teachers import open_teacher
from diffusion_checkpoints import MASK, SIZES, Tiny, V, write

DREAM = {
    **SIZES,
    "architectures": ["DreamModel"],
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "model_type": "Dream",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
RECIPE = PathRecipe(steps=2, questions=2, answers=3, updates=2, canvas=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with biases whose rows predict the next position."""
    write(Tiny(DREAM, shift=1, biases=True), tmp_path / "dream")
    return tmp_path / "dream"


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("question", ["copy Ada Ben:", "sort Mia Leo Ada:", "1+2="])
def test_a_greedy_path_is_that_of_the_decoder(question: str) -> None:
    teacher = open_teacher(resolve("tiny-diffusion"))
    prompt = teacher.tokenizer.encode(question)
    recipe = replace(RECIPE, canvas=20)
    path = sample_path(teacher.model, prompt, recipe, _generator(), teacher.special, 0.0)
    with LLM("tiny-diffusion", dtype="float32", threads=1) as llm:
        answer = llm.generate(prompt, decoder="eoser-ass", max_tokens=20, ignore_eos=True)
    found = path.tokens[0, len(prompt) :].tolist()
    end = found.index(teacher.special.eos)
    assert found[:end] == answer.tokens[:end] and end > 0
    assert (path.tokens == path.tokens[0]).all()
    counts = [int((path.steps[0] == step).sum()) for step in range(-1, 4)]
    assert counts == [len(prompt), 1, 2, 4, 13]


def test_logprobs_are_those_of_the_canvas_before_the_step(folder: Path) -> None:
    teacher = open_teacher(folder)
    teacher.model.requires_grad_(False)
    recipe = replace(RECIPE, answers=2)
    path = sample_path(teacher.model, [3, 4, 5], recipe, _generator(), teacher.special)
    assert not torch.equal(path.tokens[0], path.tokens[1])
    found = path_logprobs(teacher.model, path, teacher.special)
    assert [len(part) for part in found] == [2, 4, 10]
    for is_wrong in (False, True):  # the wrong twin reads the finished text
        expected = []
        for step in range(3):
            for row in range(2):
                canvas = path.tokens[row].clone()
                canvas[path.steps[row] >= (step + 1 if is_wrong else step)] = MASK
                logits = teacher.model(canvas[None])[0]
                logits[:, MASK] = -torch.inf
                for position in (path.steps[row] == step).nonzero()[:, 0].tolist():
                    logprobs = logits[position - 1].log_softmax(-1)
                    expected.append(float(logprobs[path.tokens[row, position]]))
        same = torch.allclose(torch.cat(found), torch.tensor(expected), atol=1e-4)
        assert same != is_wrong


def test_the_loss_is_the_clipped_objective(folder: Path) -> None:
    teacher = open_teacher(folder)
    path = sample_path(teacher.model, [3, 4], RECIPE, _generator(), teacher.special)
    new, old, first = (
        [part + shift for part in path_logprobs(teacher.model, path, teacher.special)]
        for shift in (0.0, 1.0, 0.5)
    )
    advantages = torch.tensor([1.0, -2.0, 0.0])
    found = float(path_loss(path, advantages, new, old, first, RECIPE).detach())
    ratio, divergence = 2.718281828**-1, 2.718281828**0.5 - 0.5 - 1
    per_answer = [ratio * 1.0, 0.5 * -2.0, 0.0]  # the ratio is below 1 - 0.5
    expected = 0.04 * divergence - sum(per_answer) / 3
    assert found == pytest.approx(expected, abs=1e-5)


def test_training_raises_the_reward_reproducibly(folder: Path, tmp_path: Path) -> None:
    """The reward is the share of words that are even tokens."""
    recipe = PathRecipe(steps=5, questions=2, answers=6, updates=3, rate=5e-3, canvas=8)

    def reward(_: object, text: str) -> float:
        words = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        return sum(word % 2 == 0 for word in words) / 8

    rewards = train_on_paths(folder, tmp_path / "new", recipe, reward=reward)
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
    shorter = replace(recipe, steps=2)
    assert train_on_paths(folder, tmp_path / "again", shorter, reward=reward) == rewards[:2]
    with LLM(tmp_path / "new", threads=1) as llm:
        answer = llm.generate([3, 4], decoder="eoser-ass", max_tokens=8, ignore_eos=True)
        assert len(answer.tokens) == 8 and max(answer.tokens) < V


def test_other_models_and_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without blocks"):
        train_on_paths(resolve("tiny-blocks"), tmp_path, RECIPE)
    with pytest.raises(InvalidRequestError, match="2 answers"):
        PathRecipe(answers=1)
