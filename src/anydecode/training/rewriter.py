"""The rewriter of P-Aligner (Song et al., "P-Aligner: Enabling Pre-Alignment of Language Models via
Principled Instruction Synthesis", arXiv:2508.04626), for the decoder `p-aligner`.

Searches of the decoder find better and worse rewritings of instructions. A model first learns the
best ones, and then, by direct preference optimisation (Rafailov et al., arXiv:2305.18290), to
prefer them to worse ones. It is adapted by low-rank matrices, which are merged when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.decoders.search.p_aligner import TRAINED_REQUEST, PAligner, searched
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair, add_low_rank, merged_weights, open_llama
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.generated import run_requests
from anydecode.training.own_answers import padded
from anydecode.training.run import check_budget
from anydecode.training.weight_run import WeightRun

#: Searches that run together.
_TOGETHER = 8
Item = TypeVar("Item")


@dataclass(frozen=True)
class Rewriting:
    """An instruction with what it was rewritten to.

    Attributes:
        text: The instruction.
        better: The best of its rewritings; the instruction itself if none is better.
        worse: A rewriting, or the instruction, with a smaller reward; None if all have the same.
    """

    text: str
    better: str
    worse: str | None


@dataclass(frozen=True)
class RewriterRecipe:
    """How a rewriter is trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        preferring: The share of the budget in which preferences are learned, after the rest.
        beta: How far preferences may lead away from the model before them.
        preference_rate: Learning rate of that part, as a factor of `rate`.
        rank: The rank of the adapter.
        batch: Instructions per step.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    preferring: float = 0.3
    beta: float = 0.1
    preference_rate: float = 0.1
    rank: int = 16
    batch: int = 8
    rate: float = 1e-3
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        numbers = (self.rank, self.batch, self.beta, self.preference_rate)
        if min(self.minutes or self.steps or 0, *numbers) <= 0 or not 0 <= self.preferring <= 1:
            raise InvalidRequestError(
                "minutes or steps, rank, batch, beta and preference_rate must be more than 0, and"
                " preferring from 0 to 1"
            )


