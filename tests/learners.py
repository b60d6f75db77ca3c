"""Drafters in training over the tiny model: random weights, texts with the target's states, and the
written files. Needs torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from anydecode.certification.oracles.speculative.state_drafters import TargetStates
from anydecode.certification.tiny import tiny_network
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.training.drafter import save_drafter
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.learner import Learner

CONFIG = {"max_position_embeddings": 256, "rope_theta": 10000.0}
MASK = 7


class TinyLearner:
    """A drafter of one recipe with random weights that bfloat16 holds, for two of three tokens.

    Attributes:
        target: The tiny model.
        tokens: A random text.
        batch: The text twice, with the target's states. The last three tokens are to be predicted.
    """

    def __init__(self, recipe: type[Learner], depth: int, length: int = 9) -> None:
        self.target = tiny_network(layers=6)
        num_tokens, head = self.target.spec.vocab_size, self.target.weights.head
        head.data[:] = torch.from_numpy(head.data).bfloat16().float().numpy()
        self.vocabulary = [token for token in range(num_tokens) if token % 3]
        torch.manual_seed(1)
        self.learner = recipe(self.target, self.vocabulary, depth, MASK)
        for parameter in self.learner.parameters():
            parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
        random = np.random.default_rng(2)
        self.tokens: list[int] = random.integers(0, num_tokens, length).tolist()
        self.batch = text_batch(self.target, self.tokens, recipe.taps(6))

    def checkpoint(self, folder: Path, has_head: bool = True) -> Checkpoint:
        """The drafter as written."""
        save_drafter(folder, self.learner, CONFIG, has_head)
        return load_checkpoint(folder)

    @torch.no_grad()
    def logits(self) -> dict[tuple[int, int], np.ndarray]:
        """The logits of the drafts by the number of tokens that they know, and step."""
        drafted = self.learner.draft(self.batch, torch.Generator().manual_seed(3))
        found = {}
        for step, (states, starts) in enumerate(zip(*drafted, strict=True)):
            places = starts.expand(states.shape[:2])[0].tolist()
            for state, start in zip(states[0], places, strict=True):
                if start + 1 + step < len(self.tokens):
                    previous = torch.tensor([self.tokens[start + 1 + step]])
                    logits = self.learner.logits(state[None], previous)
                    found[start + 2, step] = logits[0].numpy()
        return found

    def assert_equal(self, step: int, logits: np.ndarray, expected: np.ndarray) -> None:
        """Assert that logits are those of the oracle, which are of all tokens."""
        kept = expected if len(expected) == len(self.vocabulary) else expected[self.vocabulary]
        assert np.allclose(logits, kept, atol=3e-4 * (step + 1) * np.abs(kept).max()), step


def text_batch(target: Network, tokens: list[int], taps: tuple[int, ...]) -> DraftBatch:
    """A text twice, with the states of the target after `taps` layers."""
    forward = TargetStates(target)
    states = [forward.states(token) for token in tokens]
    final = np.stack([forward.normed(layers[-1]) for layers in states])
    read = np.stack([np.concatenate([one[tap] for tap in taps] or [final[0]]) for one in states])
    is_answer = torch.zeros(2, len(tokens), dtype=torch.bool)
    is_answer[:, -8:-1] = True

    def twice(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.float32)).expand(2, -1, -1)

    return DraftBatch(torch.tensor([tokens, tokens]), twice(read), twice(final), is_answer)
