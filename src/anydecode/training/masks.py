"""Training of a model that predicts several tokens at mask tokens behind its text, as SPACE needs,
and of prompt tokens at which an unchanged model does so, as PPD needs.

Yi et al., SPACE, arXiv:2402.11809. Groups of mask tokens stand behind some tokens of an answer; a
mask sees the text up to its group and the masks before it in the group, and predicts the token
after its position. Rows of the text predict the next token as before. All labels have the same
weight. A low-rank adapter (Hu et al., arXiv:2106.09685) and the mask's embedding are trained, and
merged into the model that is written. The texts are the model's own answers.

Sun et al., LUD, arXiv:2405.15208. Masks stand only where a lexical unit follows: a run of tokens of
which the model, before the training, predicts each behind the first with a given probability. They
predict the unit's tokens behind the first.

Chen et al., PPD, arXiv:2405.18628. The groups have prompt tokens, of which only the embeddings are
trained, on the distributions of the text's rows.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and the results, `model/`
or `prompts.safetensors`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.answer_run import AnswerRecipe, AnswerRun
from anydecode.training.block_adapter import (
    Pair,
    add_low_rank,
    choose_mask_token,
    merged_weights,
)
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.own_answers import own_answers
from anydecode.training.transformer import Transformer

#: Number of ranks whose accuracies are measured.
RANKS = 10


@dataclass(frozen=True)
class GroupRecipe(AnswerRecipe):
    """How groups are trained.

    Attributes:
        masks: Number of masks or prompt tokens of a group.
        groups: Maximum number of groups per text and step.
    """

    masks: int = 2
    groups: int = 16
    counts = ("masks", "groups", "tokens", "batch")


@dataclass(frozen=True)
class MaskRecipe(GroupRecipe):
    """How a model with masks is trained; `rank` is that of the adapter."""

    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank <= 0:
            raise InvalidRequestError("rank must be more than 0")


@dataclass(frozen=True)
class UnitRecipe(MaskRecipe):
    """How a model is trained on lexical units of up to `masks` + 1 tokens. The model predicts each
    token of a unit behind the first with a probability of at least `confidence`."""

    confidence: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.confidence <= 1:
            raise InvalidRequestError(
                f"confidence is {self.confidence}; allowed is a number above 0, at most 1"
            )


@dataclass(frozen=True)
class PromptRecipe(GroupRecipe):
    """How prompt tokens are trained."""

    masks: int = 3
    rate: float = 1e-2


class TrainedRows(nn.Module):
    """A frozen embedding, `[vocab, width]`, and trained rows of the tokens from `first` on, which
    replace its rows or follow them."""

    def __init__(self, frozen: torch.Tensor, first: int, count: int) -> None:
        super().__init__()
        self.frozen, self.first = frozen, first
        self.rows = nn.Parameter(frozen.mean(0).repeat(count, 1))

    @property
    def merged(self) -> torch.Tensor:
        """The matrix with the trained rows in place of its own."""
        weight = self.frozen.clone()
        weight[self.first : self.first + len(self.rows)] = self.rows.detach()
        return weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        number = tokens - self.first
        is_trained = (number >= 0) & (number < len(self.rows))
        embedded = functional.embedding(tokens.masked_fill(is_trained, 0), self.frozen)
        trained = functional.embedding(number.masked_fill(~is_trained, 0), self.rows)
        return torch.where(is_trained[..., None], trained, embedded)


def group_mask(num_tokens: int, ends: torch.Tensor, masks: int) -> torch.Tensor:
    """bool `[rows, rows]`: which rows (columns) each row attends to. The rows are `num_tokens`
    tokens, then `masks` masks for each group; `ends[group]` is the number of tokens before it."""
    count = num_tokens + masks * len(ends)
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    group = torch.arange(len(ends)).repeat_interleave(masks)
    visible[num_tokens:, :num_tokens] = torch.arange(num_tokens) < ends[group][:, None]
    visible[num_tokens:, num_tokens:] &= group[:, None] == group
    return visible


def group_states(
    model: Transformer, text: torch.Tensor, ends: torch.Tensor, group: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states after the final norm of a text's rows, `[length, width]`, and of the masks of
    groups behind it, `[groups, masks, width]`.

    Args:
        model: The model.
        text: `[length]`.
        ends: The number of tokens before each group.
        group: The tokens of a group, `[masks]`.
    """
    masks = len(group)
    behind = ends[:, None] + torch.arange(masks)
    rows = model.states(
        torch.cat([text, group.repeat(len(ends))])[None],
        positions=torch.cat([torch.arange(len(text)), behind.flatten()]),
        visible=group_mask(len(text), ends, masks),
    )[0]
    return rows[: len(text)], rows[len(text) :].reshape(len(ends), masks, -1)


class GroupRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Raises:
        CheckpointError: The model is no plain Llama.
        InvalidRequestError: The answers are too few or too short, or the folder holds another run.
    """

    differs_in = "another rank, mask or model"
    recipe: GroupRecipe
    #: The tokens of a group, `[masks]`; of pseudo states, the layers at which they enter.
    group: torch.Tensor

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: GroupRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        torch.manual_seed(recipe.seed)
        trained = self._set_up()
        self._begin(trained, [[list(one.shape) for one in trained], self.group.tolist()])

    def _new_pairs(self, checkpoint: Checkpoint) -> list[Pair]:
        recipe = self.recipe
        answers = own_answers(checkpoint, recipe.answers, recipe.tokens, recipe.seed)
        pairs = [pair for pair in answers if len(pair[1]) > recipe.masks]
        if len(pairs) < 2:
            raise InvalidRequestError(
                f"{checkpoint.name} has written {len(pairs)} answers of more than {recipe.masks}"
                " tokens, and training needs 2: give more answers"
            )
        return pairs

    @abstractmethod
    def _set_up(self) -> list[nn.Parameter]:
        """Set `group`, and change the model's modules; returns what is trained."""

    @abstractmethod
    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        """The loss of a text with groups behind `ends` of its tokens."""

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/masks/{self.step}")
        pairs = self._sample(random)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for pair in pairs:
            loss = self.loss(pair, self.draw_ends(pair, random)) / len(pairs)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._descend(self.optimizer, self.trained, self.recipe.rate)
        return total

    def draw_ends(self, pair: Pair, random: Random) -> torch.Tensor:
        """The number of tokens before each of some groups, whose masks all predict tokens of the
        answer."""
        every = self._all_ends(pair).tolist()
        return torch.tensor(sorted(random.sample(every, min(self.recipe.groups, len(every)))))

    def _all_ends(self, pair: Pair) -> torch.Tensor:
        first = len(pair[0])
        return torch.arange(first, first + len(pair[1]) - len(self.group))

    def _states(self, text: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `group_states`."""
        return group_states(self.model, text, ends, self.group)

    def _rows(self, pair: Pair, ends: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and labels: of the answer's tokens, then of each mask of the groups."""
        text, first = torch.tensor([*pair[0], *pair[1]]), len(pair[0])
        clean, masked = map(self.model.head, self._states(text[:-1], ends))
        rows = [(clean[first - 1 :], text[first:])]
        longer = functional.pad(text, (0, len(self.group)))
        return rows + [
            (masked[:, index], longer[ends + index + 1]) for index in range(len(self.group))
        ]

    @torch.no_grad()
    def accuracies(self, ranks: int) -> list[list[float]]:
        """How often a held-out label is the token of each of the first `ranks` ranks: of the rows
        of the text, and of each mask; 0 of a mask without labels."""
        counts = torch.zeros(len(self.group) + 1, ranks, dtype=torch.double)
        totals = torch.zeros(len(self.group) + 1, 1, dtype=torch.double)
        for pair in self._held_out:
            for part, (logits, labels) in enumerate(self._rows(pair, self._all_ends(pair))):
                best = logits.topk(min(ranks, logits.shape[-1])).indices
                counts[part, : best.shape[1]] += (best == labels[:, None]).double().sum(0)
                totals[part] += len(labels)
        shares: list[list[float]] = (counts / totals.clamp(min=1)).tolist()
        return shares

    def _evaluate(self) -> None:
        text, *held_out = (round(shares[0], 4) for shares in self.accuracies(1))
        self._record(text=text, held_out=held_out)

    def log(self) -> dict[str, Any]:
        return {**super().log(), "group": self.group.tolist()}

    def shares(self) -> Sequence[tuple[float, list[float]]]:
        """The shares of held-out tokens that the text's rows and each mask predict, in the order in
        which they were measured."""
        return [(entry["text"], entry["held_out"]) for entry in self.history if "text" in entry]


class MaskRun(GroupRun):
    """Trains a model with masks; see `GroupRun`.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder.
        recipe: How to train.
        mask: The mask token; None: the tokenizer's, or an unused special token.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: There is no token for the mask, or as `GroupRun`.
    """

    recipe: MaskRecipe

    def __init__(
        self, checkpoint: Checkpoint, folder: Path, recipe: MaskRecipe, mask: int | None = None
    ) -> None:
        tokenizer = writable_tokenizer(checkpoint)
        self.tokenizer = tokenizer
        self.mask = choose_mask_token(tokenizer) if mask is None else mask
        super().__init__(checkpoint, folder, recipe)

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model."""
        return self.folder / "model"

    def _set_up(self) -> list[nn.Parameter]:
        size = self.model.shape.vocab
        if not 0 <= self.mask < size:
            raise InvalidRequestError(f"the mask token is {self.mask}; allowed are 0 to {size - 1}")
        trained = add_low_rank(self.model, self.recipe.rank)
        embedding: Any = self.model.transformer["wte"]
        self.embedding = TrainedRows(embedding.weight.data, self.mask, 1)
        self.model.transformer["wte"] = self.embedding
        self.group = torch.full((self.recipe.masks,), self.mask)
        return [*trained, self.embedding.rows]

    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        """The mean loss of all labels of a text."""
        rows = self._rows(pair, ends)
        logits, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return functional.cross_entropy(logits, labels)

    def _write(self) -> None:
        weights = merged_weights(self.model)
        del weights["transformer.wte.rows"]
        weights["transformer.wte.weight"] = self.embedding.merged
        save_nested_llama(
            self.model_folder, weights, self.model.shape, self.tokenizer, mask=self.mask
        )


def lexical_units(probabilities: Sequence[float], confidence: float, size: int) -> list[range]:
    """The units of two tokens or more: runs in which each token behind the first has a probability
    of at least `confidence`, cut into pieces of up to `size` tokens.

    Args:
        probabilities: That of each token behind those before it.
        confidence: See above.
        size: See above.
    """
    units, start = list[range](), 0
    for end in range(1, len(probabilities) + 1):
        is_inside = end < len(probabilities) and probabilities[end] >= confidence
        if not is_inside or end - start == size:
            units.append(range(start, end))
            start = end
    return [unit for unit in units if len(unit) > 1]


class UnitRun(MaskRun):
    """Trains on lexical units; see `MaskRun`. The loss of a text is the mean loss of the labels of
    its rows, plus that of the tokens of its units: the first, of a row of the text, and those of
    masks.

    Attributes:
        units: Of each of `pairs`, in the answer: the first token and the number of tokens.

    Raises:
        InvalidRequestError: No answer to train on has a unit, or as `MaskRun`.
    """

    differs_in = "another rank, mask, confidence or model"
    data = ("pairs", "units")
    recipe: UnitRecipe
    units: list[dict[int, int]]

    def _begin(self, trained: Iterable[torch.Tensor], settings: list[Any]) -> None:
        super()._begin(trained, [*settings, self.recipe.confidence])

    def _new_pairs(self, checkpoint: Checkpoint) -> list[Pair]:
        confidence, size = self.recipe.confidence, self.recipe.masks + 1
        found = []
        for pair in super()._new_pairs(checkpoint):
            units = lexical_units(self._probabilities(pair), confidence, size)
            starts = {unit.start: len(unit) for unit in units}
            if starts:
                found.append((pair, starts))
        if len(found) < 2:
            raise InvalidRequestError(
                f"{len(found)} answers of {checkpoint.name} have lexical units at a confidence of"
                f" {confidence}, and training needs 2: lower it, or give more answers"
            )
        self.units = [starts for _, starts in found]
        return [pair for pair, _ in found]

    @torch.no_grad()
    def _probabilities(self, pair: Pair) -> list[float]:
        """Those of an answer's tokens."""
        text, first = torch.tensor([*pair[0], *pair[1]]), len(pair[0])
        logits = self.model(text[None, :-1], causal=True)[0, first - 1 :]
        own = logits.softmax(-1).gather(1, text[first:, None])
        return [float(value) for value in own[:, 0]]

    def _units_of(self, pair: Pair) -> dict[int, int]:
        return self.units[self.pairs.index(pair)]

    def _all_ends(self, pair: Pair) -> torch.Tensor:
        return torch.tensor([len(pair[0]) + start for start in self._units_of(pair)])

    def _rows(self, pair: Pair, ends: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and labels: of the answer's tokens, then of each mask inside a unit."""
        text, *masked = super()._rows(pair, ends)
        units, first = self._units_of(pair), len(pair[0])
        sizes = torch.tensor([units[end - first] for end in ends.tolist()])
        is_inside = [sizes > number for number in range(1, len(masked) + 1)]
        pairs = zip(masked, is_inside, strict=True)
        return [text, *((logits[kept], labels[kept]) for (logits, labels), kept in pairs)]

    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        (clean, labels), *masked = self._rows(pair, ends)
        starts = ends - len(pair[0])
        parts = [(clean[starts], labels[starts]), *masked]
        rows, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
        return functional.cross_entropy(clean, labels) + functional.cross_entropy(rows, tokens)


class DistilledRun(GroupRun):
    """Trains what stands in groups behind a model that stays as it is; see `GroupRun`.

    The distribution of each row of a group learns that of the text's row for the same token: the
    mean over distances i, from 0, of `decay`^i times the Kullback-Leibler divergence.
    """

    decay = 1.0

    def loss(self, pair: Pair, ends: torch.Tensor) -> torch.Tensor:
        """The mean over distances and groups of the weighted divergences."""
        (clean, _), *rows = self._rows(pair, ends)
        total = torch.zeros(())
        for distance, (logits, _) in enumerate(rows):
            target = clean[ends - len(pair[0]) + distance + 1].detach().log_softmax(-1)
            divergence = functional.kl_div(
                logits.log_softmax(-1), target, reduction="batchmean", log_target=True
            )
            total = total + self.decay**distance * divergence
        return total / len(rows)


class PromptRun(DistilledRun):
    """Trains the prompt tokens of a model that stays as it is; see `DistilledRun`."""

    decay = 0.8

    @property
    def file(self) -> Path:
        """The file of the prompt tokens."""
        return self.folder / "prompts.safetensors"

    def _set_up(self) -> list[nn.Parameter]:
        size = self.model.shape.vocab
        embedding: Any = self.model.transformer["wte"]
        self.embedding = TrainedRows(embedding.weight.data, size, self.recipe.masks)
        self.model.transformer["wte"] = self.embedding
        self.group = torch.arange(size, size + self.recipe.masks)
        return [self.embedding.rows]

    def _write(self) -> None:
        tensors = {
            "embeddings": self.embedding.rows.detach().contiguous(),
            "accuracies": torch.tensor(self.accuracies(RANKS)[1:], dtype=torch.float32),
        }
        save_file(tensors, str(self.file), metadata={"format": "pt"})
