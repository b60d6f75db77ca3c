"""Distillation of a diffusion model for fewer passes, from data that the package makes.

`dscd` (Liang et al., CD4LM, arXiv:2601.02236) teaches the student, which sees less, to agree with
the teacher, which sees more: of two nested masks the teacher has the smaller. `certainty` (Chen et
al., dParallel, arXiv:2509.26488) makes the model certain of what it already has right, on its own
answers. Both change all weights instead of a low-rank adapter; at this size nothing else is needed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tokenizers
import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.training import checkpoint
from anydecode.training.data import drawn
from anydecode.training.denoising import denoise
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import EOS_ID, MASK_ID
from anydecode.training.transformer import Transformer

METHODS = ("cd4lm", "dparallel")


@dataclass(frozen=True)
class Plan:
    """How a distillation runs; the other constants are the papers'."""

    method: str
    steps: int = 200
    batch: int = 32
    rate: float = 1e-4
    canvas: int = 32
    block: int = 8
    seed: int = 0
    temperature: float = 2.0  # cd4lm
    certainty: float = 2.0  # dparallel: what the entropy weighs

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidRequestError(f"no distillation {self.method!r}: {', '.join(METHODS)}")
        if self.steps < 1 or self.batch < 1 or not 1 <= self.block <= self.canvas:
            raise InvalidRequestError("distillation takes steps, and a block within the canvas")