class RewriterRun(WeightRun):
    """A training run in a folder, which becomes that of the rewriter.

    Args:
        checkpoint: The model that becomes the rewriter.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        make_rewritings: Makes the rewritings of a new run, an eighth of which is held out.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: There are fewer than two rewritings, one is too long, or the folder
            holds another run.
    """

    differs_in = "another rank or model"
    data = ("learned", "preferred", "reference")
    recipe: RewriterRecipe
    #: Requests and the best rewritings, the held-out ones first.
    learned: list[Pair]
    #: Of every instruction the better and the worse rewriting, each behind the request, or None.
    preferred: list[tuple[Pair, Pair] | None]
    #: The difference of the log-probabilities of the two before preferences are learned; None
    #: until then.
    reference: list[float] | None

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: RewriterRecipe,
        make_rewritings: Callable[[], Sequence[Rewriting]],
    ) -> None:
        super().__init__(folder, recipe)
        tokenizer = writable_tokenizer(checkpoint)
        if not tokenizer.eos_ids:
            raise CheckpointError(f"{checkpoint.name}: its tokenizer has no end of text")
        self.tokenizer, self.model = tokenizer, open_llama(checkpoint)
        torch.manual_seed(recipe.seed)
        trained = add_low_rank(self.model, recipe.rank)
        optimizer = torch.optim.AdamW(trained, recipe.rate, (0.9, 0.98), weight_decay=0.01)
        if self._resume(trained, optimizer, [list(one.shape) for one in trained]):
            return
        rewritings = make_rewritings()
        if len(rewritings) < 2:
            raise InvalidRequestError(
                f"training needs at least 2 rewritten instructions, not {len(rewritings)}"
            )
        self.learned, self.preferred, self.reference = [], [], None
        for one in rewritings:
            self.learned.append(self._pair(one.text, one.better))
            worse = None if one.worse is None else self._pair(one.text, one.worse)
            self.preferred.append(None if worse is None else (self.learned[-1], worse))
        limit = self.model.shape.max_positions
        longest = max(
            len(start) + len(end)
            for pair in (*zip(self.learned), *filter(None, self.preferred))
            for start, end in pair
        )
        if longest > limit:
            raise InvalidRequestError(
                f"an instruction and its rewriting have {longest} tokens; at most {limit} are"
                " allowed"
            )

    def _pair(self, text: str, rewritten: str) -> Pair:
        end = self.tokenizer.encode(f" {rewritten}", special=False)
        return self.tokenizer.encode(TRAINED_REQUEST.format(text=text)), [
            *end,
            min(self.tokenizer.eos_ids),
        ]

    @property
    def _num_held_out(self) -> int:
        return max(1, len(self.learned) // 8)

    def _loss(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """The mean loss of the tokens of rewritings."""
        count = sum(len(end) for _, end in pairs)
        return -self.log_probabilities(pairs).sum() / count

    def log_probabilities(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """The log-probability of each rewriting, `[pairs]`."""
        tokens, is_learned = padded(pairs)
        row, column = is_learned[:, 1:].nonzero(as_tuple=True)
        logits = self.model(tokens, causal=True, output_rows=(row, column))
        losses = functional.cross_entropy(logits, tokens[row, column + 1], reduction="none")
        return torch.zeros(len(pairs)).index_add(0, row, -losses)

    def margins(self, pairs: Sequence[tuple[Pair, Pair]]) -> torch.Tensor:
        """By how much each better rewriting is more probable than the worse one, `[pairs]`."""
        both = self.log_probabilities([one for pair in pairs for one in pair])
        return both[0::2] - both[1::2]

    def preference_loss(
        self, pairs: Sequence[tuple[Pair, Pair]], reference: torch.Tensor
    ) -> torch.Tensor:
        """The mean of -ln sigmoid(beta * (margin - its margin before))."""
        gains = self.margins(pairs) - reference
        return -functional.logsigmoid(self.recipe.beta * gains).mean()

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/rewriter/{self.step}")
        first, count = self._num_held_out, self.recipe.batch
        chosen = [index for index in range(first, len(self.learned)) if self.preferred[index]]
        if self.progress < 1 - self.recipe.preferring or not chosen:
            pairs = _sampled(random, self.learned[first:], count)
            return self._learn(self._loss(pairs))
        if self.reference is None:
            self.reference = self._references()
        chosen = _sampled(random, chosen, count)
        reference = torch.tensor([self.reference[index] for index in chosen])
        found = [pair for index in chosen if (pair := self.preferred[index]) is not None]
        loss = self.preference_loss(found, reference)
        return self._learn(loss, self.recipe.rate * self.recipe.preference_rate)

    @torch.no_grad()
    def _references(self) -> list[float]:
        """The margins now, 0 where there is no worse rewriting."""
        return [0.0 if one is None else float(self.margins([one])) for one in self.preferred]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The mean loss of held-out rewritings, and the share of better ones that are more probable
        than the worse ones."""
        first = self._num_held_out
        found = {"loss": sum(float(self._loss([one])) for one in self.learned[:first]) / first}
        pairs = [one for one in self.preferred[:first] if one is not None]
        if pairs:
            is_preferred = [float(self.margins([one])) > 0 for one in pairs]
            found["preferred"] = sum(is_preferred) / len(pairs)
        return {name: round(value, 4) for name, value in found.items()}

    def _evaluate(self) -> None:
        self._record(held_out=self.evaluate())

    def _write(self) -> None:
        weights = merged_weights(self.model)
        save_nested_llama(self.folder, weights, self.model.shape, self.tokenizer)


def _sampled(random: Random, items: Sequence[Item], count: int) -> list[Item]:
    return random.sample(items, min(count, len(items)))


def search_rewritings(
    llm: LLM,
    instructions: Sequence[str],
    method: PAligner,
    *,
    max_tokens: int,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> list[Rewriting]:
    """Search rewritings of instructions.

    Args:
        llm: The model that rewrites and answers.
        instructions: The instructions.
        method: The search.
        max_tokens: Of an answer, and of a rewritten instruction.
        seed: Random seed.
        report: Called with the number of instructions whose search has ended.
    """
    found = []
    for start in range(0, len(instructions), _TOGETHER):
        requests = [
            llm.request(text, decoder=method, max_tokens=max_tokens, seed=seed + start + index)
            for index, text in enumerate(instructions[start : start + _TOGETHER])
        ]
        run_requests(llm, requests)
        for request in requests:
            nodes = list(searched(request.jobs[0].sequence).nodes())
            best = max(nodes, key=lambda node: node.value)
            worst = min(nodes, key=lambda node: node.value)
            worse = worst.text if worst.value < best.value and worst.text != best.text else None
            found.append(Rewriting(nodes[0].text, best.text, worse))
        report(len(found))
    return found
