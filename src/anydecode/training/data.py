"""Batches of task examples: a prompt, its answer, and EOS up to a common length.

The padding is part of the answer, as LLaDA trains it, so that an answer shorter than its canvas
ends itself; how much of it there is varies, or the model would learn one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import tokenizers
import torch

from anydecode.evaluation.parallelbench.tasks import TASKS, lengths, make_example
from anydecode.training.tokenizer import EOS_ID

#: How much an EOS behind the first one counts; the first one counts as any token.
PADDING_WEIGHT = 0.1
_TAILS = (1, 1, 1, 1, 4, 8, 24)
#: How often a task comes compared with the others: some are learned more slowly.
_SHARES = {
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
    """`tokens[batch, length]`; `weights`, of the same shape: 0 in the prompt, 1 in the answer and
    at its first EOS, `PADDING_WEIGHT` behind."""

    tokens: torch.Tensor
    weights: torch.Tensor


def batches(
    tokenizer: tokenizers.Tokenizer, size: int, seed: int, step: int, parts: int = 3
) -> list[Batch]:
    """The examples of one optimiser step: `size` of them over all tasks, sorted by length into
    `parts` batches, so that little is padding. A step's examples depend on `seed` and `step` only.
    """
    random = Random(f"{seed}/{step}")
    pairs = drawn(tokenizer, random, size)
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    share = -(-len(pairs) // parts)
    return [
        _padded(pairs[start : start + share], random.choice(_TAILS))
        for start in range(0, len(pairs), share)
    ]


def drawn(
    tokenizer: tokenizers.Tokenizer, random: Random, size: int
) -> list[tuple[list[int], list[int]]]:
    """`size` training examples over all tasks alike: prompt and answer as tokens."""
    names = [task for task in TASKS for _ in range(_SHARES.get(task, 1))]
    pairs: list[tuple[list[int], list[int]]] = []
    while len(pairs) < size:
        task = random.choice(names)
        example = make_example(task, random.choice(lengths(task)), random)
        if not example.is_held_out:
            prompt, answer = example.prompt, example.answer
            pairs.append((tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids))
    return pairs


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
