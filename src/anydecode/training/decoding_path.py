"""Reinforcement learning of a diffusion model along its own decoding paths: CJ-GRPO (Yang et al.,
"Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with
Fewer Decoding Step", arXiv:2509.23924).

The answers are sampled by the rule of the decoder `eoser-ass`. The ratio of the policies is
computed step by step: for the positions that a step unmasked, from the canvas that it saw. So
training sees what decoding saw. Advantages are those of GRPO: the reward of an answer, relative to
the other answers to its question.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import nn

from anydecode.decoders.diffusion.eoser_ass import ASCENDING_FACTOR, num_steps
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.tasks.tasks import Example
from anydecode.training.data import sample_examples
from anydecode.training.objectives import masked_logits, without_mask
from anydecode.training.teachers import Teacher, open_teacher, save_student
from anydecode.training.tokenizer import SpecialTokens
from anydecode.training.transformer import Transformer

#: The reward of an answer, given as text.
Reward = Callable[[Example, str], float]


@dataclass(frozen=True)
class PathRecipe:
    """How the training runs; the defaults are those of the released configuration where it has
    them.

    Attributes:
        steps: Rounds: questions whose answers are sampled anew.
        questions: Questions per round.
        answers: Answers per question.
        updates: Updates of the weights per round.
        rate: Learning rate.
        canvas: Canvas size in tokens.
        temperature: Temperature of the answers.
        clip: The ratio of the policies is clipped to 1 - clip .. 1 + clip.
        penalty: The weight of the divergence from the model as it was.
        seed: Random seed.
    """

    steps: int = 50
    questions: int = 8
    answers: int = 6
    updates: int = 8
    rate: float = 1e-5
    canvas: int = 32
    temperature: float = 1.0
    clip: float = 0.5
    penalty: float = 0.04
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = self.steps, self.questions, self.updates, self.canvas
        if min(sizes) < 1 or self.answers < 2 or self.temperature <= 0:
            raise InvalidRequestError(
                "cj-grpo needs steps, questions, updates and canvas of at least 1, 2 answers, and a"
                " temperature above 0"
            )


@dataclass(frozen=True)
class DecodingPath:
    """Answers to one question: `tokens[answers, length]`, and the step in which each position was
    unmasked, of the same shape, -1 in the prompt."""

    tokens: torch.Tensor
    steps: torch.Tensor


def train_on_paths(
    folder: Path,
    out: Path,
    recipe: PathRecipe,
    report: Callable[[int, float], None] = lambda *_: None,
    reward: Reward = lambda example, text: float(example.is_right(text)),
) -> list[float]:
    """Train the diffusion model in `folder` and write it to `out`.

    Calls `report(step, mean reward)` after each round; returns the mean rewards.

    Raises:
        CheckpointError: The model has blocks, or cannot be trained, see `open_teacher`.
    """
    teacher = open_teacher(folder)
    if teacher.model.shape.block_size is not None:
        raise CheckpointError(f"{folder}: cj-grpo needs a diffusion model without blocks")
    model = copy.deepcopy(teacher.model)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, (0.9, 0.99), weight_decay=0.1)
    rewards = []
    for step in range(recipe.steps):
        groups, mean = _answers(model, teacher, recipe, step, reward)
        for _ in range(recipe.updates if groups else 0):
            optimizer.zero_grad(set_to_none=True)
            for path, advantages, old, first in groups:
                new = path_logprobs(model, path, teacher.special)
                loss = path_loss(path, advantages, new, old, first, recipe) / len(groups)
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
        rewards.append(mean)
        report(step + 1, mean)
    save_student(teacher, model.state_dict(), out)
    return rewards


_Group = tuple[DecodingPath, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]


def _answers(
    model: Transformer, teacher: Teacher[Transformer], recipe: PathRecipe, step: int, reward: Reward
) -> tuple[list[_Group], float]:
    """The answers of a round, and their mean reward. A group has a path, its advantages, and its
    log-probabilities by the model as it is and by the teacher. Questions whose answers have equal
    rewards teach nothing and are left out."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    examples = sample_examples(Random(f"{recipe.seed}/cj-grpo/{step}"), recipe.questions)
    groups, total = list[_Group](), 0.0
    for example in examples:
        prompt = teacher.tokenizer.encode(example.prompt)
        path = sample_path(model, prompt, recipe, generator, teacher.special)
        texts = [_text(teacher, row) for row in path.tokens[:, len(prompt) :].tolist()]
        rewards = torch.tensor([reward(example, text) for text in texts])
        total += float(rewards.mean())
        if (rewards == rewards[0]).all():
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        with torch.no_grad():
            old = path_logprobs(model, path, teacher.special)
            first = path_logprobs(teacher.model, path, teacher.special)
        groups.append((path, advantages, old, first))
    return groups, total / len(examples)


