"""AutoDeco: heads that predict temperature and top-p for every token (arXiv:2510.26697), trained on
the model's own text.

The model is frozen: its states and logits are computed once. The temperature head is trained on the
likelihood of the text at its temperatures. The top-p head is trained on the likelihood under a soft
nucleus, whose edge is sloped so that the gradient reaches the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.autodeco import MAX_TEMPERATURE, MIN_TEMPERATURE, NUM_FEATURES, Heads
from anydecode.training.generated import (
    CHUNK,
    read_states,
    rendered_prompt,
    run_requests,
)
from anydecode.training.own_answers import prompts_to_answer

#: Slope of a token's weight beyond the nucleus: exp(-NUCLEUS_SLOPE * (mass up to it - top_p)).
NUCLEUS_SLOPE = 30.0
#: Number of tokens per row that are sorted; the others have almost no probability.
NUM_SORTED = 1024
#: Fraction of the easy rows (the label is the model's most probable token) that are dropped.
EASY_DROP_RATE = 0.6

Answer = tuple[list[int], list[int]]


@dataclass(frozen=True)
class AutoDecoRecipe:
    """How the heads are trained.

    `samples` answers are sampled per prompt and the most probable one is kept; `width` is the
    hidden width of the heads. With `weighted`, as the authors train, a token is weighted by the
    model's own probability of it, and most of the easy ones are dropped. Without it, all tokens
    have the same weight and temperatures fit the likelihood of the text.
    """

    prompts: int = 160
    samples: int = 4
    tokens: int = 64
    width: int = 64
    epochs: int = 12
    batch: int = 64
    rate: float = 5e-4
    decay: float = 1e-2
    weighted: bool = False
    held_out: float = 0.2
    seed: int = 0


@dataclass(eq=False)
class TrainingRows:
    """The model's states before the tokens of some texts.

    Attributes:
        states: float32 `[rows, hidden_size]`, before the final norm.
        labels: int64 `[rows]`, the next tokens.
        texts: `[rows]`, the index of the text of each row.
    """

    states: torch.Tensor
    labels: torch.Tensor
    texts: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: torch.Tensor) -> TrainingRows:
        """The rows at these indices."""
        return TrainingRows(self.states[index], self.labels[index], self.texts[index])


def generate_answers(llm: LLM, prompts: Seq[list[int]], recipe: AutoDecoRecipe) -> list[Answer]:
    """For each prompt, the most probable of several answers sampled at temperature 1, by mean
    log-probability per token."""
    options: dict[str, Any] = {"temperature": 1.0, "n": recipe.samples, "logprobs": 0}
    options["max_tokens"] = recipe.tokens
    requests = [
        llm.request(prompt, seed=recipe.seed + index, **options)
        for index, prompt in enumerate(prompts)
    ]
    answers = []
    for prompt, answer in zip(prompts, run_requests(llm, requests), strict=True):
        best = max(answer.samples, key=lambda one: np.mean([t.logprob for t in one.logprobs]))
        answers.append((prompt, best.tokens))
    return answers


def collect_rows(llm: LLM, answers: Iterable[Answer]) -> TrainingRows:
    """The rows that predicted the tokens of the answers. Raises `UnsupportedCombinationError` if
    the model does not expose its last states."""
    if getattr(llm.model, "normed", None) is None:
        raise UnsupportedCombinationError(
            "autodeco needs a model that exposes its last hidden states"
        )
    states, labels, texts = [], [], []
    for index, (prompt, tokens) in enumerate(answers):
        rows = read_states(llm, [*prompt, *tokens], (llm.model.spec.num_layers,))[0]
        states.append(torch.from_numpy(rows[len(prompt) - 1 : -1].copy()))
        labels += tokens
        texts += [index] * len(tokens)
    return TrainingRows(torch.cat(states), torch.tensor(labels), torch.tensor(texts))


class HeadsModule(nn.Module):
    """The heads during training. Parameter names are the authors'."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.temp_head: Any = _network(hidden_size, width)
        self.top_p_head: Any = _network(hidden_size + NUM_FEATURES, width)
        with torch.no_grad():  # start at temperature 1 and a top-p of about 0.98
            for network, offset in ((self.temp_head, 0.0), (self.top_p_head, 4.0)):
                last: Any = list(network.modules())[-1]
                last.weight.zero_()
                last.bias.fill_(offset)

    def temperature(self, states: torch.Tensor) -> torch.Tensor:
        """Temperatures `[rows, 1]` from states after the final norm."""
        output: torch.Tensor = self.temp_head.mlp(states)
        return (MAX_TEMPERATURE * torch.sigmoid(output)).clamp_min(MIN_TEMPERATURE)

    def top_p(
        self, states: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        """Top-p values `[rows, 1]`; no gradient flows into the temperature."""
        detached = temperature.detach()
        p = torch.softmax(logits / detached, -1)
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1, keepdim=True)
        features = (detached, p.amax(-1, True), entropy, p.var(-1, keepdim=True),
                   p.topk(min(5, p.shape[-1])).values.sum(-1, True))  # fmt: skip
        output: torch.Tensor = self.top_p_head.mlp(torch.cat([states, *features], -1))
        return torch.sigmoid(output)

    def heads(self) -> Heads:
        """The trained heads in the engine's format."""
        return Heads.of({name: part.numpy() for name, part in self.state_dict().items()})