def distil(
    folder: Path, out: Path, plan: Plan, report: Callable[[int, float], None] = lambda *_: None
) -> list[float]:
    """Distil the checkpoint in `folder` into `out`; returns the losses. `report(step, loss)`."""
    teacher, tokenizer = checkpoint.load_llada(folder)
    student = copy.deepcopy(teacher).train()
    optimizer = torch.optim.AdamW(student.parameters(), plan.rate, (0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(plan.seed)
    losses = []
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * 0.5 * (1 + math.cos(math.pi * step / plan.steps))
        canvases = _canvases(teacher, tokenizer, plan, step)
        if plan.method == "cd4lm":
            loss = dscd(student, teacher, canvases, step / plan.steps, plan, generator)
        else:
            loss = certainty(student, canvases, plan, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        report(step + 1, losses[-1])
    checkpoint.save_llada(out, student.state_dict(), student.shape, tokenizer)
    return losses


@dataclass(frozen=True)
class Canvases:
    """Prompts of one length, each with its answer behind: `tokens[batch, start + canvas]`;
    `lengths[batch]` are those of the answers, first EOS included."""

    tokens: torch.Tensor
    start: int
    lengths: torch.Tensor


def _canvases(
    teacher: Transformer, tokenizer: tokenizers.Tokenizer, plan: Plan, step: int
) -> list[Canvases]:
    """A step's questions, with reference answers (cd4lm) or the model's own (dparallel)."""
    pairs = drawn(tokenizer, Random(f"{plan.seed}/{plan.method}/{step}"), plan.batch)
    groups: dict[int, list[list[int]]] = {}
    for prompt, answer in pairs:
        groups.setdefault(len(prompt), []).append(prompt + answer)
    found = []
    for start, rows in sorted(groups.items()):
        if plan.method == "dparallel":
            prompts = [row[:start] for row in rows]
            answers, _ = denoise(teacher, prompts, plan.canvas, 1.1)
            rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = start + plan.canvas
        padded = [(row + [EOS_ID] * width)[:width] for row in rows]
        tokens = torch.tensor(padded)
        ended = (tokens[:, start:] == EOS_ID).int()
        lengths = torch.where(ended.any(-1), ended.argmax(-1) + 1, plan.canvas)
        found.append(Canvases(tokens, start, lengths))
    return found


def dscd(
    student: Transformer,
    teacher: Transformer,
    canvases: list[Canvases],
    progress: float,
    plan: Plan,
    generator: torch.Generator,
) -> torch.Tensor:
    """The discrete-space consistency loss: KL of the student from the teacher where both have
    masks, cross entropy with the reference on all that the student has masked."""
    share = 0.9 if progress < 0.1 else _cosine(0.9, 0.5, (progress - 0.1) / 0.9)
    heat, total = plan.temperature, torch.zeros(())
    for part in canvases:
        wide, narrow = nested_masks(part, generator)
        guess = without_mask(student(part.tokens.masked_fill(wide, MASK_ID), chosen=wide))
        target = part.tokens[wide]
        entropy = functional.cross_entropy(guess, target)
        with torch.no_grad():
            known = without_mask(teacher(part.tokens.masked_fill(narrow, MASK_ID), chosen=narrow))
        both = narrow[wide]
        distance = _divergence(known / heat, guess[both] / heat)
        loss = share * heat**2 * distance.clamp(max=5.0) + (1 - share) * entropy.clamp(max=5.0)
        total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def nested_masks(part: Canvases, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The student's mask and the teacher's within it, over the answers of `part`. The student has
    40 to 90 % of an answer masked, the teacher 30 to 70 % of that (of the whole, 10 to 60 %);
    answers under 20 tokens at most half, and of up to 10 tokens the two have two and one."""
    wide = torch.zeros(part.tokens.shape, dtype=torch.bool)
    narrow = wide.clone()
    for row, length in enumerate(part.lengths.tolist()):
        draw = torch.rand(2, generator=generator).tolist()
        student = 0.4 + 0.5 * draw[0]
        teacher = min(max(student * (0.3 + 0.4 * draw[1]), 0.1), 0.6)
        if length < 20:
            student, teacher = min(student, 0.5), min(teacher, 0.4)
        most = min(length, max(2, math.ceil(0.1 * length), round(student * length)))
        least = max(1, min(most - 1, round(teacher * length)))
        if length <= 10:
            most, least = min(length, 2), 1
        positions = part.start + torch.randperm(length, generator=generator)[:most]
        wide[row, positions] = True
        narrow[row, positions[:least]] = True
    return wide, narrow


def certainty(
    student: Transformer, canvases: list[Canvases], plan: Plan, generator: torch.Generator
) -> torch.Tensor:
    """Certainty-forcing: cross entropy with the model's own answer on half of a block and on the
    other half, and the entropy (at temperature 0.5) where the guess is right."""
    total = torch.zeros(())
    for part in canvases:
        for masked, counted in block_halves(part, plan.block, generator):
            logits = without_mask(student(part.tokens.masked_fill(masked, MASK_ID), chosen=counted))
            target = part.tokens[counted]
            loss = functional.cross_entropy(logits, target)
            right = logits.argmax(-1) == target
            if right.any():
                loss = loss + plan.certainty * _entropy(logits[right] / 0.5).mean()
            total = total + loss * len(part.tokens)
    return total / sum(len(part.tokens) for part in canvases)


def block_halves(
    part: Canvases, block: int, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two masks, and what of each is learned from: a block of every answer (its own), half of it
    masked, the other half in the second; all behind it masked, all before it known."""
    count, width = part.tokens.shape
    positions = torch.arange(width) - part.start
    blocks = (part.lengths + block - 1) // block
    chosen = (torch.rand(count, generator=generator) * blocks).long()[:, None]
    inside = (positions // block == chosen) & (positions >= 0)
    behind = positions >= (chosen + 1) * block
    order = torch.rand(count, width, generator=generator).masked_fill(~inside, 2.0)
    rank = order.argsort(-1).argsort(-1)
    first = inside & (rank < (inside.sum(-1, keepdim=True) + 1) // 2)
    second = inside & ~first
    return [(half | behind, half) for half in (first, second) if half.any()]


def _divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) of rows of logits in which the same tokens are impossible."""
    known = teacher.softmax(-1)
    gap = teacher.log_softmax(-1) - student.log_softmax(-1)
    return (known * gap.nan_to_num(0.0)).sum(-1).mean()


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    shares = logits.log_softmax(-1)
    return -(shares.exp() * shares.clamp(min=-1e4)).sum(-1)


def _cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * done))
