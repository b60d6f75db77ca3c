"""Discrete consistency distillation: trajectories and the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from anydecode.training import consistency
from anydecode.training.consistency import distance, trajectories
from anydecode.training.tokenizer import SpecialTokens

VOCAB, MASK = 9, 8
SPECIAL = SpecialTokens(mask=MASK, eos=1, barred=(MASK,))


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _share_kept(time: float, rivals: int) -> float:
    """The probability that the token of the text stays the largest, by an integral over its
    noise."""
    ratio = -4 + 3 * time
    strength = math.sqrt(1 / (1 + math.exp(ratio))) / math.sqrt(1 / (1 + math.exp(-ratio)))
    step, total = 1e-3, 0.0
    for number in range(-8000, 8000):
        z = number * step
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        others = 0.5 * (1 + math.erf((z + strength) / math.sqrt(2)))
        total += step * density * others**rivals
    return total


def test_each_time_has_its_share_of_noise() -> None:
    tokens = torch.arange(8).repeat(2000, 5)
    for time in (0.1, 0.5, 1.0):
        times = torch.full((len(tokens),), time)
        text, _ = trajectories(tokens, VOCAB, (times, times), _generator(), SPECIAL)
        kept = float((text == tokens).double().mean())
        assert kept == pytest.approx(_share_kept(time, 7), abs=0.01)
        assert abs(kept - _share_kept(1.1 - time, 7)) > 0.05 or time == 0.5
        assert not (text == MASK).any()
        # What is not kept is each of the other tokens alike.
        counts = torch.bincount(text[text != tokens], minlength=VOCAB)[:MASK].double()
        if time == 1.0:
            expected = counts.sum() / 8
            assert float(((counts - expected) ** 2 / expected).sum()) < 30.0


def _is_one_trajectory(tokens: Any, later: Any, earlier: Any) -> bool:
    """Whether positions are the text's own token, or the same noise at both times, and only become
    noise with time."""
    is_same = (earlier == tokens) | (earlier == later)
    return bool((is_same & ((later != tokens) | (earlier == tokens))).all())


def test_both_texts_are_of_one_trajectory() -> None:
    tokens = torch.randint(MASK, (50, 20), generator=_generator(1))
    later = torch.linspace(0.2, 1.0, 50)
    noisier, cleaner = trajectories(tokens, VOCAB, (later, later - 0.2), _generator(), SPECIAL)
    assert _is_one_trajectory(tokens, noisier, cleaner)
    assert (noisier != tokens).sum() > (cleaner != tokens).sum() > 0
    # Noise of its own for each time is no trajectory.
    other, _ = trajectories(tokens, VOCAB, (later - 0.2, later), _generator(7), SPECIAL)
    assert not _is_one_trajectory(tokens, noisier, other)


class _Table(nn.Module):
    """Logits of each token from a table; remembers what it read."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        table = torch.randn(VOCAB, VOCAB, generator=_generator(seed))
        self.table = nn.Parameter(table)
        self.read: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.read.append(tokens)
        return self.table[tokens]


def _by_hand(student: _Table, teacher: _Table, start: int, *, forward: bool) -> float:
    """The mean divergence from what both have read, token by token."""
    total, count = 0.0, 0
    for later, earlier in zip(student.read[0].tolist(), teacher.read[0].tolist(), strict=True):
        assert later[:start] == earlier[:start]
        for x, y in zip(later[start:], earlier[start:], strict=True):
            found, expected = (
                [math.exp(v) for v in model.table[token, :MASK].tolist()]
                for model, token in ((student, x), (teacher, y))
            )
            p = [value / sum(found) for value in found]
            q = [value / sum(expected) for value in expected]
            first, second = (q, p) if forward else (p, q)
            total += sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))
            count += 1
    return total / count


def test_the_loss_is_the_divergence_of_the_student_from_the_teacher() -> None:
    student, teacher = _Table(1), _Table(2)
    tokens = torch.randint(MASK, (6, 10), generator=_generator(3))
    given = tokens, 4, VOCAB, distance(4), _generator(5), SPECIAL
    loss = consistency.consistency(student, teacher, *given)
    assert float(loss.detach()) == pytest.approx(_by_hand(student, teacher, 4, forward=False), 1e-4)
    assert abs(float(loss.detach()) - _by_hand(student, teacher, 4, forward=True)) > 1e-2
    loss.backward()
    assert student.table.grad is not None and teacher.table.grad is None
    assert bool(torch.isfinite(student.table.grad).all())
    later, earlier = student.read[0][:, 4:], teacher.read[0][:, 4:]
    assert _is_one_trajectory(tokens[:, 4:], later, earlier)


def test_the_distance_doubles_with_each_round() -> None:
    assert [distance(number) for number in range(3)] == [1 / 512, 2 / 512, 4 / 512]
