"""The drafters of EESD and Kangaroo: an early exit of the target, with one trained layer.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling
Control Mechanism", arXiv:2406.03853. The layer learns from the target's own texts and distributions
(self-distillation). Kangaroo's (Liu et al., arXiv:2404.18911) is an adapter without an MLP behind
fewer layers. Layout: that of `models/early_exit.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, copy_norm, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner, vocabulary_tensors
from anydecode.training.drafters.unrolled import UnrolledAttention
from anydecode.training.transformer import Norm


class EarlyExit(Learner):
    """A layer that starts as the target's last one, and a norm that starts as the target's. At
    every depth of a draft it reads states of the target's own layers, so that one step is
    trained."""

    recipe = "early-exit"
    key = "eesd"
    default_depth = 1
    default_rate = 5e-4
    decoder = "speculative-sampling:size={0}"
    #: Whether the trained layer has an MLP.
    has_mlp: ClassVar[bool] = True

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        if depth != 1:
            raise UnsupportedCombinationError(
                f"{self.recipe} is trained for depth=1, not {depth}: every draft has the states"
                " that the target's layers compute for it"
            )
        super().__init__(target, vocabulary, depth, mask)
        self.shape = layer_shape(target)
        (self.exit_after,) = self.taps(target.spec.num_layers)
        self.exit_layer = DraftLayer(self.shape, self.width)
        self.exit_layer.copy(target.weights.layers[-1])
        if not self.has_mlp:
            del self.exit_layer.mlp, self.exit_layer.post_attention_layernorm
        self.exit_norm = Norm(self.width, self.shape.norm_eps)
        copy_norm(self.exit_norm, target.weights.final_norm)

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        """The state at the exit, behind a sixth of the layers."""
        return _exit(num_layers, 6)

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t reads the target's state at position t and predicts the token at t + 1."""
        layer, x = self.exit_layer, batch.taps
        x = x + UnrolledAttention(layer.self_attn).step(layer.input_layernorm(x))
        states = self.exit_norm(layer.add_mlp(x) if self.has_mlp else x)
        return Drafted([states], [torch.arange(x.shape[1]) - 1])

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "architectures": ["EarlyExitDrafter"],
            **self.shape.config(target, 1),
            "vocab_size": self.num_tokens,
            "draft_vocab_size": len(self.vocabulary),
            "exit_after": self.exit_after,
        }
        tensors = {**self.state_dict(), **vocabulary_tensors(self.vocabulary, self.num_tokens)}
        if has_head:
            tensors["lm_head.weight"] = self.head
        return Files(config, tensors)


class KangarooAdapter(EarlyExit):
    """The attention of a layer and two norms."""

    recipe = "kangaroo"
    key = "kangaroo"
    has_mlp = False

    @staticmethod
    def taps(num_layers: int) -> tuple[int, ...]:
        """The state at the exit, behind a tenth of the layers: of 30 layers three."""
        return _exit(num_layers, 10)


def _exit(num_layers: int, part: int) -> tuple[int, ...]:
    """An exit behind one of so many layers."""
    if num_layers < 2:
        raise UnsupportedCombinationError(
            f"an early exit leaves out layers of a model with at least 2, not {num_layers}"
        )
    return (max(1, num_layers // part),)
