"""A low-rank adapter with which a model of the Llama family predicts numbers, for the decoder
`regression`.

The first steps minimise the cross-entropy of the digits of known numbers (Song and Bahri,
"Decoding-based Regression", arXiv:2501.19383). The steps after them, if there are any, maximise the
negative squared error of sampled numbers, as in "Beyond Token-level Supervision"
(arXiv:2512.06533): compared with the error of the most probable digits (ReMax), or with those of
the other samples (GRPO, Shao et al., arXiv:2402.03300, with one update for each sample). Its expert
term teaches the best digit behind every beginning that was sampled, and its term of divergence
keeps the model near to what it was before these steps; its bonus for entropy is left out.
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
#: What the rewards of samples are compared with.
BASELINES = ("greedy", "group")
#: Added to the standard deviation of rewards.
_EPSILON = 1e-6

#: From prompts and codes to the log-probabilities of the symbols of every position; see
#: `DigitModel.digit_laws`.
Laws = Callable[[Sequence[list[int]], torch.Tensor], list[torch.Tensor]]


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
        baseline: What rewards are compared with: "greedy", that of the most probable digits
            (ReMax), or "group", the mean of those of the input's samples, whose difference is
            divided by their standard deviation (GRPO).
        divergence: The weight of the divergence from the model before these steps.
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
    baseline: str = "greedy"
    divergence: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.samples, self.rank, self.batch, self.steps + self.reward_steps)
        if min(counts) < 1 or min(self.steps, self.reward_steps) < 0:
            raise InvalidRequestError(
                "steps and reward_steps must be 0 or more and not both 0; samples, rank and batch"
                " must be 1 or more"
            )
        if min(self.expert, self.divergence) < 0:
            raise InvalidRequestError(
                "expert and divergence must be 0 or more, not"
                f" {self.expert:g} and {self.divergence:g}"
            )
        if self.baseline not in BASELINES:
            raise InvalidRequestError(
                f"baseline is {self.baseline!r}; choose from {', '.join(BASELINES)}"
            )
        if self.baseline == "group" and self.reward_steps and self.samples < 2:
            raise InvalidRequestError("baseline group needs samples of 2 or more")


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
        recipe: NumberRecipe,
        generator: torch.Generator,
        reference: Laws | None = None,
    ) -> torch.Tensor:
        """The mean over sampled numbers of the negative log-probability, times the advantage of the
        number: see `NumberRecipe`. Plus `recipe.expert` times the mean cross-entropy of the best
        digits behind the sampled beginnings (`best_digits`), and `recipe.divergence` times the mean
        divergence of the digits' probabilities from those of `reference`."""
        samples, prompts = recipe.samples, [one.prompt for one in examples]
        known = torch.tensor([one.value for one in examples])[:, None]
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        digits = self.codes(repeated, generator)
        rewards = -((self.values(digits).reshape(-1, samples) - known) ** 2)
        if recipe.baseline == "greedy":
            advantages = rewards + (self.values(self.codes(prompts))[:, None] - known) ** 2
        else:
            spread = rewards.std(1, correction=0, keepdim=True)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (spread + _EPSILON)
        laws = self.digit_laws(repeated, digits)
        loss = -(_sum_of(laws, digits) * advantages.flatten()).mean()
        if recipe.expert:
            true = torch.tensor([one.digits for one in examples]).repeat_interleave(samples, 0)
            sizes = [len(row) for row in self.tokens]
            best = best_digits(digits, true, sizes)
            loss = loss - recipe.expert * _sum_of(laws, best).mean() / len(laws)
        if reference is not None:
            with torch.no_grad():
                before = reference(repeated, digits)
            loss = loss + recipe.divergence * divergence(before, laws)
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


def divergence(before: Sequence[torch.Tensor], laws: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over codes and digits of KL(before, laws), as the authors' code computes it; both
    are log-probabilities `[codes, symbols]` of every position."""
    parts = [
        (old.exp() * (old - new)).sum(-1).mean() for old, new in zip(before, laws, strict=True)
    ]
    return torch.stack(parts).mean()


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

    before: list[torch.Tensor] = []  # the weights before the steps on errors

    def reference(prompts: Sequence[list[int]], digits: torch.Tensor) -> list[torch.Tensor]:
        now = [weight.data for weight in trainable]
        try:
            for weight, old in zip(trainable, before, strict=True):
                weight.data = old
            return numbers.digit_laws(prompts, digits)
        finally:
            for weight, own in zip(trainable, now, strict=True):
                weight.data = own

    def rewarded(batch: list[Example]) -> torch.Tensor:
        if recipe.divergence and not before:
            before.extend(weight.detach().clone() for weight in trainable)
        return numbers.reward_loss(
            batch, recipe, generator, reference if recipe.divergence else None
        )

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
