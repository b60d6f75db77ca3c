"""The exit routers of TIDE ("TIDE: Token-Informed Depth Execution") and of DYNAMAX
(arXiv:2504.20922), trained on states of the frozen model over its own answers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.exit_routers import EPS, FILE_NAME, ExitRouters
from anydecode.training.exit_run import HELD_OUT, ExitRecipe, ExitRows, ExitRun, Report
from anydecode.training.generated import read_states, run_requests
from anydecode.training.mamba_block import MambaBlock, mamba_blocks
from anydecode.training.small_mlps import SmallMlp, small_mlps
from anydecode.training.transformer import Norm

#: What a router learns to predict.
Label = Literal["cosine", "token"]
#: What a router consists of.
Body = Literal["mlp", "block", "mamba"]
#: Rows of the head that are computed at a time.
CHUNK = 256


@dataclass(frozen=True)
class RouterRecipe(ExitRecipe):
    """How routers are trained.

    Attributes:
        label: "cosine": whether the state's cosine with the last layer's is above `similarity`;
            "token": whether its most probable token is among the `top_k` of the last layer.
        top_k: See `label`.
        interval: Layers from one exit to the next.
        similarity: See `label`.
        body: "mlp": a router has one hidden layer; "block": in front of that it has the
            feed-forward block of a transformer; "mamba": a block of Mamba, which reads the
            answer's tokens one after the other.
    """

    label: Label = "cosine"
    top_k: int = 1
    interval: int = 4
    similarity: float = 0.98
    body: Body = "mlp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label not in ("cosine", "token"):
            raise InvalidRequestError(f"label is {self.label!r}; choose from cosine, token")
        if self.body not in get_args(Body):
            known = ", ".join(get_args(Body))
            raise InvalidRequestError(f"body is {self.body!r}; choose from {known}")
        if min(self.top_k, self.interval) < 1:
            raise InvalidRequestError("top_k and interval must be 1 or more")

    @property
    def target(self) -> str:
        """See `ExitRouters.target`."""
        return f"cosine {self.similarity}" if self.label == "cosine" else f"token {self.top_k}"

    @property
    def settings(self) -> list[Any]:
        return [*super().settings, self.body]


class FeedForward(nn.Module):
    """The feed-forward block of a transformer, `[rows, size]` to `[rows, size]`."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.mlp = SmallMlp(Norm(size, EPS), width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlp(x)
        return result


class RouterRun(ExitRun):
    """A run that trains a router for every `interval`-th layer. See `ExitRun`."""

    differs_in = "another model, width or label, or another body"
    recipe: RouterRecipe

    @property
    def path(self) -> Path:
        return self.folder / FILE_NAME

    def routers(self) -> ExitRouters:
        """The routers as they are now."""
        down, up = {}, {}
        blocks: dict[int, nn.Module] = {}
        networks: Any = self.networks
        for name, network in networks.items():
            weights = list(network.parameters())
            down[int(name)] = weights[-2].detach().numpy().copy()
            up[int(name)] = weights[-1].detach().numpy()[0].copy()
            if self.recipe.body != "mlp":
                blocks[int(name)] = network[0]
        block = mamba = None
        if self.recipe.body == "block":
            block = small_mlps({exit: one.mlp for exit, one in blocks.items()}, self.fingerprint)  # type: ignore[misc]
        elif self.recipe.body == "mamba":
            mamba = mamba_blocks(blocks)
        return ExitRouters(down, up, self.fingerprint, self.recipe.target, block, mamba)

    def _write(self) -> None:
        self.routers().save(self.path)

    def _network(self, num_features: int) -> nn.Module:
        width = self.recipe.width
        first = nn.Linear(num_features, width, bias=False)
        head = first, nn.SiLU(), nn.Linear(width, 1, bias=False)
        if self.recipe.body == "block":
            return nn.Sequential(FeedForward(num_features, width), *head)
        if self.recipe.body == "mamba":
            return nn.Sequential(MambaBlock(num_features, width, EPS), *head)
        return nn.Sequential(*head)

    def _logits(self, exit: int, part: slice) -> torch.Tensor:
        if self.recipe.body != "mamba":
            return super()._logits(exit, part)
        assert self.rows.lengths is not None, "collected for this body"
        texts = torch.split(self.rows.inputs[exit], self.rows.lengths)
        ends = list(accumulate(self.rows.lengths))
        first, stop, _ = part.indices(ends[-1])
        chosen = [text for text, end in zip(texts, ends, strict=True) if first < end <= stop]
        logits = self.networks[str(exit)](nn.utils.rnn.pad_sequence(chosen, batch_first=True))
        return torch.cat([row[: len(text), 0] for row, text in zip(logits, chosen, strict=True)])

    def _collect(self, llm: LLM, prompts: Seq[list[int]], report: Report) -> ExitRows:
        recipe, depth = self.recipe, llm.model.spec.num_layers
        exits = list(range(recipe.interval, depth, recipe.interval))
        if not exits:
            raise InvalidRequestError(
                f"interval={recipe.interval} leaves no exit of {depth} layers"
            )
        report("answers", 0.0)
        options: dict[str, Any] = {"max_tokens": recipe.tokens, "temperature": 1.0}
        requests = [
            llm.request(prompt, seed=recipe.seed + index, **options)
            for index, prompt in enumerate(prompts)
        ]
        answers = run_requests(llm, requests)
        parts: list[list[np.ndarray]] = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            report("states", index / len(prompts))
            states = read_states(llm, [*prompt, *answer.tokens], (*exits, depth))
            # A block of Mamba starts behind the prompt, as it does in a generation.
            start = len(prompt) if recipe.body == "mamba" else 0
            parts.append([one[start:] for one in states])
        parts = [part for part in parts if len(part[-1])]
        if len(parts) < 2:
            raise InvalidRequestError(
                "training needs two answers or more: the model has answered fewer of the prompts"
            )
        *states, last = (np.concatenate(one) for one in zip(*parts, strict=True))
        best = None
        if recipe.label == "token":
            best = most_probable(llm.model, last, recipe.top_k)
        labels = {}
        for exit, inputs in zip(exits, states, strict=True):
            if best is None:
                positive = are_similar(inputs, last, recipe.similarity)
            else:
                positive = (most_probable(llm.model, inputs) == best).any(-1)
            labels[exit] = torch.from_numpy(positive)
        num_texts = max(1, int(HELD_OUT * len(parts)))
        lengths = [len(one[-1]) for one in parts]
        inputs_by_exit = dict(zip(exits, map(torch.from_numpy, states), strict=True))
        return ExitRows(inputs_by_exit, labels, sum(lengths[:num_texts]), lengths)


def are_similar(states: np.ndarray, last: np.ndarray, similarity: float) -> np.ndarray:
    """Whether the cosine of each state with that of the last layer is above `similarity`, bool
    `[rows]`; both float32 `[rows, hidden_size]`."""
    norms = np.linalg.norm(states, axis=-1) * np.linalg.norm(last, axis=-1)
    similar: np.ndarray = (states * last).sum(-1) > similarity * norms
    return similar


def most_probable(model: Any, states: np.ndarray, count: int = 1) -> np.ndarray:
    """The most probable tokens of each state, `[rows, count]`, in no order."""
    found = []
    for start in range(0, len(states), CHUNK):
        logits = model.head(states[start : start + CHUNK])
        num_chosen = min(count, logits.shape[1])
        found.append(np.argpartition(-logits, num_chosen - 1)[:, :num_chosen])
    return np.concatenate(found)
