"""Batches of task examples: a prompt, its answer, and EOS padding up to a common length.

The padding is part of the answer, as in LLaDA, so that an answer shorter than its canvas ends
itself. The amount of padding varies, so that the model does not learn one fixed length.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import tokenizers
import torch

from anydecode.tasks.tasks import TASKS, Example, lengths, make_example
from anydecode.training.tokenizer import EOS_ID

#: Loss weight of an EOS after the first one; the first one has weight 1.
PADDING_WEIGHT = 0.1
_PADDING_LENGTHS = (1, 1, 1, 1, 4, 8, 24)
#: Relative sampling weights of the tasks, default 1: some are learned more slowly.
_TASK_WEIGHTS = {
    "shuffle": 6,
    "sort": 4,
    "replace-random": 4,
    "cumulative-sum": 4,
    "latin": 4,
    "arithmetic": 3,
    "insert-random": 2,
    "chain": 2,
}


@dataclass
class Batch:
    """`tokens[batch, length]`, and `weights` of the same shape: 0 in the prompt, 1 in the answer
    and at its first EOS, `PADDING_WEIGHT` after it."""

    tokens: torch.Tensor
    weights: torch.Tensor


def batches(
    tokenizer: tokenizers.Tokenizer, size: int, seed: int, step: int, parts: int = 3
) -> list[Batch]:
    """The examples of one optimiser step: `size` of them over all tasks, sorted by length into
    `parts` batches, so that there is little padding. They depend only on `seed` and `step`."""
    random = Random(f"{seed}/{step}")
    pairs = sample_pairs(tokenizer, random, size)
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    part_size = -(-len(pairs) // parts)
    return [
        _padded(pairs[start : start + part_size], random.choice(_PADDING_LENGTHS))
        for start in range(0, len(pairs), part_size)
    ]


def sample_pairs(
    tokenizer: tokenizers.Tokenizer, random: Random, size: int
) -> list[tuple[list[int], list[int]]]:
    """Sample `size` training examples by task weight: prompt and answer as tokens."""
    return [
        (tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids)
        for prompt, answer in sample_texts(random, size)
    ]


def sample_texts(random: Random, size: int) -> list[tuple[str, str]]:
    """Sample `size` training examples by task weight: prompt and answer."""
    return [(example.prompt, example.answer) for example in sample_examples(random, size)]


def sample_examples(random: Random, size: int) -> list[Example]:
    """Sample `size` training examples by task weight."""
    names = [task for task in TASKS for _ in range(_TASK_WEIGHTS.get(task, 1))]
    found: list[Example] = []
    while len(found) < size:
        task = random.choice(names)
        example = make_example(task, random.choice(lengths(task)), random)
        if not example.is_held_out:
            found.append(example)
    return found


def _padded(pairs: list[tuple[list[int], list[int]]], tail: int) -> Batch:
    length = max(len(prompt) + len(answer) for prompt, answer in pairs) + tail
    tokens = torch.full((len(pairs), length), EOS_ID)
    weights = torch.full((len(pairs), length), PADDING_WEIGHT)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        weights[row, : len(prompt)] = 0.0
        weights[row, len(prompt) : end + 1] = 1.0
    return Batch(tokens, weights)
