"""DSpark: DFlash whose slots depend on the token before, and predict whether they are accepted
(arXiv:2607.05147). Layout: that of speculators, which `models/block_drafters.py` opens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anydecode.models.network import Network
from anydecode.training.drafters.dflash import DFlash
from anydecode.training.drafters.learner import Files

#: Rank of the bias of the logits by the token before.
RANK = 64


class MarkovHead(nn.Module):
    """A bias `[head rows]` of the logits by the token before; at first 0."""

    def __init__(self, num_tokens: int, head_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(num_tokens, RANK)
        self.markov_w2 = nn.Linear(RANK, head_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=RANK**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """A score of a slot, at first 0, from its state and what the Markov head reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width + RANK, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class DSpark(DFlash):
    """DFlash whose first slot predicts too, with a Markov head and a confidence head."""

    recipe = "dspark"
    from_anchor = True
    kind = ("dspark", "DSparkSpeculator")

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        self.markov_head = MarkovHead(self.num_tokens, len(vocabulary))
        self.confidence_head = ConfidenceHead(self.width)

    def logits(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        markov = self.markov_head
        bias = markov.markov_w2(markov.markov_w1(previous))
        return super().logits(states, previous) + bias.float()

    def confidence(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """The logits of the probabilities of acceptance, `[rows]`. The slots' states are not
        trained by it."""
        features = [states.detach(), self.markov_head.markov_w1(previous).detach()]
        scores: torch.Tensor = self.confidence_head.proj(torch.cat(features, -1))[:, 0]
        return scores.float()

    def extra_loss(
        self,
        states: torch.Tensor,
        final: torch.Tensor,
        previous: torch.Tensor,
        acceptance: torch.Tensor,
    ) -> torch.Tensor:
        """The cross entropy of the predicted acceptance."""
        scores = self.confidence(states, previous)
        return functional.binary_cross_entropy_with_logits(
            scores, acceptance.clamp(0, 1), reduction="none"
        )

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config, tensors = super().files(target, has_head)
        heads = {
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return Files({**config, **heads}, tensors)