def _text(teacher: Teacher[Transformer], tokens: Sequence[int]) -> str:
    """The text of an answer up to its first end."""
    end = next((i for i, token in enumerate(tokens) if token in teacher.tokenizer.eos_ids), None)
    return teacher.tokenizer.decode(list(tokens[:end]))


@torch.no_grad()
def sample_path(
    model: Transformer,
    prompt: Sequence[int],
    recipe: PathRecipe,
    generator: torch.Generator,
    special: SpecialTokens,
    temperature: float | None = None,
) -> DecodingPath:
    """Sample answers as `eoser-ass` does: step i unmasks the 2^i most confident tokens, the last
    step the rest, and ends of text are less confident in early steps.

    `temperature` is that of the recipe by default; at 0 all answers are equal.
    """
    temperature = recipe.temperature if temperature is None else temperature
    start, count, total = len(prompt), recipe.answers, num_steps(recipe.canvas)
    tokens = torch.full((count, start + recipe.canvas), special.mask)
    tokens[:, :start] = torch.tensor(list(prompt))
    unmasked_in = torch.full_like(tokens, -1)
    remaining = recipe.canvas
    for step in range(total):
        is_masked = tokens == special.mask
        is_masked[:, :start] = False
        logits = without_mask(model(tokens).roll(model.shape.logit_shift, 1), special)
        noised = logits
        if temperature > 0:
            uniform = torch.rand(logits.shape, generator=generator).clamp(min=1e-20)
            noised = logits / temperature - torch.log(-torch.log(uniform))
        predicted = noised.argmax(-1)
        confidence = logits.softmax(-1).gather(-1, predicted[..., None])[..., 0]
        progress = min(1.0, ((2 << step) - 1) / (1 << total))
        factor = ASCENDING_FACTOR + (1 - ASCENDING_FACTOR) * progress
        confidence = torch.where(predicted == special.eos, confidence * factor, confidence)
        number = remaining if step == total - 1 else min(1 << step, remaining)
        best = confidence.masked_fill(~is_masked, -1.0).topk(number, -1).indices
        chosen = torch.zeros_like(is_masked).scatter_(1, best, True)
        tokens[chosen], unmasked_in[chosen] = predicted[chosen], step
        remaining -= number
    return DecodingPath(tokens, unmasked_in)


def path_logprobs(
    model: Transformer, path: DecodingPath, special: SpecialTokens
) -> list[torch.Tensor]:
    """The log-probabilities of the tokens that each step of a path unmasked, row by row, given the
    canvas before the step."""
    logprobs = []
    for step in range(int(path.steps.max()) + 1):
        chosen = path.steps == step
        logits = masked_logits(model, path.tokens, path.steps >= step, special, chosen)
        every = logits.log_softmax(-1)
        logprobs.append(every.gather(-1, path.tokens[chosen][:, None])[:, 0])
    return logprobs


def path_loss(
    path: DecodingPath,
    advantages: torch.Tensor,
    new: list[torch.Tensor],
    old: list[torch.Tensor],
    first: list[torch.Tensor],
    recipe: PathRecipe,
) -> torch.Tensor:
    """The mean over steps of the clipped objective of their tokens, plus the penalty.

    Args:
        path: Answers to one question.
        advantages: `[answers]`.
        new: The `path_logprobs` of the model that is trained.
        old: Those of the model that sampled the answers.
        first: Those of the model before the training.
        recipe: Clipping and penalty.
    """
    total = torch.zeros(())
    for step, (ours, sampled, reference) in enumerate(zip(new, old, first, strict=True)):
        gain = advantages[(path.steps == step).nonzero()[:, 0]]
        ratio = (ours - sampled).exp()
        clipped = ratio.clamp(1 - recipe.clip, 1 + recipe.clip)
        objective = torch.minimum(ratio * gain, clipped * gain)
        divergence = (reference - ours).exp() - (reference - ours) - 1
        total = total + (recipe.penalty * divergence - objective).mean()
    return total / len(new)
