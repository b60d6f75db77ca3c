"""Heads that say temperature and top-p for every token, trained on a model's own text (AutoDeco,
arXiv 2510.26697).

The model stays as it is: its states and logits are computed once. The temperature head learns from
the likelihood of the text at its temperatures; the top-p head from the likelihood under a soft
nucleus, whose edge has a slope, so that the gradient reaches the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from anydecode.decoders.decoder import Decoder
from anydecode.engine.llm import LLM
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.autodeco import COLDEST, HOTTEST, NUM_FIGURES, Heads
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: How steeply a token's weight falls beyond the nucleus: exp(-SLOPE * (mass up to it - top_p)).
SLOPE = 30.0
#: How many of a row's tokens are put in order; the others hold next to nothing.
SORTED = 1024
#: Of the tokens that the model says anyway (its likeliest ones) this share is left out.
LEFT_OUT = 0.6
#: Rows asked for at a time.
CHUNK = 128

Answer = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Recipe:
    """`samples` answers are drawn per prompt and the likeliest kept; `width` is the heads'. With
    `weighted`, as the authors train, a token counts by the model's own probability of it and most
    of the easy ones are left out; without, every token counts alike and temperatures fit the
    text's likelihood."""

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
class Rows:
    """The model where it said the tokens of some texts: `states` float32 `[rows, hidden_size]`
    before the final norm, `labels` int64 `[rows]`, `texts` `[rows]` the number of the text."""

    states: torch.Tensor
    labels: torch.Tensor
    texts: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: torch.Tensor) -> Rows:
        """Some of the rows."""
        return Rows(self.states[index], self.labels[index], self.texts[index])


class _Read(Decoder):
    """Says nothing; keeps the last layer's states over a text."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def decode(self, sequence: Sequence) -> Decoding:
        context = sequence.context()
        context.truncate(0)  # a shared prefix has keys and values, but no states
        depth = context.pool.model.spec.num_layers
        self.parts = []
        for start in range(0, len(sequence.prompt), CHUNK):
            part = sequence.prompt[start : start + CHUNK]
            score = sequence.score(part, rows="all", hidden=(depth,))
            score.groups[0][-1].logits = False
            scores = yield score
            self.parts.append(scores.hidden[depth].clone())


def own_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """What the model itself would be asked: user turns that it writes behind the opening of its
    chat template, each rendered as a conversation."""
    tokenizer = llm.tokenizer
    marker = "\0"
    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model has no chat template: give prompts")
    whole = tokenizer.render_chat([{"role": "user", "content": marker}])
    opening, _, closing = whole.partition(marker)
    end = closing.split("\n")[0] or "\n"
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 48}
    options["stop"] = [end, "\n"]
    openings = [tokenizer.encode(opening, special=False)] * count
    turns = [llm.request(one, seed=seed + number, **options) for number, one in enumerate(openings)]
    found = dict.fromkeys(answer.text.strip() for answer in _finish(llm, turns))
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), special=False)
        for text in found
        if len(text) > 8
    ]


def own_answers(llm: LLM, prompts: Seq[list[int]], recipe: Recipe) -> list[Answer]:
    """Of several answers to each prompt, drawn at temperature 1, the one with the highest
    likelihood per token."""
    options: dict[str, Any] = {"temperature": 1.0, "n": recipe.samples, "logprobs": 0}
    options["max_tokens"] = recipe.tokens
    requests = [
        llm.request(prompt, seed=recipe.seed + number, **options)
        for number, prompt in enumerate(prompts)
    ]
    kept = []
    for prompt, answer in zip(prompts, _finish(llm, requests), strict=True):
        best = max(answer.samples, key=lambda one: np.mean([t.logprob for t in one.logprobs]))
        kept.append((prompt, best.tokens))
    return kept


def _finish(llm: LLM, requests: list[Any]) -> list[Any]:
    for request in requests:
        llm.start(request, background=False)
    llm.driver.advance(lambda: all(request.done for request in requests))
    return [request.generation() for request in requests]


def read(llm: LLM, answers: Iterable[Answer]) -> Rows:
    """The rows from which the tokens of the answers were said."""
    if getattr(llm.model, "normed", None) is None:
        raise UnsupportedCombinationError("autodeco needs a model whose last states can be read")
    states, labels, texts = [], [], []
    for number, (prompt, said) in enumerate(answers):
        reader = _Read()
        llm.generate([*prompt, *said], decoder=reader, max_tokens=1)
        rows = torch.cat(reader.parts)[len(prompt) - 1 : -1]
        states.append(rows)
        labels += said
        texts += [number] * len(said)
    return Rows(torch.cat(states), torch.tensor(labels), torch.tensor(texts))


class Learner(nn.Module):
    """The heads while they learn, by the authors' names."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.temp_head: Any = _network(hidden_size, width)
        self.top_p_head: Any = _network(hidden_size + NUM_FIGURES, width)
        with torch.no_grad():  # begin at temperature 1 and a top-p of about 0.98
            for network, offset in ((self.temp_head, 0.0), (self.top_p_head, 4.0)):
                last: Any = list(network.modules())[-1]
                last.weight.zero_()
                last.bias.fill_(offset)

    def temperature(self, states: torch.Tensor) -> torch.Tensor:
        """`[rows, 1]` of states after the final norm."""
        found: torch.Tensor = self.temp_head.mlp(states)
        return (HOTTEST * torch.sigmoid(found)).clamp_min(COLDEST)

    def top_p(
        self, states: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor
    ) -> torch.Tensor:
        """`[rows, 1]`; what it sees of the temperature carries no gradient."""
        heat = temperature.detach()
        p = torch.softmax(logits / heat, -1)
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1, keepdim=True)
        figures = (heat, p.amax(-1, True), entropy, p.var(-1, keepdim=True),
                   p.topk(min(5, p.shape[-1])).values.sum(-1, True))  # fmt: skip
        found: torch.Tensor = self.top_p_head.mlp(torch.cat([states, *figures], -1))
        return torch.sigmoid(found)

    def heads(self) -> Heads:
        """As the engine takes them."""
        return Heads.of({name: part.numpy() for name, part in self.state_dict().items()})


