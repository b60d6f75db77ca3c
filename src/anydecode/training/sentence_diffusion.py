"""Training for the decoder `dglm` (Lovelace et al., "Diffusion Guided Language Modeling",
arXiv:2408.04220): a diffusion model of sentence embeddings, a generator of soft prompts, and a
language model that follows them.

Texts are cut into prompts and continuations. The diffusion model learns the embeddings of the
continuations by those of the prompts. The generator makes a soft prompt of the noisy embedding of a
continuation, and the language model, which is adapted by low-rank matrices, learns to write the
continuation behind the prompt and the soft prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_files import fingerprint
from anydecode.models.sentence_diffusion import (
    FILE_NAME,
    LEVEL_SCALE,
    NUM_WAVES,
    ResidualMlp,
    SentenceDiffusion,
)
from anydecode.training.block_adapter import Pair, add_low_rank, merged_weights, open_llama
from anydecode.training.checkpoint import save_nested_llama, writable_tokenizer
from anydecode.training.run import check_budget
from anydecode.training.weight_run import WeightRun

#: How often the denoiser learns to do without the prompt.
DROPPED = 0.1
#: The share of the proposal's variance that `dglm` keeps by default, at which texts are evaluated.
USED_LEVEL = 0.95
#: By how much the ratio of signal and noise (of their deviations) in the generator's inputs is more
#: than in the denoiser's: the noise schedule of the authors' code, for proposals with little noise.
TEXT_SCALE = 3.0
#: The smallest standard deviation by which embeddings are divided.
MIN_DEVIATION = 1e-3


@dataclass(frozen=True)
class SentenceRecipe:
    """How the parts are trained. One of `minutes` and `steps` is the budget.

    Attributes:
        minutes: See above.
        steps: See above.
        cuts: How many times each text is cut, at a random place.
        tokens: Maximum number of tokens of a text; the rest is left out.
        rows: Length of the soft prompt.
        width: Width of the networks, whose blocks are twice as wide within.
        blocks: Blocks of each network.
        rank: The rank of the adapter of the language model.
        batch: Texts per step.
        rate: Peak learning rate.
        seed: Random seed.
        save_seconds: Seconds between saved states.
    """

    minutes: float | None = None
    steps: int | None = None
    cuts: int = 4
    tokens: int = 96
    rows: int = 8
    width: int = 512
    blocks: int = 3
    rank: int = 16
    batch: int = 16
    rate: float = 1e-3
    seed: int = 0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_budget(self)
        counts = (self.cuts, self.rows, self.width, self.blocks, self.rank, self.batch)
        if min(self.minutes or self.steps or 0, *counts) <= 0 or self.tokens < 2:
            raise InvalidRequestError(
                "minutes or steps, cuts, rows, width, blocks, rank and batch must be more than 0,"
                " and tokens 2 or more"
            )


class _Block(nn.Module):
    """See `ResidualMlp`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(functional.silu(self.up(x)))
        return x + added


class _Network(nn.Module):
    """See `ResidualMlp`, whose names those of the tensors are."""

    def __init__(self, inputs: int, outputs: int, recipe: SentenceRecipe) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, recipe.width)
        self.blocks = nn.ModuleList(_Block(recipe.width) for _ in range(recipe.blocks))
        self.last = nn.Linear(recipe.width, outputs)
        nn.init.normal_(self.last.weight, std=0.02)
        nn.init.zeros_(self.last.bias)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.cat(inputs, -1))
        for block in self.blocks:
            x = block(x)
        outputs: torch.Tensor = self.last(x)
        return outputs

    def trained(self) -> ResidualMlp:
        """The network for the decoder."""
        tensors = self.state_dict().items()
        return ResidualMlp({name: one.numpy().astype(np.float64) for name, one in tensors})


