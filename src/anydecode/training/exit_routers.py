"""The exit routers of TIDE ("TIDE: Token-Informed Depth Execution"), trained on states of the
frozen model over its own answers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_routers import ExitRouters, model_fingerprint
from anydecode.training.generated import (
    generate_prompts,
    read_states,
    rendered_prompt,
    run_requests,
)

#: What a router learns to predict.
Label = Literal["cosine", "token"]
#: Rows of the head that are computed at a time.
CHUNK = 256
#: The share of the texts that are not trained on.
HELD_OUT = 0.1


@dataclass(frozen=True)
class RouterRecipe:
    """How routers are trained.

    Attributes:
        label: "cosine": whether the state's cosine with the last layer's is above `similarity`;
            "token": whether its most probable token is among the `top_k` of the last layer.
        top_k: See `label`.
        interval: Layers from one exit to the next.
        width: Inner width of a router.
        similarity: See `label`.
        answers: Answers of the model.
        tokens: Tokens of an answer.
        epochs: Steps, each over all states.
        rate: Learning rate of Adam.
        seed: Of the answers and the weights.
    """

    label: Label = "cosine"
    top_k: int = 1
    interval: int = 4
    width: int = 128
    similarity: float = 0.98
    answers: int = 64
    tokens: int = 96
    epochs: int = 100
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.label not in ("cosine", "token"):
            raise InvalidRequestError(f"label is {self.label!r}; choose from cosine, token")
        counts = (self.top_k, self.interval, self.width, self.tokens, self.epochs)
        if min(counts) < 1 or self.answers < 2:
            raise InvalidRequestError(
                "top_k, interval, width, tokens and epochs must be 1 or more, and answers 2 or more"
            )


@dataclass(frozen=True)
class RouterQuality:
    """What a router says of held-out states at a threshold.

    Attributes:
        exit: Layers before it.
        share: Of states with a positive label.
        chosen: Share of states above the threshold.
        precision: Share of positive labels among those; 0 where there are none.
    """

    exit: int
    share: float
    chosen: float
    precision: float


def train_routers(
    llm: LLM,
    recipe: RouterRecipe,
    prompts: Seq[str] = (),
    report: Callable[[str, float], None] = lambda step, done: None,
    threshold: float = 0.85,
) -> tuple[ExitRouters, list[RouterQuality]]:
    """Train a router for every `interval`-th layer.

    Args:
        llm: The model, a transformer.
        recipe: How.
        prompts: User turns to answer; by default the model generates them, if it has a chat
            template.
        report: Called with the name of the step and the share of it that is done.
        threshold: Of the qualities.

    Returns:
        The routers, and their qualities on held-out texts.
    """
    depth = llm.model.spec.num_layers
    exits = list(range(recipe.interval, depth, recipe.interval))
    if not exits:
        raise InvalidRequestError(f"interval={recipe.interval} leaves no exit of {depth} layers")
    report("answers", 0.0)
    encoded = [rendered_prompt(llm, text) for text in prompts]
    encoded = encoded or generate_prompts(llm, recipe.answers, recipe.seed)
    if len(encoded) < 2:
        raise InvalidRequestError("routers need at least two prompts: one is held out")
    options: dict[str, Any] = {"max_tokens": recipe.tokens, "temperature": 1.0}
    requests = [
        llm.request(prompt, seed=recipe.seed + index, **options)
        for index, prompt in enumerate(encoded)
    ]
    answers = run_requests(llm, requests)
    texts = [[*one, *answer.tokens] for one, answer in zip(encoded, answers, strict=True)]
    num_held_out = max(1, int(HELD_OUT * len(texts)))
    parts: list[list[np.ndarray]] = []
    for index, text in enumerate(texts):
        report("states", index / len(texts))
        parts.append(read_states(llm, text, (*exits, depth)))
    states = [np.concatenate(one) for one in zip(*parts, strict=True)]
    num_held_out = sum(len(one[-1]) for one in parts[:num_held_out])
    best = None
    if recipe.label == "token":
        best = most_probable(llm.model, states[-1], recipe.top_k)
    down, up, qualities = {}, {}, []
    for index, exit in enumerate(exits):
        report("routers", index / len(exits))
        inputs = states[index]
        positive = (
            (most_probable(llm.model, inputs) == best).any(-1)
            if best is not None
            else are_similar(inputs, states[-1], recipe.similarity)
        )
        down[exit], up[exit] = fit_router(inputs[num_held_out:], positive[num_held_out:], recipe)
        routers = ExitRouters({exit: down[exit]}, {exit: up[exit]}, "")
        positive = positive[:num_held_out]
        chosen = routers(exit, inputs[:num_held_out]) > threshold
        precision = float(positive[chosen].mean()) if chosen.any() else 0.0
        qualities.append(
            RouterQuality(exit, float(positive.mean()), float(chosen.mean()), precision)
        )
    network: Any = llm.model.network  # type: ignore[attr-defined]
    return ExitRouters(down, up, model_fingerprint(network)), qualities


def are_similar(states: np.ndarray, last: np.ndarray, similarity: float) -> np.ndarray:
    """Whether the cosine of each state with that of the last layer is above `similarity`, bool
    `[rows]`; both float32 `[rows, hidden_size]`."""
    norms = np.linalg.norm(states, axis=-1) * np.linalg.norm(last, axis=-1)
    similar: np.ndarray = (states * last).sum(-1) > similarity * norms
    return similar


def fit_router(
    states: np.ndarray, positive: np.ndarray, recipe: RouterRecipe
) -> tuple[np.ndarray, np.ndarray]:
    """The weights of one router, float32 `[width, hidden_size]` and `[width]`: binary
    cross-entropy, each step over all states."""
    torch.manual_seed(recipe.seed)
    down = nn.Linear(states.shape[1], recipe.width, bias=False)
    up = nn.Linear(recipe.width, 1, bias=False)
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=recipe.rate)
    inputs = torch.from_numpy(np.ascontiguousarray(states))
    targets = torch.from_numpy(positive.astype(np.float32))
    for _ in range(recipe.epochs):
        outputs = up(functional.silu(down(inputs)))[:, 0]
        loss = functional.binary_cross_entropy_with_logits(outputs, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return down.weight.detach().numpy(), up.weight.detach().numpy()[0]


def most_probable(model: Any, states: np.ndarray, count: int = 1) -> np.ndarray:
    """The most probable tokens of each state, `[rows, count]`, in no order."""
    found = []
    for start in range(0, len(states), CHUNK):
        logits = model.head(states[start : start + CHUNK])
        num_chosen = min(count, logits.shape[1])
        found.append(np.argpartition(-logits, num_chosen - 1)[:, :num_chosen])
    return np.concatenate(found)
