"""Training of a small language model that drafts for a target: `distillspec` and `fastdraft`.

A run has two parts. In the first, the tokens of texts or of answers are learned; in the second,
those of answers or, by a divergence, the target's distributions at them. What the parts are is the
recipe's (`DraftRecipe`). A run has a folder, from which it can be resumed: `state.pt`, `log.json`,
and `draft/`, the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.tokenizers import HFTokenizer
from anydecode.training.answer_run import AnswerRecipe, AnswerRun
from anydecode.training.block_adapter import Pair, open_llama
from anydecode.training.checkpoint import save_json, save_nested_llama, writable_tokenizer
from anydecode.training.divergences import acceptance, divergence
from anydecode.training.draft_sampling import sample_answers
from anydecode.training.drafter_evaluation import DEPTH, measure
from anydecode.training.generated import rendered_prompt
from anydecode.training.nested import first_layers
from anydecode.training.own_answers import answers_to_learn_from, padded
from anydecode.training.pairs import read_text, read_texts
from anydecode.training.recipes.draft_recipe import DraftRecipe
from anydecode.training.transformer import Shape, Transformer

#: Most held-out answers that a draft model is evaluated on.
NUM_EVALUATED = 16
#: Most tokens of one of the texts that a line of a file is cut into.
TEXT_TOKENS = 256


@dataclass(frozen=True)
class DraftOptions(AnswerRecipe):
    """How a draft model is trained.

    Attributes:
        draft: The draft model and its objectives.
        size: Number of drafts per round in the measurement.
    """

    rate: float = 5e-4
    draft: DraftRecipe = field(default_factory=lambda: DraftRecipe("distillspec", 4))
    size: int = DEPTH


class DraftModelRun(AnswerRun):
    """A training run in a folder.

    Args:
        checkpoint: The target.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        draft: A draft model to begin with, in place of the one that the recipe makes.
        texts: A file with a text per line, or a prompt, a tab and an answer: fixed answers, or what
            is learned first.
        code: A file of code, which is learned beside the texts in the last part of the
            pre-training.
        pairs: Prompts and answers, in place of those that the target or the file has.

    Raises:
        CheckpointError: A model is no plain Llama, or the target's tokenizer cannot be written.
        InvalidRequestError: The draft model or its shape does not fit the target, the file cannot
            be used, or the folder holds another run.
    """

    differs_in = "another recipe or model"
    data: ClassVar[tuple[str, ...]] = ("pairs", "texts", "code", "results", "num_tokens")
    recipe: DraftOptions

    def __init__(
        self,
        checkpoint: Checkpoint,
        folder: Path,
        recipe: DraftOptions,
        draft: Checkpoint | None = None,
        texts: Path | None = None,
        pairs: list[Pair] | None = None,
        code: Path | None = None,
    ) -> None:
        self.tokenizer = writable_tokenizer(checkpoint)
        super().__init__(checkpoint, folder, recipe)
        self.target = self.model
        self.draft = self._make_draft(draft)
        rows = [] if texts is None else read_rows(texts, self.tokenizer, recipe.tokens)
        self._given = pairs
        if recipe.draft.data == "fixed":
            self._given = [row for row in rows if row[0]]
            if len(self._given) < 2:
                raise InvalidRequestError(
                    "data=fixed needs --texts, a file with a prompt, a tab and an answer in at"
                    " least two lines"
                )
        #: What is learned in the first part, if not the answers.
        self.texts: list[Pair] = rows if recipe.draft.whole_texts else []
        if code is not None and not recipe.draft.mixed:
            raise InvalidRequestError(f"{recipe.draft.name} learns no code: leave --code out")
        self.code = [] if code is None else read_code(code, self.tokenizer)
        self.results: dict[str, Any] = {}
        self.num_tokens = 0
        trained = [weight for weight in self.draft.parameters() if weight.requires_grad]
        shapes = [asdict(model.shape) for model in (self.target, self.draft)]
        self._begin(trained, [*shapes, asdict(recipe.draft)])
        rows = [*self.pairs, *self.texts, *self.code]
        longest = max(len(start) + len(end) for start, end in rows)
        longest = max(longest, max(len(start) for start, _ in self.pairs) + recipe.tokens)
        limit = min(self.target.shape.max_positions, self.draft.shape.max_positions)
        if longest > limit:
            raise InvalidRequestError(
                f"a prompt and its answer may have {longest} tokens, but the models {limit}"
                " positions: give fewer --tokens"
            )

    def _make_draft(self, given: Checkpoint | None) -> Transformer:
        recipe, target = self.recipe.draft, self.target
        if given is not None:
            draft = open_llama(given)
            if draft.shape.vocab != target.shape.vocab:
                raise InvalidRequestError(
                    f"{given.name} has {draft.shape.vocab} tokens, the target"
                    f" {target.shape.vocab}; a draft model needs the vocabulary of its target"
                )
            return draft.requires_grad_(True)
        if recipe.width is not None:
            torch.manual_seed(self.recipe.seed)
            return Transformer(fresh_shape(target.shape, recipe.layers, recipe.width))
        draft = first_layers(target, recipe.layers)
        draft.transformer["blocks"].requires_grad_(True)
        draft.transformer["ln_f"].requires_grad_(True)
        return draft

    def _new_pairs(self, checkpoint: Checkpoint) -> list[Pair]:
        return self._given if self._given is not None else target_answers(checkpoint, self.recipe)

    @property
    def draft_folder(self) -> Path:
        """The folder of the draft model."""
        return self.folder / "draft"

    @property
    def stage(self) -> str:
        """The part of the run that the next step belongs to."""
        recipe = self.recipe.draft
        return "pretraining" if self.progress < recipe.pretraining else recipe.objective

    def step_rows(self) -> tuple[list[Pair], str]:
        """The prompts and answers that the next step learns, and its objective."""
        recipe = self.recipe.draft
        random = Random(f"{self.recipe.seed}/draft/{self.step}")
        rows = self._sample(random)
        if self.stage == "pretraining":
            return self._first_rows(rows, random), "cross-entropy"
        if random.random() < recipe.on_policy:
            rows = self._own_answers(rows, random)
        return rows, recipe.objective

    def _update(self) -> float:
        rows, objective = self.step_rows()
        self.num_tokens += sum(len(answer) for _, answer in rows)
        beta = self.recipe.draft.beta
        return self._learn(draft_loss(self.draft, self.target, rows, objective, beta))

    def _first_rows(self, rows: list[Pair], random: Random) -> list[Pair]:
        """What is learned before the answers, in place of `rows` of them."""
        if self.texts:
            rows = random.sample(self.texts, min(self.recipe.batch, len(self.texts)))
        elif self.recipe.draft.whole_texts:
            rows = [([], [*prompt, *answer]) for prompt, answer in rows]
        recipe = self.recipe.draft
        if self.code and self.progress >= recipe.pretraining * (1 - recipe.mixed):
            rows = [*rows, *random.sample(self.code, min(len(rows), len(self.code)))]
        return rows

    def _own_answers(self, rows: Sequence[Pair], random: Random) -> list[Pair]:
        """The prompts of `rows` with answers that the draft model samples."""
        generator = torch.Generator().manual_seed(random.getrandbits(63))
        prompts = [prompt for prompt, _ in rows]
        given = self.recipe.tokens, self.tokenizer.eos_ids, generator
        answers = sample_answers(self.draft, prompts, *given)
        return list(zip(prompts, answers, strict=True))

    def _record(self, **values: Any) -> None:
        super()._record(stage=self.stage, **values)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Record the probability that a token of the draft model is accepted by rejection sampling,
        at the tokens of held-out answers."""
        total, count = 0.0, 0
        for pair in self._held_out[:NUM_EVALUATED]:
            tokens, *rows = answer_rows([pair])
            models = (self.target, self.draft)
            logits = [model(tokens, causal=True, output_rows=(*rows,)) for model in models]
            accepted = acceptance(*logits)
            total, count = total + float(accepted.sum()), count + len(accepted)
        self._record(acceptance=round(total / count, 4))

    def _write(self) -> None:
        draft = self.draft
        save_nested_llama(self.draft_folder, draft.state_dict(), draft.shape, self.tokenizer)

    def measure(self) -> dict[str, Any]:
        """Write the draft model, and decode held-out prompts with it; see `measure`. The results
        are kept as those before the training or after it."""
        self._write()
        prompts = [prompt for prompt, _ in self._held_out[:NUM_EVALUATED]]
        threads, size = torch.get_num_threads(), self.recipe.size
        decoder = f"speculative-sampling:size={size}"
        with LLM(
            self._checkpoint.path, draft=self.draft_folder, threads=threads, drafting="fixed"
        ) as llm:
            measured = {
                f"temperature {temperature}": measure(
                    llm, prompts, decoder, size, self.recipe.tokens, temperature, self.recipe.seed
                )
                for temperature in (0.0, 0.8)
            }
        self.results["after" if self.step else "before"] = measured
        save_json(self.folder / "log.json", self.log())
        return measured

    def log(self) -> dict[str, Any]:
        return {**super().log(), "tokens": self.num_tokens, "results": self.results}


