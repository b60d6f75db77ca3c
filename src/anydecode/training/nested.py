"""Sorted fine-tuning: the first layers of a model become a draft model that predicts tokens after
each of several exits.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding For More Efficient Deployment of Nested Large
Language Models", arXiv:2407.01955; the loss is that of "Sorted LLaMA", arXiv:2309.08968. All exits
share the final norm and the head, which stays frozen as the embedding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.decoders.speculative.s2d import NestedDrafter
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair, open_llama, task_pair
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.generated import generate_prompts, rendered_prompt, run_requests
from anydecode.training.transformer import Transformer


@dataclass(frozen=True)
class NestedRecipe:
    """How sorted fine-tuning runs.

    Attributes:
        layers: Number of the model's first layers that the draft model has; 0: half of them.
        exits: Exits before the last layer, as fractions of these, rising.
        answers: Number of answers of the model to learn from, of up to `tokens` tokens.
    """

    layers: int = 0
    exits: tuple[float, ...] = (0.5, 0.75)
    answers: int = 256
    tokens: int = 64
    steps: int = 200
    batch: int = 4
    rate: float = 2e-4
    seed: int = 0


def train_nested(
    checkpoint: Checkpoint,
    out: Path,
    recipe: NestedRecipe,
    report: Callable[[int, float], None] = lambda *_: None,
) -> list[float]:
    """Train a draft model for `checkpoint` and write it to the folder `out`.

    Calls `report(step, loss)` after each step; returns the losses, per token and exit.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: The model has fewer layers, or the exits are out of order.
    """
    tokenizer = writable_tokenizer(checkpoint)
    model = first_layers(open_llama(checkpoint), recipe.layers)
    depth = model.shape.layers
    stops = [*NestedDrafter(recipe.exits, 0.0).layers(depth), depth]
    pairs = own_answers(checkpoint, recipe.answers, recipe.tokens, recipe.seed)
    trained = [*model.transformer["blocks"].parameters(), *model.transformer["ln_f"].parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, recipe.rate, (0.9, 0.95), weight_decay=0.0)
    random, losses = Random(f"{recipe.seed}/nested"), list[float]()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        tokens, is_answer = padded(random.sample(pairs, min(recipe.batch, len(pairs))))
        loss = sorted_loss(model, tokens, is_answer, stops)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        report(step + 1, losses[-1])
    save_nested_llama(out, model.state_dict(), model.shape, tokenizer)
    return losses


def first_layers(model: Transformer, layers: int) -> Transformer:
    """A model of the first `layers` layers of `model` (0: half of them), with the same weights."""
    depth = model.shape.layers
    layers = layers or (depth + 1) // 2
    if not 1 <= layers <= depth:
        raise InvalidRequestError(f"layers is {layers}; the model has {depth} layers")
    shape = type(model.shape)(**{**vars(model.shape), "layers": layers})
    nested = Transformer(shape)
    own = nested.state_dict()
    nested.load_state_dict({name: model.state_dict()[name] for name in own})
    return nested.requires_grad_(False)


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
        elif llm.tokenizer.chat_template is not None:
            prompts = generate_prompts(llm, count, seed)
        else:
            random = Random(f"{seed}/prompts")
            prompts = [task_pair(llm.tokenizer, random)[0] for _ in range(count)]
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


def sorted_loss(
    model: Transformer, tokens: torch.Tensor, is_answer: torch.Tensor, stops: Sequence[int]
) -> torch.Tensor:
    """The mean over exits of the cross-entropy of the answers' tokens.

    Args:
        model: The draft model.
        tokens: `[batch, length]`.
        is_answer: bool `[batch, length]`.
        stops: The exits, by number of layers.
    """
    rows, targets = is_answer[:, 1:], tokens[:, 1:][is_answer[:, 1:]]
    indices = torch.arange(tokens.shape[1] - 1)
    rope = model.cos[indices], model.sin[indices]
    x, total = model.transformer["wte"](tokens[:, :-1]), torch.zeros(())
    for depth, block in enumerate(model.blocks, 1):
        x = block(x, rope, True, None)
        if depth in stops:
            logits = model.transformer["ff_out"](model.transformer["ln_f"](x[rows]))
            total = total + functional.cross_entropy(logits, targets)
    return total / len(stops)
