"""A low-rank adapter with which a model of the Llama family predicts numbers, for the decoder
`regression`.

The first steps minimise the cross-entropy of the digits of known numbers (Song and Bahri,
"Decoding-based Regression", arXiv:2501.19383). The steps after them, if there are any, maximise the
negative squared error of sampled numbers against that of the most probable digits, ReMax, as in
"Beyond Token-level Supervision" (arXiv:2512.06533). Its expert term teaches the best digit behind
every beginning that was sampled; its terms of divergence and entropy are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional

from anydecode.decoders.framework.numeric_codes import NormalizedCode
from anydecode.decoders.search.regression import Regression, symbol_tokens
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import add_low_rank, open_llama, save_adapter

#: The share of the pairs that are not trained on.
HELD_OUT = 0.1


@dataclass(frozen=True)
class NumberRecipe:
    """How the adapter is trained.

    Attributes:
        steps: Steps on known digits.
        reward_steps: Steps on the errors of sampled numbers, after those.
        samples: How many numbers are sampled for each input in such a step.
        rank: The rank of the adapter.
        batch: Inputs per step.
        rate: Learning rate of the steps on known digits.
        reward_rate: Learning rate of the steps after them.
        expert: The weight of the expert term in such a step (the paper's is 0.05).
        seed: Of the weights, of the order of the pairs, and of the sampled numbers.
    """

    steps: int = 200
    reward_steps: int = 0
    samples: int = 8
    rank: int = 16
    batch: int = 16
    rate: float = 1e-3
    reward_rate: float = 1e-4
    expert: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.samples, self.rank, self.batch, self.steps + self.reward_steps)
        if min(counts) < 1 or min(self.steps, self.reward_steps) < 0:
            raise InvalidRequestError(
                "steps and reward_steps must be 0 or more and not both 0; samples, rank and batch"
                " must be 1 or more"
            )
        if self.expert < 0:
            raise InvalidRequestError(f"expert must be 0 or more, not {self.expert}")


@dataclass(frozen=True)
class NumberErrors:
    """Mean absolute errors of the most probable digits, on pairs that are not trained on.

    Attributes:
        before: Without the adapter.
        supervised: After the steps on known digits.
        rewarded: After all steps.
    """

    before: float
    supervised: float
    rewarded: float


@dataclass(frozen=True)
class Example:
    """An input and its number.

    Attributes:
        prompt: The tokens of the input.
        digits: The code of the number.
        value: The number, as a share of the range of `Regression`.
    """

    prompt: list[int]
    digits: tuple[int, ...]
    value: float


class DigitModel:
    """Probabilities of the digits of codes after prompts.

    Args:
        model: A causal model.
        decoder: The decoder that will use it.
        tokens: The tokens of the symbols of every position.
    """

    def __init__(
        self, model: Callable[..., torch.Tensor], decoder: Regression, tokens: list[list[int]]
    ) -> None:
        self.model, self.decoder = model, decoder
        self.tokens = [torch.tensor(row) for row in tokens]

    def logits(self, prompts: Sequence[list[int]], digits: torch.Tensor) -> torch.Tensor:
        """The logits over all tokens at every digit, and at the one after them.

        Args:
            prompts: One per code.
            digits: int64 `[codes, length]`: the beginnings of codes.

        Returns:
            `[codes, length + 1, vocab]`.
        """
        count, length = digits.shape
        rows = torch.zeros(count, max(map(len, prompts)) + length, dtype=torch.long)
        columns = torch.tensor([len(prompt) - 1 for prompt in prompts])[:, None]
        columns = columns + torch.arange(length + 1)
        for row, prompt in enumerate(prompts):
            rows[row, : len(prompt)] = torch.tensor(prompt)
        for place in range(length):
            rows[torch.arange(count), columns[:, place + 1]] = self.tokens[place][digits[:, place]]
        index = torch.arange(count)[:, None].expand_as(columns)
        return self.model(rows, causal=True, output_rows=(index, columns))

    def cross_entropy(self, examples: Sequence[Example]) -> torch.Tensor:
        """The mean loss of the digits of known numbers, over the whole vocabulary."""
        digits = torch.tensor([one.digits for one in examples])
        logits = self.logits([one.prompt for one in examples], digits[:, :-1])
        targets = [row[digits[:, place]] for place, row in enumerate(self.tokens)]
        return functional.cross_entropy(logits.flatten(0, 1), torch.stack(targets, 1).flatten())

    def log_probabilities(self, prompts: Sequence[list[int]], digits: torch.Tensor) -> torch.Tensor:
        """The log-probability of every code `[codes]`, in which each position has only the
        symbols of the code."""
        return _sum_of(self.digit_laws(prompts, digits), digits)

    def digit_laws(self, prompts: Sequence[list[int]], digits: torch.Tensor) -> list[torch.Tensor]:
        """The log-probabilities of the symbols of every position behind the beginnings of codes,
        `[codes, symbols]` each."""
        logits = self.logits(prompts, digits[:, :-1])
        return [logits[:, place, row].log_softmax(-1) for place, row in enumerate(self.tokens)]

    @torch.no_grad()
    def codes(
        self, prompts: Sequence[list[int]], generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """One code per prompt, int64 `[prompts, digits]`: sampled, or without a generator that of
        the most probable digits."""
        digits = torch.zeros(len(prompts), 0, dtype=torch.long)
        for row in self.tokens:
            law = self.logits(prompts, digits)[:, -1, row].softmax(-1)
            new = law.argmax(-1, keepdim=True)
            if generator is not None:
                new = torch.multinomial(law, 1, generator=generator)
            digits = torch.cat([digits, new], 1)
        return digits

    def values(self, digits: torch.Tensor) -> torch.Tensor:
        """The numbers of codes, as shares of the range, `[codes]`."""
        decode = self.decoder.code.decode
        return torch.tensor([float(decode(row)) for row in digits.tolist()])

    def reward_loss(
        self,
        examples: Sequence[Example],
        samples: int,
        generator: torch.Generator,
        expert: float = 0.0,
    ) -> torch.Tensor:
        """ReMax: the mean over sampled numbers of the negative log-probability, times how much
        smaller the squared error is than that of the most probable digits. Plus `expert` times the
        mean cross-entropy of the best digits behind the sampled beginnings (`best_digits`)."""
        prompts = [one.prompt for one in examples]
        known = torch.tensor([one.value for one in examples])
        baseline = -((self.values(self.codes(prompts)) - known) ** 2)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        digits = self.codes(repeated, generator)
        rewards = -((self.values(digits) - known.repeat_interleave(samples)) ** 2)
        advantages = rewards - baseline.repeat_interleave(samples)
        laws = self.digit_laws(repeated, digits)
        loss = -(_sum_of(laws, digits) * advantages).mean()
        if expert:
            true = torch.tensor([one.digits for one in examples]).repeat_interleave(samples, 0)
            sizes = [len(row) for row in self.tokens]
            best = best_digits(digits, true, sizes)
            loss = loss - expert * _sum_of(laws, best).mean() / len(laws)
        return loss

    def error(self, examples: Sequence[Example]) -> float:
        """The mean absolute error of the most probable digits, in the units of the numbers."""
        found = self.values(self.codes([one.prompt for one in examples]))
        known = torch.tensor([one.value for one in examples])
        return float((found - known).abs().mean()) * float(self.decoder.scale)


def best_digits(digits: torch.Tensor, true: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The digits that bring codes nearest to the true ones, each behind the digits before it: the
    true digit while these are the true ones, the largest one behind a smaller beginning, and the
    smallest one behind a larger.

    Args:
        digits: int64 `[codes, length]`, the most significant digit first.
        true: The true codes, of the same shape.
        sizes: The number of symbols of every position.

    Returns:
        int64 `[codes, length]`.
    """
    best = true.clone()
    sign = torch.zeros(len(digits), dtype=torch.long)  # of the beginning less the true one
    for place, size in enumerate(sizes):
        best[sign > 0, place] = 0
        best[sign < 0, place] = size - 1
        change = (digits[:, place] - true[:, place]).sign()
        sign = torch.where(sign == 0, change, sign)
    return best


def _sum_of(laws: Sequence[torch.Tensor], digits: torch.Tensor) -> torch.Tensor:
    """The sums of the log-probabilities of `digits`, `[codes]`."""
    parts = [law.gather(1, digits[:, i, None])[:, 0] for i, law in enumerate(laws)]
    return torch.stack(parts).sum(0)


def train_numbers(
    checkpoint: Checkpoint,
    pairs: Sequence[tuple[str, float]],
    decoder: Regression,
    out: Path,
    recipe: NumberRecipe,
    report: Callable[[int, float], None] = lambda step, loss: None,
    base: str | None = None,
) -> NumberErrors:
    """Train an adapter and write it to the folder `out`, in PEFT's layout.

    Args:
        checkpoint: A model of the Llama family.
        pairs: Inputs and their numbers.
        decoder: The decoder that will use the adapter: the format and the range of the numbers.
        out: The folder.
        recipe: How it is trained.
        report: Called with the number of finished steps and the loss.
        base: The name of the model that is written beside the adapter. Default: its path.
    """
    if checkpoint.tokenizer is None:
        raise CheckpointError(f"{checkpoint.name}: training needs a tokenizer")
    if recipe.expert and type(decoder.code) is not NormalizedCode:
        raise InvalidRequestError(
            "expert needs the format normalized without repeat: in others a smaller digit is not"
            " a smaller number"
        )
    torch.manual_seed(recipe.seed)
    model = open_llama(checkpoint)
    limit = model.shape.max_positions
    examples = _examples(pairs, decoder, checkpoint.tokenizer.encode, limit)
    Random(recipe.seed).shuffle(examples)
    count = max(1, round(HELD_OUT * len(examples)))
    held_out, rest = examples[:count], examples[count:]
    numbers = DigitModel(model, decoder, symbol_tokens(decoder.code, checkpoint.tokenizer))
    errors = [numbers.error(held_out)]
    trainable = add_low_rank(model, recipe.rank)
    generator = torch.Generator().manual_seed(recipe.seed)

    def supervised(batch: list[Example]) -> torch.Tensor:
        return numbers.cross_entropy(batch)

    def rewarded(batch: list[Example]) -> torch.Tensor:
        return numbers.reward_loss(batch, recipe.samples, generator, recipe.expert)

    done = 0
    for loss_of, steps, rate in (
        (supervised, recipe.steps, recipe.rate),
        (rewarded, recipe.reward_steps, recipe.reward_rate),
    ):
        optimizer = torch.optim.AdamW(trainable, rate, (0.9, 0.98), weight_decay=0.01)
        for _ in range(steps):
            batch = [rest[(done * recipe.batch + i) % len(rest)] for i in range(recipe.batch)]
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            done += 1
            report(done, float(loss.detach()))
        errors.append(numbers.error(held_out))
    save_adapter(out, model, recipe.rank, base or str(checkpoint.path))
    return NumberErrors(*errors)


def _examples(
    pairs: Sequence[tuple[str, float]],
    decoder: Regression,
    encode: Callable[[str], list[int]],
    limit: int,
) -> list[Example]:
    length = len(decoder.code.alphabets)
    examples = []
    for text, number in pairs:
        prompt = encode(text)
        if not prompt or len(prompt) + length > limit:
            raise InvalidRequestError(
                f"an input has {len(prompt)} tokens; it may have 1 to {limit - length}"
            )
        value = (Fraction(number) - decoder.origin) / decoder.scale
        examples.append(Example(prompt, decoder.code.encode(value), float(value)))
    if len(examples) < 2:
        raise InvalidRequestError(f"training needs at least 2 pairs, not {len(examples)}")
    return examples