def target_answers(checkpoint: Checkpoint, options: DraftOptions) -> list[Pair]:
    """Prompts with answers that the target samples at temperature 1: see `answers_to_learn_from`
    for the errors."""
    return answers_to_learn_from(
        checkpoint, options.answers, options.tokens, options.seed, temperature=1.0
    )


def fresh_shape(target: Shape, layers: int, width: int) -> Shape:
    """The shape of a draft model from random weights. Raises `InvalidRequestError` for a width that
    is no multiple of the size of the target's heads."""
    size = target.head_width
    if width % size:
        raise InvalidRequestError(
            f"width is {width}; allowed are multiples of {size}, the size of the target's heads"
        )
    return replace(
        target,
        width=width,
        layers=layers,
        heads=width // size,
        kv_heads=None,
        head_size=size,
        hidden=16 * -(-8 * width // 48),
        is_tied=True,
    )


def read_rows(file: Path, tokenizer: HFTokenizer, tokens: int) -> list[Pair]:
    """The rows of a file: a prompt, a tab and an answer of at most `tokens` tokens, or a text,
    which is cut into parts of `TEXT_TOKENS` tokens without a prompt.

    Raises:
        InvalidRequestError: The file cannot be read, or has no text.
    """
    rows: list[Pair] = []
    end = [min(tokenizer.eos_ids)] if tokenizer.eos_ids else []
    for line in read_texts(file):
        before, tab, behind = line.partition("\t")
        text = tokenizer.encode(behind if tab else line, special=False)
        if tab:
            rows.append((rendered_prompt(tokenizer, before), (text + end)[:tokens]))
        else:
            parts = range(0, len(text), TEXT_TOKENS)
            rows += [([], text[start : start + TEXT_TOKENS]) for start in parts]
    rows = [row for row in rows if row[1] and len(row[0]) + len(row[1]) > 1]
    if not rows:
        raise InvalidRequestError(f"{file} has no text to learn from")
    return rows


def read_code(file: Path, tokenizer: HFTokenizer) -> list[Pair]:
    """The code of a file, with its line breaks, in parts of `TEXT_TOKENS` tokens without a prompt.

    Raises:
        InvalidRequestError: The file cannot be read, or has no code.
    """
    tokens = tokenizer.encode(read_text(file), special=False)
    if len(tokens) < 2:
        raise InvalidRequestError(f"{file} has no code to learn from")
    starts = range(0, len(tokens) - 1, TEXT_TOKENS)
    return [([], tokens[start : start + TEXT_TOKENS]) for start in starts]


def answer_rows(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Padded texts, `[batch, length]`, and the rows and columns whose next tokens are those of the
    answers."""
    tokens, is_answer = padded(pairs)
    row, column = is_answer[:, 1:].nonzero(as_tuple=True)
    return tokens, row, column


def draft_loss(
    draft: Transformer,
    target: Transformer,
    pairs: Sequence[Pair],
    objective: str,
    beta: float = 0.5,
) -> torch.Tensor:
    """The mean over answers of the mean over their tokens.

    Args:
        draft: The draft model, which is trained.
        target: The target, which a divergence reads.
        pairs: Prompts and answers.
        objective: "cross-entropy", or a divergence.
        beta: See `divergence`.
    """
    tokens, row, column = answer_rows(pairs)
    logits = draft(tokens, causal=True, output_rows=(row, column))
    if objective == "cross-entropy":
        losses = functional.cross_entropy(logits, tokens[row, column + 1], reduction="none")
    else:
        with torch.no_grad():
            expected = target(tokens, causal=True, output_rows=(row, column))
        losses = divergence(objective, expected, logits, beta)
    counts = torch.bincount(row, minlength=len(pairs))
    return (losses / counts[row]).sum() / (counts > 0).sum()