def _network(inputs: int, width: int) -> nn.ModuleDict:
    layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
    return nn.ModuleDict({"mlp": layers})


def soft_nucleus(logits: torch.Tensor, labels: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """ln q of `labels`, `[rows]`, under the soft nucleus of `top_p`.

    q is the softmax of `logits` with each token weighted by exp(-NUCLEUS_SLOPE * relu(c - top_p)),
    renormalised. c is the probability mass up to and including the token, in falling order. Beyond
    the `NUM_SORTED` most probable tokens c counts as 1.
    """
    log_p = torch.log_softmax(logits, -1)
    ordered = log_p.topk(min(NUM_SORTED, log_p.shape[-1])).values
    mass = ordered.exp().cumsum(-1)
    tail = -NUCLEUS_SLOPE * torch.relu(1 - top_p)
    rest = (1 - mass[:, -1:]).clamp_min(1e-9).log() + tail
    weighted = ordered - NUCLEUS_SLOPE * torch.relu(mass - top_p)
    total = torch.logsumexp(torch.cat([weighted, rest], -1), -1)
    label_log_p = log_p.gather(-1, labels[:, None])
    rank = (log_p > label_log_p).sum(-1, keepdim=True)
    position = rank.clamp_max(ordered.shape[-1] - 1)
    log_weight = torch.where(rank == position, weighted.gather(-1, position), label_log_p + tail)
    return log_weight[:, 0] - total


def losses(
    learner: HeadsModule, states: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the two heads, per row `[rows]`: -ln of the label's probability at the
    temperature, and under the soft nucleus at that temperature. The second loss has no gradient
    into the temperature."""
    temperature = learner.temperature(states)
    at = labels[:, None]
    temperature_loss = -torch.log_softmax(logits / temperature, -1).gather(-1, at)[:, 0]
    top_p = learner.top_p(states, logits, temperature)
    top_p_loss = -soft_nucleus(logits / temperature.detach(), labels, top_p)
    return temperature_loss, top_p_loss


def row_weights(
    logits: torch.Tensor, labels: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Weights `[rows]`: the model's own probability of the label, 0 for most of the rows whose
    label is the most probable token."""
    p = torch.softmax(logits, -1).gather(-1, labels[:, None])[:, 0]
    is_easy = logits.argmax(-1) == labels
    is_dropped = torch.rand(len(labels), generator=generator) < EASY_DROP_RATE
    return torch.where(is_easy & is_dropped, 0.0, p)


def train(
    model: Any,
    rows: TrainingRows,
    recipe: AutoDecoRecipe,
    on_epoch: Callable[[int, float], None] | None = None,
) -> HeadsModule:
    """Train heads for `model` on `rows`. `on_epoch` is called with the epoch and the mean loss."""
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    learner = HeadsModule(rows.states.shape[1], recipe.width)
    optimizer = torch.optim.AdamW(learner.parameters(), recipe.rate, weight_decay=recipe.decay)
    steps = recipe.epochs * -(-len(rows) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=steps)
    for epoch in range(recipe.epochs):
        total, count = 0.0, 0
        for index in _batches(torch.randperm(len(rows), generator=generator), recipe.batch):
            batch = rows.select(index)
            logits = torch.from_numpy(model.head(batch.states.numpy()).copy())
            if recipe.weighted:
                weights = row_weights(logits, batch.labels, generator)
            else:
                weights = torch.ones(len(batch))
            used = weights > 0
            if used.any():
                states = torch.from_numpy(model.normed(batch.states[used].numpy()))
                first, second = losses(learner, states, logits[used], batch.labels[used])
                loss = ((first + second) * weights[used]).mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.item() * int(used.sum())
                count += int(used.sum())
            schedule.step()
        if on_epoch is not None:
            on_epoch(epoch, total / max(1, count))
    return learner


#: Fixed settings that the heads are compared with; the best of them counts.
FIXED_TEMPERATURES = tuple(round(0.4 + 0.05 * step, 2) for step in range(25))
FIXED_TOP_P = (0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True)
class Gain:
    """Nats per token on held-out texts.

    `plain` is at temperature 1, `fixed` at the best fixed temperature `best`, `heads` at the
    predicted temperatures. `error` is the standard error of fixed - heads, with texts as
    independent samples. The fields with `nucleus` and `p` are the same for the soft nucleus after
    the predicted temperatures.
    """

    rows: int
    plain: float
    fixed: float
    best: float
    heads: float
    error: float
    fixed_nucleus: float
    best_p: float
    heads_nucleus: float
    error_nucleus: float

    def summary(self) -> str:
        """A one-line summary."""
        return (
            f"{self.rows} held-out tokens, nats per token: {self.plain:.4f} at temperature 1,"
            f" {self.fixed:.4f} at the best fixed one ({self.best}), {self.heads:.4f} at the heads'"
            f" (gain {self.fixed - self.heads:.4f}, standard error {self.error:.4f})"
        )


@torch.no_grad()
def measure(model: Any, rows: TrainingRows, learner: HeadsModule) -> Gain:
    """Compare the heads with fixed settings on all rows."""
    fixed, nuclei, heads, heads_p = [], [], [], []
    for index in _batches(torch.arange(len(rows)), CHUNK):
        batch = rows.select(index)
        logits = torch.from_numpy(model.head(batch.states.numpy()).copy())
        at = batch.labels[:, None]
        states = torch.from_numpy(model.normed(batch.states.numpy()))
        label = logits.gather(-1, at)[:, 0]
        fixed_losses = [torch.logsumexp(logits / t, -1) - label / t for t in FIXED_TEMPERATURES]
        fixed.append(torch.stack(fixed_losses, -1))
        first, second = losses(learner, states, logits, batch.labels)
        heads.append(first)
        heads_p.append(second)
        scaled = logits / learner.temperature(states)
        nucleus_losses = [
            soft_nucleus(scaled, batch.labels, torch.full((1, 1), p)) for p in FIXED_TOP_P
        ]
        nuclei.append(-torch.stack(nucleus_losses, -1))
    table, head_losses = torch.cat(fixed).double(), torch.cat(heads).double()
    nucleus_table, top_p_losses = torch.cat(nuclei).double(), torch.cat(heads_p).double()
    best, best_p = int(table.mean(0).argmin()), int(nucleus_table.mean(0).argmin())
    return Gain(
        rows=len(rows),
        plain=float(table[:, FIXED_TEMPERATURES.index(1.0)].mean()),
        fixed=float(table[:, best].mean()),
        best=FIXED_TEMPERATURES[best],
        heads=float(head_losses.mean()),
        error=_standard_error(table[:, best] - head_losses, rows.texts),
        fixed_nucleus=float(nucleus_table[:, best_p].mean()),
        best_p=FIXED_TOP_P[best_p],
        heads_nucleus=float(top_p_losses.mean()),
        error_nucleus=_standard_error(nucleus_table[:, best_p] - top_p_losses, rows.texts),
    )


def _batches(index: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [index[start : start + size] for start in range(0, len(index), size)]


def _standard_error(differences: torch.Tensor, texts: torch.Tensor) -> float:
    """Standard error of the mean, with texts as independent samples."""
    totals = torch.zeros(int(texts.max()) + 1, dtype=torch.float64)
    totals.index_add_(0, texts, differences - differences.mean())
    return float((totals**2).sum().sqrt()) / len(differences)


def split(rows: TrainingRows, share: float) -> tuple[TrainingRows, TrainingRows]:
    """Split rows by text: the training rows, and those of the last texts, a fraction `share` of
    them.
    """
    count = int(rows.texts.max()) + 1
    first = count - max(1, round(share * count))
    is_training = rows.texts < first
    return rows.select(is_training.nonzero()[:, 0]), rows.select((~is_training).nonzero()[:, 0])


def train_autodeco(
    llm: LLM,
    recipe: AutoDecoRecipe,
    prompts: Seq[str] = (),
    on_epoch: Callable[[int, float], None] | None = None,
) -> tuple[HeadsModule, Gain]:
    """Train heads for the model of `llm` on its own answers to `prompts`, and measure them on
    held-out texts. Without `prompts`, they are those of `prompts_to_answer`."""
    encoded = [llm.encode(rendered_prompt(llm.tokenizer, text)) for text in prompts]
    encoded = encoded or prompts_to_answer(llm, recipe.prompts, recipe.seed)
    if len(encoded) < 2:
        raise InvalidRequestError("autodeco needs at least two prompts: one is held out")
    rows = collect_rows(llm, [one for one in generate_answers(llm, encoded, recipe) if one[1]])
    training_rows, held_out_rows = split(rows, recipe.held_out)
    learner = train(llm.model, training_rows, recipe, on_epoch)
    return learner, measure(llm.model, held_out_rows, learner)
