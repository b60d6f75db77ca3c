"""What a model is trained on: its own answers, and texts padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.tokenizer import Tokenizer
from anydecode.training.block_adapter import Pair, task_pair
from anydecode.training.generated import generate_prompts, rendered_prompt, run_requests


def prompts_to_answer(llm: LLM, count: int, seed: int, has_long: bool = False) -> list[list[int]]:
    """Up to `count` prompts, which the model writes if it has a chat template (see
    `generate_prompts`); otherwise they are those of this package's tasks."""
    if llm.tokenizer.chat_template is not None:
        return generate_prompts(llm, count, seed, has_long)
    return task_prompts(llm.tokenizer, count, seed)


def task_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of this package's tasks."""
    random = Random(f"{seed}/prompts")
    return [task_pair(tokenizer, random)[0] for _ in range(count)]


def own_answers(
    checkpoint: Checkpoint,
    count: int,
    tokens: int,
    seed: int,
    texts: Sequence[str] = (),
    temperature: float = 0.0,
) -> list[Pair]:
    """Up to `count` prompts with the model's answers of up to `tokens` tokens, by default its
    greedy ones. Without `texts`, user turns, the model writes the prompts if it has a chat
    template; otherwise they are those of this package's tasks."""
    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        if texts:
            prompts = [rendered_prompt(llm.tokenizer, text) for text in texts[:count]]
        else:
            prompts = prompts_to_answer(llm, count, seed)
        requests = [
            llm.request(one, max_tokens=tokens, temperature=temperature, seed=seed + number)
            for number, one in enumerate(prompts)
        ]
        answers = [one.tokens for one in run_requests(llm, requests)]
    pairs = [(p, answer) for p, answer in zip(prompts, answers, strict=True) if answer]
    if not pairs:
        raise InvalidRequestError(f"{checkpoint.name} writes no answers to learn from")
    return pairs


def answers_to_learn_from(
    checkpoint: Checkpoint, count: int, tokens: int, seed: int, temperature: float = 0.0
) -> list[Pair]:
    """See `own_answers`. Raises `InvalidRequestError` if there are fewer than two: one is held
    out."""
    pairs = own_answers(checkpoint, count, tokens, seed, temperature=temperature)
    if len(pairs) < 2:
        raise InvalidRequestError(
            f"{checkpoint.name} has written {len(pairs)} of {count} answers, and training needs 2:"
            " give more answers"
        )
    return pairs


def padded(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts padded to one length, and whether each token belongs to an answer: `[batch, length]`
    each."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), length, dtype=torch.long)
    is_answer = torch.zeros(len(pairs), length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) : end] = True
    return tokens, is_answer