def _network(inputs: int, width: int) -> nn.ModuleDict:
    layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
    return nn.ModuleDict({"mlp": layers})


def soft_nucleus(logits: torch.Tensor, labels: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """ln q of `labels`, `[rows]`: q is softmax of `logits` with each token weighed by
    exp(-SLOPE * relu(c - top_p)), c the mass up to and with it in falling order, renormalised.
    Beyond the `SORTED` likeliest tokens c counts as 1."""
    log_p = torch.log_softmax(logits, -1)
    ordered = log_p.topk(min(SORTED, log_p.shape[-1])).values
    mass = ordered.exp().cumsum(-1)
    tail = -SLOPE * torch.relu(1 - top_p)
    rest = (1 - mass[:, -1:]).clamp_min(1e-9).log() + tail
    weighed = ordered - SLOPE * torch.relu(mass - top_p)
    total = torch.logsumexp(torch.cat([weighed, rest], -1), -1)
    own = log_p.gather(-1, labels[:, None])
    ahead = (log_p > own).sum(-1, keepdim=True)
    position = ahead.clamp_max(ordered.shape[-1] - 1)
    found = torch.where(ahead == position, weighed.gather(-1, position), own + tail)
    return found[:, 0] - total


def losses(
    learner: Learner, states: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two heads' losses, per row `[rows]`: -ln of the label's probability at the temperature,
    and under the soft nucleus at that temperature (which the second loss does not move)."""
    temperature = learner.temperature(states)
    at = labels[:, None]
    first = -torch.log_softmax(logits / temperature, -1).gather(-1, at)[:, 0]
    top_p = learner.top_p(states, logits, temperature)
    second = -soft_nucleus(logits / temperature.detach(), labels, top_p)
    return first, second


def chosen(logits: torch.Tensor, labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Weights `[rows]`: the model's own probability of the label, 0 for most of the rows where the
    label is its likeliest token."""
    p = torch.softmax(logits, -1).gather(-1, labels[:, None])[:, 0]
    easy = logits.argmax(-1) == labels
    left_out = torch.rand(len(labels), generator=generator) < LEFT_OUT
    return torch.where(easy & left_out, 0.0, p)


def train(
    model: Any, rows: Rows, recipe: Recipe, on_epoch: Callable[[int, float], None] | None = None
) -> Learner:
    """Heads for `model` from `rows`. `on_epoch` is told the number and the mean loss."""
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    learner = Learner(rows.states.shape[1], recipe.width)
    optimizer = torch.optim.AdamW(learner.parameters(), recipe.rate, weight_decay=recipe.decay)
    steps = recipe.epochs * -(-len(rows) // recipe.batch)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=steps)
    for epoch in range(recipe.epochs):
        total, count = 0.0, 0
        for index in _parts(torch.randperm(len(rows), generator=generator), recipe.batch):
            part = rows.at(index)
            logits = model.head(part.states).clone()
            if recipe.weighted:
                weights = chosen(logits, part.labels, generator)
            else:
                weights = torch.ones(len(part))
            used = weights > 0
            if used.any():
                states = model.normed(part.states[used])
                first, second = losses(learner, states, logits[used], part.labels[used])
                loss = ((first + second) * weights[used]).mean()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                total += loss.item() * int(used.sum())
                count += int(used.sum())
            plan.step()
        if on_epoch is not None:
            on_epoch(epoch, total / max(1, count))
    return learner


#: What a user could set by hand instead; the best of them is what the heads are held against.
FIXED = tuple(round(0.4 + 0.05 * step, 2) for step in range(25))
FIXED_P = (0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True)
class Gain:
    """Nats per token on texts that the heads have not seen: `plain` at temperature 1, `fixed` at
    the best single one, `heads` at the heads'; `error` is the standard error of fixed - heads,
    texts being independent. The same for the soft nucleus, behind the heads' temperatures."""

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

    def told(self) -> str:
        """In a line."""
        return (
            f"{self.rows} held-out tokens, nats per token: {self.plain:.4f} at temperature 1,"
            f" {self.fixed:.4f} at the best fixed one ({self.best}), {self.heads:.4f} at the heads'"
            f" (gain {self.fixed - self.heads:.4f}, standard error {self.error:.4f})"
        )


@torch.no_grad()
def measure(model: Any, rows: Rows, learner: Learner) -> Gain:
    """How well the heads do against what could be fixed by hand, on every row alike."""
    fixed, nuclei, heads, heads_p = [], [], [], []
    for index in _parts(torch.arange(len(rows)), CHUNK):
        part = rows.at(index)
        logits = model.head(part.states).clone()
        at = part.labels[:, None]
        states = model.normed(part.states)
        label = logits.gather(-1, at)[:, 0]
        by_hand = [torch.logsumexp(logits / t, -1) - label / t for t in FIXED]
        fixed.append(torch.stack(by_hand, -1))
        first, second = losses(learner, states, logits, part.labels)
        heads.append(first)
        heads_p.append(second)
        cool = logits / learner.temperature(states)
        edges = [soft_nucleus(cool, part.labels, torch.full((1, 1), p)) for p in FIXED_P]
        nuclei.append(-torch.stack(edges, -1))
    table, own = torch.cat(fixed).double(), torch.cat(heads).double()
    edges_table, own_p = torch.cat(nuclei).double(), torch.cat(heads_p).double()
    best, best_p = int(table.mean(0).argmin()), int(edges_table.mean(0).argmin())
    return Gain(
        rows=len(rows),
        plain=float(table[:, FIXED.index(1.0)].mean()),
        fixed=float(table[:, best].mean()),
        best=FIXED[best],
        heads=float(own.mean()),
        error=_error(table[:, best] - own, rows.texts),
        fixed_nucleus=float(edges_table[:, best_p].mean()),
        best_p=FIXED_P[best_p],
        heads_nucleus=float(own_p.mean()),
        error_nucleus=_error(edges_table[:, best_p] - own_p, rows.texts),
    )


def _parts(index: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [index[start : start + size] for start in range(0, len(index), size)]


def _error(differences: torch.Tensor, texts: torch.Tensor) -> float:
    """Standard error of the mean, texts being what is drawn."""
    off = torch.zeros(int(texts.max()) + 1, dtype=torch.float64)
    off.index_add_(0, texts, differences - differences.mean())
    return float((off**2).sum().sqrt()) / len(differences)


def split(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """To learn from, and the last texts, that `share` of them, to measure on."""
    count = int(rows.texts.max()) + 1
    first = count - max(1, round(share * count))
    seen = rows.texts < first
    return rows.at(seen.nonzero()[:, 0]), rows.at((~seen).nonzero()[:, 0])


def train_autodeco(
    llm: LLM,
    recipe: Recipe,
    prompts: Seq[str] = (),
    on_epoch: Callable[[int, float], None] | None = None,
) -> tuple[Learner, Gain]:
    """Heads for the model of `llm`, from its own answers to `prompts` (by default what it asks
    itself), and what they are worth on held-out texts."""
    asked = [llm.encode(_asked(llm, text)) for text in prompts]
    asked = asked or own_prompts(llm, recipe.prompts, recipe.seed)
    if len(asked) < 2:
        raise InvalidRequestError("autodeco needs two prompts at least: one is held out")
    rows = read(llm, [one for one in own_answers(llm, asked, recipe) if one[1]])
    seen, unseen = split(rows, recipe.held_out)
    learner = train(llm.model, seen, recipe, on_epoch)
    return learner, measure(llm.model, unseen, learner)


def _asked(llm: LLM, text: str) -> list[int]:
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is not None:
        text = tokenizer.render_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, special=tokenizer.chat_template is None)
