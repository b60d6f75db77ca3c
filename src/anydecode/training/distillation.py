"""Distillation of a diffusion model for fewer passes, or to draft for an autoregressive target, on
data that the package generates.

`dscd` (Liang et al., CD4LM, arXiv:2601.02236) trains the student to agree with the teacher under
nested masks: the teacher's mask is a subset of the student's. `certainty` (Chen et al., dParallel,
arXiv:2509.26488) lowers the model's entropy where it is right, on its own answers. All weights are
trained, which is enough at this size, or, where the layers do not allow it, an adapter. `duo`: see
`consistency.py` and `noised_canvas.py`; `deer` and `specdiff-2`: see `draft_distillation.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.training.consistency import ROUNDS, consistency, distance
from anydecode.training.data import sample_texts
from anydecode.training.denoising import denoise
from anydecode.training.draft_distillation import (
    check_target,
    cut,
    masked_continuation,
    missed_streak,
    refined_continuation,
    target_answers,
)
from anydecode.training.network_model import NetworkModel, reads_noise
from anydecode.training.noised_canvas import noised_consistency
from anydecode.training.objectives import masked_logits
from anydecode.training.teachers import Teacher, open_any_teacher, save_student
from anydecode.training.tokenizer import OWN_TOKENS, SpecialTokens
from anydecode.training.transformer import Transformer

#: A model that is distilled.
Student = Transformer | NetworkModel

METHODS = ("cd4lm", "dparallel", "duo", "deer", "specdiff-2")
#: Methods that train a draft model on answers of a target, and the answers' temperature.
DRAFTING = {"deer": 0.0, "specdiff-2": 1.0}


@dataclass(frozen=True)
class DistillationRecipe:
    """How a distillation runs; the other constants are the papers'."""

    method: str
    steps: int = 200
    batch: int = 32
    rate: float = 1e-4
    canvas: int = 32
    block: int = 8
    seed: int = 0
    rank: int = 16  # of the adapter, where not all weights are trained
    temperature: float = 2.0  # cd4lm
    certainty: float = 2.0  # dparallel: weight of the entropy
    target: str = "tiny-autoregressive"  # deer, specdiff-2: the model to draft for

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidRequestError(
                f"no distillation {self.method!r}: choose from {', '.join(METHODS)}"
            )
        is_positive = min(self.steps, self.batch, self.rank) >= 1
        if not is_positive or not 1 <= self.block <= self.canvas:
            raise InvalidRequestError(
                "distillation needs steps, batch and rank >= 1, and a block within the canvas"
            )


def distil(
    folder: Path,
    out: Path,
    recipe: DistillationRecipe,
    report: Callable[[int, float], None] = lambda *_: None,
    family: str | None = None,
    mask: int | None = None,
) -> list[float]:
    """Distil the checkpoint in `folder` into `out`.

    Args:
        folder: The model, a folder or a `.gguf` file.
        out: The folder of the student: a model, or an adapter of the model.
        recipe: How to distil.
        report: Called with the number and the loss of every step.
        family, mask: What the model's files do not say, as those of `LLM`.

    Returns:
        The losses.

    Raises:
        CheckpointError: The model cannot be trained, see `open_any_teacher`.
        InvalidRequestError: The method is not for the noise or the blocks of the model.
    """
    teacher = open_any_teacher(folder, recipe.rank, recipe.seed, family, mask)
    _check_method(teacher, folder, recipe)
    with ExitStack() as stack:
        answering = None
        if recipe.method in DRAFTING:
            assert isinstance(teacher.model, Transformer), "checked by `_check_method`"
            answering = stack.enter_context(LLM(recipe.target))
            check_target(answering, teacher.model)
        elif recipe.method == "dparallel" and isinstance(teacher.model, NetworkModel):
            answering = stack.enter_context(LLM(folder, family=family, mask=mask))
        student, losses = _train(teacher, answering, recipe, report)
    save_student(teacher, student.state_dict(), out)
    return losses


def _check_method(teacher: Teacher[Student], folder: Path, recipe: DistillationRecipe) -> None:
    """Raise an error for a method that is not for the model."""
    model, method = teacher.model, recipe.method
    if method in DRAFTING and (isinstance(model, NetworkModel) or teacher.special != OWN_TOKENS):
        raise CheckpointError(
            f"{folder}: {method} trains models of `anydecode train diffusion` only"
        )
    is_noised = isinstance(model, NetworkModel) and reads_noise(model.spec)
    if is_noised and method != "duo":
        raise InvalidRequestError(
            f"{method} is for models that fill masks; this one reads noise that is, at least in"
            " part, random tokens: use method duo"
        )
    size = model.shape.block_size
    if method == "dparallel" and size is not None and size % recipe.block:
        raise InvalidRequestError(
            f"block={recipe.block} does not divide the model's blocks of {size} positions"
        )
    if method == "duo" and size is not None and not is_noised:
        raise InvalidRequestError(
            "duo distils models whose noise is random tokens; this one fills blocks of masks"
        )