class SentenceRun(WeightRun):
    """A training run in a folder, which becomes that of a model.

    Args:
        checkpoint: The language model.
        encoder: The sentence encoder.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.
        texts: The texts of a new run. An eighth of them is held out.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: There are fewer than two texts of two tokens or more, texts do not fit
            the model, or the folder holds another run.
    """

    differs_in = "another model, encoder or size"
    data = ("pairs", "num_held_out", "contexts", "sentences")
    recipe: SentenceRecipe
    #: Prompts and continuations, the held-out ones first.
    pairs: list[Pair]
    num_held_out: int
    #: Their embeddings, float32 `[pairs, embedding_size]`.
    contexts: torch.Tensor
    sentences: torch.Tensor

    def __init__(
        self,
        checkpoint: Checkpoint,
        encoder: LLM,
        folder: Path,
        recipe: SentenceRecipe,
        texts: Sequence[str],
    ) -> None:
        super().__init__(folder, recipe)
        tokenizer = writable_tokenizer(checkpoint)
        if not encoder.model.spec.is_encoder:
            raise InvalidRequestError(f"{encoder.model.name} is no sentence encoder")
        self.tokenizer, self.model = tokenizer, open_llama(checkpoint)
        torch.manual_seed(recipe.seed)
        size, width = encoder.model.spec.hidden_size, self.model.shape.width
        adapted = add_low_rank(self.model, recipe.rank)
        self.denoiser = _Network(2 * size + 2 * NUM_WAVES, size, recipe)
        self.prompter = _Network(size + 2 * NUM_WAVES, recipe.rows * width, recipe)
        self.unconditional = nn.Parameter(torch.randn(size))
        trained = [*adapted, *self.denoiser.parameters(), *self.prompter.parameters()]
        trained.append(self.unconditional)
        optimizer = torch.optim.AdamW(trained, recipe.rate, (0.9, 0.98), weight_decay=0.01)
        if not self._resume(trained, optimizer, [list(one.shape) for one in trained]):
            self._cut(texts)
            self.contexts, self.sentences = self._embedded(encoder)
        learned = self.sentences[self.num_held_out :]
        self.mean = learned.mean(0)
        self.deviation = learned.std(0, correction=0).clamp_min(MIN_DEVIATION)

    def _cut(self, texts: Sequence[str]) -> None:
        """Cut the texts into pairs."""
        recipe, random = self.recipe, Random(f"{self.recipe.seed}/cuts")
        longest = min(recipe.tokens, self.model.shape.max_positions - recipe.rows - 1)
        ends = sorted(self.tokenizer.eos_ids)[:1]
        encoded = [self.tokenizer.encode(text) for text in texts]
        usable = [tokens for tokens in encoded if len(tokens) > 1]
        if len(usable) < 2 or longest < 2:
            raise InvalidRequestError(
                f"training needs at least 2 texts of 2 tokens or more, not {len(usable)}, and a"
                f" model of more than {recipe.rows + 2} positions"
            )
        random.shuffle(usable)
        self.pairs = []
        self.num_held_out = max(1, len(usable) // 8) * recipe.cuts
        for tokens in usable:
            tokens = [*tokens, *ends][:longest]
            for _ in range(recipe.cuts):
                at = random.randint(1, min(len(tokens), longest) - 1)
                self.pairs.append((tokens[:at], tokens[at:]))

    def _embedded(self, encoder: LLM) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings of the prompts and of the continuations."""

        def embedded(parts: list[list[int]]) -> torch.Tensor:
            texts = [self.tokenizer.decode(part) or " " for part in parts]
            return torch.tensor(encoder.embed(texts, truncate_prompt_tokens=-1))

        prompts, continuations = zip(*self.pairs, strict=True)
        return embedded(list(prompts)), embedded(list(continuations))

    def _normed(self, embeddings: torch.Tensor) -> torch.Tensor:
        return (embeddings - self.mean) / self.deviation

    def _text_loss(
        self, rows: list[int], levels: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """The mean loss of the tokens of continuations behind soft prompts.

        Args:
            rows: The pairs.
            levels: The shares of the variance of their embeddings, `[rows]`.
            noise: What is added to these, `[rows, embedding_size]`.
        """
        noisy = _noisy(self._normed(self.sentences[rows]), levels, noise)
        soft = self.prompter(noisy, waves(levels)).unflatten(-1, (self.recipe.rows, -1))
        pairs = [self.pairs[row] for row in rows]
        longest = max(len(prompt) + len(end) for prompt, end in pairs) + self.recipe.rows
        embed = self.model.transformer["wte"]
        inputs, targets, index = [], [], []
        for row, (prompt, end) in enumerate(pairs):
            parts = [embed(torch.tensor(prompt)), soft[row], embed(torch.tensor(end))]
            inputs.append(
                functional.pad(torch.cat(parts), (0, 0, 0, longest - sum(map(len, parts))))
            )
            start = len(prompt) + self.recipe.rows - 1
            index += [(row, start + place) for place in range(len(end))]
            targets += end
        first, second = torch.tensor(index).T
        states = self.model.states(torch.stack(inputs), causal=True, output_rows=(first, second))
        return functional.cross_entropy(self.model.head(states), torch.tensor(targets))

    def _velocity_loss(
        self, rows: list[int], levels: torch.Tensor, noise: torch.Tensor, is_dropped: torch.Tensor
    ) -> torch.Tensor:
        """The mean squared error of the denoiser; arguments as for `_text_loss`, and which prompts
        are not read, bool `[rows]`."""
        clean = self._normed(self.sentences[rows])
        context = torch.where(
            is_dropped[:, None], self.unconditional, self._normed(self.contexts[rows])
        )
        found = self.denoiser(_noisy(clean, levels, noise), context, waves(levels))
        velocity = levels.sqrt()[:, None] * noise - (1 - levels).sqrt()[:, None] * clean
        return functional.mse_loss(found, velocity)

    def _update(self) -> float:
        recipe = self.recipe
        random = Random(f"{recipe.seed}/sentences/{self.step}")
        generator = torch.Generator().manual_seed(random.getrandbits(62))
        count = min(recipe.batch, len(self.pairs) - self.num_held_out)
        rows = random.sample(range(self.num_held_out, len(self.pairs)), count)
        shape = (count, self.sentences.shape[1])
        levels = _scaled(_levels(count, generator), TEXT_SCALE)
        text = self._text_loss(rows, levels, torch.randn(shape, generator=generator))
        is_dropped = torch.rand(count, generator=generator) < DROPPED
        velocity = self._velocity_loss(
            rows, _levels(count, generator), torch.randn(shape, generator=generator), is_dropped
        )
        return self._learn(text + velocity)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The losses of held-out texts: of the tokens behind the soft prompt of the text's own
        embedding ("text") and behind that of noise ("text of noise"), and of the denoiser."""
        generator = torch.Generator().manual_seed(0)
        sums = {"text": 0.0, "text of noise": 0.0, "velocity": 0.0}
        for start in range(0, self.num_held_out, self.recipe.batch):
            rows = list(range(start, min(start + self.recipe.batch, self.num_held_out)))
            noise = torch.randn(len(rows), self.sentences.shape[1], generator=generator)
            levels = _levels(len(rows), generator)
            used = torch.full_like(levels, USED_LEVEL)
            none = torch.zeros(len(rows), dtype=torch.bool)
            for name, loss in (
                ("text", self._text_loss(rows, used, noise)),
                ("text of noise", self._text_loss(rows, 0 * levels, noise)),
                ("velocity", self._velocity_loss(rows, levels, noise, none)),
            ):
                sums[name] += float(loss) * len(rows)
        return {name: round(total / self.num_held_out, 4) for name, total in sums.items()}

    def _evaluate(self) -> None:
        self._record(held_out=self.evaluate())

    def parts(self) -> SentenceDiffusion:
        """The parts as they are now."""
        shape = self.model.shape
        norm = self.model.state_dict()["transformer.ln_f.weight"].to(torch.bfloat16).float().numpy()
        vectors = (self.mean, self.deviation, self.unconditional.detach())
        mean, deviation, unconditional = (one.numpy().astype(np.float64) for one in vectors)
        return SentenceDiffusion(
            self.denoiser.trained(),
            self.prompter.trained(),
            mean,
            deviation,
            unconditional,
            fingerprint(shape.layers, shape.width, shape.vocab, norm),
        )

    def _write(self) -> None:
        weights = merged_weights(self.model)
        save_nested_llama(self.folder, weights, self.model.shape, self.tokenizer)
        self.parts().save(self.folder / FILE_NAME)


def waves(levels: torch.Tensor) -> torch.Tensor:
    """See `level_features`; `[rows]` to `[rows, 2 * NUM_WAVES]`."""
    rates = 10_000.0 ** (-torch.arange(NUM_WAVES) / (NUM_WAVES - 1))
    angles = LEVEL_SCALE * levels[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def _levels(count: int, generator: torch.Generator) -> torch.Tensor:
    """The shares of the signal's variance at evenly distributed times, `[count]`."""
    times = torch.rand(count, generator=generator)
    return (0.5 * math.pi * times).cos() ** 2


def _scaled(levels: torch.Tensor, scale: float) -> torch.Tensor:
    """The shares of the signal's variance if its deviation is `scale` times as large."""
    signal = scale**2 * levels
    return signal / (signal + 1 - levels)


def _noisy(clean: torch.Tensor, levels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return levels.sqrt()[:, None] * clean + (1 - levels).sqrt()[:, None] * noise
