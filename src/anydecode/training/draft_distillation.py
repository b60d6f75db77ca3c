"""Training of a diffusion model to draft for an autoregressive target, on answers that the target
generates.

`deer` (Cheng et al., DEER, arXiv:2512.15176) continues answers that are cut at a random position:
first with some of the continuation's tokens masked, as a diffusion model is trained, then with all
of the last ones masked, where those next to the text have the largest weights. `specdiff-2`
(SpecDiff-2, arXiv:2511.00606) maximises the expected number of accepted tokens of a draft (streak
distillation). A draft is `block` masks behind a text, as the decoders of these names fill them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.training.generated import run_requests
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import EOS_ID, MASK_ID
from anydecode.training.transformer import Transformer

#: The weight of a masked token is this, to the power of the number of masked tokens behind it.
ALPHA = 1.01
#: Least share of tokens that the first stage of DEER masks; its loss is divided by the share.
MIN_SHARE = 0.1


def target_answers(
    target: LLM,
    prompts: Sequence[list[int]],
    length: int,
    temperature: float,
    seed: int,
    eos: int = EOS_ID,
    decoder: str | None = None,
) -> list[list[int]]:
    """The target's answers to prompts, each of `length` tokens: `eos` follows its end. `decoder`:
    the default is that of the model."""
    options: dict[str, Any] = {"max_tokens": length, "temperature": temperature, "decoder": decoder}
    requests = [
        target.request(prompt, seed=seed + number, **options)
        for number, prompt in enumerate(prompts)
    ]
    answers = [one.tokens for one in run_requests(target, requests)]
    return [(answer + [eos] * length)[:length] for answer in answers]


def check_target(target: LLM, student: Transformer) -> None:
    """Raise InvalidRequestError for a target with another vocabulary than the student's."""
    size = target.model.spec.vocab_size
    if size != student.shape.vocab:
        raise InvalidRequestError(
            f"{target.model.name} has {size} tokens, the diffusion model {student.shape.vocab};"
            " a draft model needs the vocabulary of its target"
        )


@dataclass(frozen=True)
class Draft:
    """Texts that are cut at one position of their answers, and what follows: `tokens[batch, cut +
    size]`. `counts[batch]` are the first ones of the last `size` tokens that belong to the answer,
    including its EOS; the rest is padding and has no loss."""

    tokens: torch.Tensor
    size: int
    counts: torch.Tensor

    @property
    def drafted(self) -> torch.Tensor:
        """The last `size` tokens, `[batch, cut + size]`."""
        drafted = torch.zeros(self.tokens.shape, dtype=torch.bool)
        drafted[:, -self.size :] = True
        return drafted

    @property
    def counted(self) -> torch.Tensor:
        """Those of the last `size` tokens that belong to the answer, `[batch, size]`."""
        return torch.arange(self.size) < self.counts[:, None]


def cut(
    tokens: torch.Tensor,
    start: int,
    lengths: torch.Tensor,
    size: int,
    generator: torch.Generator,
) -> Draft:
    """The draft of `size` tokens at a random position of the answers.

    Args:
        tokens: Prompts of one length with their padded answers, `[batch, length]`.
        start: The prompts' length.
        lengths: Tokens of each answer, including its EOS, `[batch]`; the position is within the
            longest one.
        size: See above.
        generator: For the position.
    """
    last = min(start + int(lengths.max()) - 1, tokens.shape[1] - size)
    position = int(torch.randint(start, last + 1, (1,), generator=generator))
    counts = (start + lengths - position).clamp(0, size)
    return Draft(tokens[:, : position + size], size, counts)


def masked_continuation(
    student: Transformer, draft: Draft, generator: torch.Generator
) -> torch.Tensor:
    """The loss of DEER's first stage: the cross-entropy of masked ones of the drafted tokens,
    divided by the share that is masked, per token."""
    count = len(draft.tokens)
    shares = MIN_SHARE + (1 - MIN_SHARE) * torch.rand(count, 1, generator=generator)
    masked = draft.drafted
    masked[:, -draft.size :] = torch.rand(count, draft.size, generator=generator) < shares
    losses = _losses(student, draft.tokens, masked)
    shares = shares.expand(count, draft.size)[masked[:, -draft.size :]]
    counted = draft.counted[masked[:, -draft.size :]]
    return (losses / shares * counted).sum() / draft.counted.sum()


def refined_continuation(student: Transformer, draft: Draft) -> torch.Tensor:
    """The loss of DEER's second stage: the cross-entropy of the drafted tokens, all masked. The
    weight of each is `ALPHA` to the power of the number of tokens behind it."""
    losses = _losses(student, draft.tokens, draft.drafted).view(-1, draft.size)
    weights = ALPHA ** torch.arange(draft.size - 1, -1, -1, dtype=torch.float32) * draft.counted
    return (losses * weights).sum() / weights.sum()


def missed_streak(student: Transformer, draft: Draft) -> torch.Tensor:
    """The loss of SpecDiff-2: minus the expected number of accepted tokens, the sum over m of the
    product of the probabilities of the first m drafted tokens, all masked; per token."""
    losses = _losses(student, draft.tokens, draft.drafted).view(-1, draft.size)
    streaks = (-losses.cumsum(-1)).exp() * draft.counted
    return -streaks.sum() / draft.counted.sum()


def _losses(student: Transformer, part: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each masked token, in order."""
    logits = without_mask(student(part.masked_fill(masked, MASK_ID), output_rows=masked))
    return functional.cross_entropy(logits, part[masked], reduction="none")