def _train(
    teacher: Teacher[Student],
    answering: LLM | None,
    recipe: DistillationRecipe,
    report: Callable[[int, float], None],
) -> tuple[Student, list[float]]:
    """The student, which starts as the teacher, and the losses. `answering` answers the prompts:
    the target of a draft model, or the teacher in the engine."""
    special = teacher.special
    student = copy.deepcopy(teacher.model).train()
    earlier, current_round = copy.deepcopy(teacher.model).eval(), 0
    optimizer = torch.optim.AdamW(student.parameters(), recipe.rate, (0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        canvases = _canvases(teacher, answering, recipe, step)
        if recipe.method in DRAFTING:
            assert isinstance(student, Transformer), "checked by `_check_method`"
            loss = drafting(student, canvases, step / recipe.steps, recipe, generator)
        elif recipe.method == "cd4lm":
            progress = step / recipe.steps
            loss = dscd(student, teacher.model, canvases, progress, recipe, generator, special)
        elif recipe.method == "duo":
            this_round = step * ROUNDS // recipe.steps
            if this_round > current_round:
                earlier.load_state_dict(student.state_dict())
                current_round = this_round
            loss = closer(student, earlier, canvases, this_round, generator, special)
        else:
            loss = certainty(student, canvases, recipe, generator, special)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        report(step + 1, losses[-1])
    return student, losses


@dataclass(frozen=True)
class Canvases:
    """Prompts of one length, each followed by its answer: `tokens[batch, start + canvas]`.
    `lengths[batch]` are the lengths of the answers, including the first EOS."""

    tokens: torch.Tensor
    start: int
    lengths: torch.Tensor


def _canvases(
    teacher: Teacher[Student],
    answering: LLM | None,
    recipe: DistillationRecipe,
    step: int,
) -> list[Canvases]:
    """The examples of a step, with reference answers (cd4lm, duo), those of `answering`, or those
    that the teacher gives with one token per pass."""
    texts = sample_texts(Random(f"{recipe.seed}/{recipe.method}/{step}"), recipe.batch)
    eos = teacher.special.eos
    groups: dict[int, list[list[int]]] = {}
    for question, reference in texts:
        prompt = teacher.tokenizer.encode(question)
        answer = teacher.tokenizer.encode(reference, special=False)
        groups.setdefault(len(prompt), []).append(prompt + answer)
    shape, canvases = teacher.model.shape, []
    for start, rows in sorted(groups.items()):
        end = start + recipe.canvas - shape.block_origin(start)
        canvas = recipe.canvas + -end % (shape.block_size or 1)  # to the end of a block
        prompts = [row[:start] for row in rows]
        if answering is not None:
            seed = recipe.seed + step * recipe.batch
            # The default decoder of these models predicts one token after the other.
            decoder = "wedlm" if shape.is_ordered else None
            given = canvas, DRAFTING.get(recipe.method, 0.0), seed, eos, decoder
            answers = target_answers(answering, prompts, *given)
            rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        elif recipe.method == "dparallel":
            assert isinstance(teacher.model, Transformer), "others answer in the engine"
            answers, _ = denoise(teacher.model, prompts, canvas, 1.1, teacher.special)
            rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = start + canvas
        padded = [(row + [eos] * width)[:width] for row in rows]
        tokens = torch.tensor(padded)
        ended = (tokens[:, start:] == eos).int()
        lengths = torch.where(ended.any(-1), ended.argmax(-1) + 1, canvas)
        canvases.append(Canvases(tokens, start, lengths))
    return canvases


def drafting(
    student: Transformer,
    canvases: list[Canvases],
    progress: float,
    recipe: DistillationRecipe,
    generator: torch.Generator,
) -> torch.Tensor:
    """The loss of `deer`, whose second stage is the second half of the training, or of
    `specdiff-2`."""
    total = torch.zeros(())
    for part in canvases:
        size = recipe.block
        if recipe.method == "deer" and progress >= 0.5:
            size = int(torch.randint(1, size + 1, (1,), generator=generator))
        draft = cut(part.tokens, part.start, part.lengths, size, generator)
        if recipe.method == "specdiff-2":
            loss = missed_streak(student, draft)
        elif progress < 0.5:
            loss = masked_continuation(student, draft, generator)
        else:
            loss = refined_continuation(student, draft)
        total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def dscd(
    student: Student,
    teacher: Student,
    canvases: list[Canvases],
    progress: float,
    recipe: DistillationRecipe,
    generator: torch.Generator,
    special: SpecialTokens = OWN_TOKENS,
) -> torch.Tensor:
    """The discrete-space consistency loss: KL divergence of the student from the teacher where both
    are masked, and cross-entropy with the reference on all tokens masked for the student."""
    teacher_weight = 0.9 if progress < 0.1 else _cosine(0.9, 0.5, (progress - 0.1) / 0.9)
    temperature, total = recipe.temperature, torch.zeros(())
    for part in canvases:
        student_mask, teacher_mask = nested_masks(part, generator)
        student_logits = masked_logits(
            student, part.tokens, student_mask, special, prompt=part.start
        )
        target = part.tokens[student_mask]
        cross_entropy = functional.cross_entropy(student_logits, target)
        with torch.no_grad():
            teacher_logits = masked_logits(
                teacher, part.tokens, teacher_mask, special, prompt=part.start
            )
        is_shared = teacher_mask[student_mask]
        distance = _divergence(
            teacher_logits / temperature, student_logits[is_shared] / temperature
        )
        loss = teacher_weight * temperature**2 * distance.clamp(max=5.0) + (
            1 - teacher_weight
        ) * cross_entropy.clamp(max=5.0)
        total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def nested_masks(part: Canvases, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The student's mask and the teacher's mask within it, over the answers of `part`.

    The student has 40 to 90 % of an answer masked, the teacher 30 to 70 % of that (10 to 60 % of
    the answer). Answers under 20 tokens have at most half masked; answers of up to 10 tokens have
    two tokens masked for the student and one for the teacher.
    """
    student_mask = torch.zeros(part.tokens.shape, dtype=torch.bool)
    teacher_mask = student_mask.clone()
    for row, length in enumerate(part.lengths.tolist()):
        draw = torch.rand(2, generator=generator).tolist()
        student_rate = 0.4 + 0.5 * draw[0]
        teacher_rate = min(max(student_rate * (0.3 + 0.4 * draw[1]), 0.1), 0.6)
        if length < 20:
            student_rate, teacher_rate = min(student_rate, 0.5), min(teacher_rate, 0.4)
        num_student = min(length, max(2, math.ceil(0.1 * length), round(student_rate * length)))
        num_teacher = max(1, min(num_student - 1, round(teacher_rate * length)))
        if length <= 10:
            num_student, num_teacher = min(length, 2), 1
        positions = part.start + torch.randperm(length, generator=generator)[:num_student]
        student_mask[row, positions] = True
        teacher_mask[row, positions[:num_teacher]] = True
    return student_mask, teacher_mask


def closer(
    student: Student,
    earlier: Student,
    canvases: list[Canvases],
    current_round: int,
    generator: torch.Generator,
    special: SpecialTokens = OWN_TOKENS,
) -> torch.Tensor:
    """The loss of `duo`; `earlier` is the student at the start of the round."""
    total, apart = torch.zeros(()), distance(current_round)
    for part in canvases:
        if isinstance(student, NetworkModel) and isinstance(earlier, NetworkModel):
            noised = part.tokens, part.start, apart, generator, special
            loss = noised_consistency(student, earlier, *noised)
        else:
            given = part.tokens, part.start, student.shape.vocab, apart, generator, special
            loss = consistency(student, earlier, *given)
        total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def certainty(
    student: Student,
    canvases: list[Canvases],
    recipe: DistillationRecipe,
    generator: torch.Generator,
    special: SpecialTokens = OWN_TOKENS,
) -> torch.Tensor:
    """Certainty-forcing: cross-entropy with the model's own answer on each half of a block, and the
    entropy (at temperature 0.5) where the prediction is right."""
    total = torch.zeros(())
    for part in canvases:
        shape = student.shape
        from_start = shape.block_size is not None and not shape.starts_at_prompt_end
        for masked, learned in block_halves(part, recipe.block, generator, from_start=from_start):
            logits = masked_logits(student, part.tokens, masked, special, learned, part.start)
            target = part.tokens[learned]
            loss = functional.cross_entropy(logits, target)
            is_right = logits.argmax(-1) == target
            if is_right.any():
                loss = loss + recipe.certainty * _entropy(logits[is_right] / 0.5).mean()
            total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def block_halves(
    part: Canvases, block: int, generator: torch.Generator, *, from_start: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two masks, each with the positions that it is trained on: one half of a random block of every
    answer. All positions after the block are masked; all before it are visible.

    Blocks are counted from the first position of the answers, or of the texts (`from_start`), as
    the blocks of a model are: the first block then has what remains behind the prompt.
    """
    count, width = part.tokens.shape
    offset = part.start % block if from_start else 0
    positions = torch.arange(width) - part.start + offset
    blocks = (part.lengths + offset + block - 1) // block
    block_index = (torch.rand(count, generator=generator) * blocks).long()[:, None]
    is_inside = (positions // block == block_index) & (positions >= offset)
    is_after = positions >= (block_index + 1) * block
    order = torch.rand(count, width, generator=generator).masked_fill(~is_inside, 2.0)
    rank = order.argsort(-1).argsort(-1)
    first = is_inside & (rank < (is_inside.sum(-1, keepdim=True) + 1) // 2)
    second = is_inside & ~first
    return [(half | is_after, half) for half in (first, second) if half.any()]


def _divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) of rows of logits in which the same tokens are impossible."""
    probabilities = teacher.softmax(-1)
    difference = teacher.log_softmax(-1) - student.log_softmax(-1)
    return (probabilities * difference.nan_to_num(0.0)).sum(-1).mean()


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probabilities = logits.log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities.clamp(min=-1e4)).sum(-1)


def _cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * done))
