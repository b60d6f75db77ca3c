"""Training of a model whose blocks of Jacobi iteration settle in fewer passes, as `ceed` needs
(Song et al., "CEED-VLA", arXiv:2506.13725; for texts Kou et al., "CLLMs: Consistency Large Language
Models", arXiv:2403.00835).

Jacobi iteration of the model over blocks of its own answers gives a trajectory of states for each
block, which ends at the tokens of plain decoding. The trained model is to predict from any state
what it predicts itself from the last one: the Kullback-Leibler divergence from the latter, which is
held fixed, at all positions of the block. A cross-entropy of the tokens of plain decoding keeps it
to the text of the model. A low-rank adapter is trained and merged into the model that is written.

A run has a folder, from which it can be resumed: `state.pt`, `log.json`, and `model/`, the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.decoders.depth.ceed import Ceed
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.training.block_adapter import Pair
from anydecode.training.consistency import divergence
from anydecode.training.low_rank_run import LowRankRecipe, LowRankRun
from anydecode.training.own_answers import padded
from anydecode.training.transformer import Transformer

#: Maximum number of held-out blocks that are measured.
MAX_HELD_OUT = 16

#: The text before a block; its states, all but the last token of each; the tokens of plain
#: decoding.
Trajectory = tuple[list[int], list[list[int]], list[int]]


@dataclass(frozen=True)
class BlockRecipe(LowRankRecipe):
    """How a model is trained. The texts of a step are blocks.

    Attributes:
        block: Tokens per block.
        text_weight: Weight of the cross-entropy of the tokens of plain decoding.
    """

    answers: int = 64
    rate: float = 3e-4
    block: int = 16
    text_weight: float = 1.0
    counts = ("tokens", "batch", "rank", "block")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_weight < 0:
            raise InvalidRequestError("text_weight must be 0 or more")


def trajectories(
    checkpoint: Checkpoint, pairs: Sequence[Pair], block: int, seed: int
) -> list[list[Trajectory]]:
    """The trajectories of the blocks of each answer, by Jacobi iteration of `checkpoint` at
    temperature 0. What a block has behind the end of the answer is left out."""
    found: list[list[Trajectory]] = []
    with LLM(checkpoint.path, threads=torch.get_num_threads()) as llm:
        for number, (prompt, answer) in enumerate(pairs):
            generation = llm.generate(
                prompt,
                decoder=Ceed(block, block),
                max_tokens=len(answer),
                temperature=0.0,
                seed=seed + number,
                trace=True,
            )
            text, blocks = [*prompt, *generation.tokens], list[Trajectory]()
            states: list[list[int]] = []
            for entry in generation.trace or ():
                if not entry["tokens"]:
                    states.append(entry["drafted"])
                    continue
                start = entry["position"]
                tokens = text[start : start + len(entry["tokens"])]
                blocks.append((text[:start], [one[: len(tokens) - 1] for one in states], tokens))
                states = []
            found.append(blocks)
    return found


def block_logits(
    model: Transformer, before: Sequence[Sequence[int]], states: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The logits `[rows, vocab]` that predict the tokens of blocks, from states of all of their
    tokens but the last.

    Args:
        model: The model.
        before: The text before each block.
        states: The tokens of each block but the last.
    """
    pairs = [(list(text[:-1]), [text[-1], *one]) for text, one in zip(before, states, strict=True)]
    tokens, is_read = padded(pairs)
    rows = is_read.nonzero(as_tuple=True)
    return model(tokens, causal=True, output_rows=rows)


def block_loss(
    model: Transformer,
    blocks: Sequence[Trajectory],
    states: Sequence[Sequence[int]],
    text_weight: float,
) -> torch.Tensor:
    """The mean over tokens of KL(model behind the last state || model behind `states`) and of the
    cross-entropy of the tokens of plain decoding, times `text_weight`."""
    before = [text for text, _, _ in blocks]
    last = block_logits(model, before, [tokens[:-1] for _, _, tokens in blocks])
    targets = torch.tensor([token for _, _, tokens in blocks for token in tokens])
    found = block_logits(model, before, states)
    apart = divergence(last.detach().log_softmax(-1), found.log_softmax(-1))
    return apart + text_weight * functional.cross_entropy(last, targets)


@torch.no_grad()
def settle(model: Transformer, block: Trajectory) -> tuple[int, list[int]]:
    """Jacobi iteration from the block's first state, at temperature 0: the number of passes until
    nothing changes, and the tokens."""
    text, states, tokens = block
    fed, num_passes = states[0], 0
    while True:
        found = block_logits(model, [text], [fed]).argmax(-1).tolist()
        num_passes += 1
        if found[:-1] == fed or num_passes >= len(tokens):
            return num_passes, found
        fed = found[:-1]


class BlockRun(LowRankRun):
    """A training run in a folder.

    Args:
        checkpoint: The model to start from.
        folder: The run's folder: new, or that of an interrupted run to resume.
        recipe: How to train.

    Attributes:
        blocks: The trajectories of the blocks of each answer, those of held-out ones first.

    Raises:
        CheckpointError: The model is no plain Llama, or its tokenizer cannot be written.
        InvalidRequestError: There are too few answers, or the folder holds another run.
    """

    recipe: BlockRecipe
    differs_in = "another rank, block or model"
    data = ("pairs", "blocks")
    blocks: list[list[Trajectory]]

    def __init__(self, checkpoint: Checkpoint, folder: Path, recipe: BlockRecipe) -> None:
        super().__init__(checkpoint, folder, recipe)
        self._adapt([recipe.block])

    def _new_pairs(self, checkpoint: Checkpoint) -> list[Pair]:
        pairs = super()._new_pairs(checkpoint)
        self.blocks = trajectories(checkpoint, pairs, self.recipe.block, self.recipe.seed)
        return pairs

    def _update(self) -> float:
        random = Random(f"{self.recipe.seed}/blocks/{self.step}")
        trained = [one for blocks in self.blocks[len(self._held_out) :] for one in blocks]
        blocks = random.sample(trained, min(self.recipe.batch, len(trained)))
        states = [random.choice(states) for _, states, _ in blocks]
        return self._learn(block_loss(self.model, blocks, states, self.recipe.text_weight))

    def _evaluate(self) -> None:
        """Record, of held-out blocks, the tokens per pass of Jacobi iteration, and how many of its
        tokens are those of the model before the training."""
        held_out = [one for blocks in self.blocks[: len(self._held_out)] for one in blocks]
        num_passes = num_tokens = num_equal = 0
        for block in held_out[:MAX_HELD_OUT]:
            passes, found = settle(self.model, block)
            num_passes, num_tokens = num_passes + passes, num_tokens + len(found)
            num_equal += sum(a == b for a, b in zip(found, block[2], strict=True))
        shares = {"tokens per pass": num_tokens / num_passes, "agreement": num_equal / num_tokens}
        self._record(held_out={name: round(value, 4) for name, value in shares.items()})

    def results(self) -> list[dict[str, float]]:
        """The tokens per pass and the agreement of held-out blocks, in the order in which they were
        measured."""
        return [entry["held_out"] for entry in self.history if "held_out" in entry]
