"""Hydra: heads on the target's last state, each of which also reads the tokens drafted before it.

Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding", arXiv:2402.05109.
The last matrix of every head is the target's head. Layout: that of zankner/Hydra, which
`models/hydra.py` opens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.errors import UnsupportedCombinationError
from anydecode.models.network import Network
from anydecode.training.drafter_data import DraftBatch
from anydecode.training.drafters.layers import DraftLayer, as_tensor, copy_norm, layer_shape
from anydecode.training.drafters.learner import Drafted, Files, Learner
from anydecode.training.drafters.unrolled import UnrolledAttention
from anydecode.training.transformer import Norm


class Block(nn.Module):
    """R x + silu(W x + b), where R is the identity unless the numbers of inputs differ from
    `width`: then it starts as that of the first `width` inputs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.res_connection = nn.Identity() if inputs == width else nn.Linear(inputs, width)
        if isinstance(self.res_connection, nn.Linear):
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.res_connection(x) + functional.silu(self.linear(x))
        return output


class Hydra(Learner):
    """`depth` heads of two blocks."""

    recipe = "hydra"
    key = "hydra"
    default_depth = 4
    default_rate = 1e-3

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        width = self.width
        # The numbers are those of published files, where each block stands behind a dropout.
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                OrderedDict([("1", Block((head + 2) * width, width)), ("3", Block(width, width))])
            )
            for head in range(depth)
        )
        self._target = target

    @property
    def max_drafts(self) -> int:
        return self.depth

    def prefix(self, final: torch.Tensor) -> torch.Tensor:
        """What the heads read of the target's states."""
        return final

    def draft(self, batch: DraftBatch, random: torch.Generator) -> Drafted:
        """Row t of head i reads the target's state at position t and the tokens at t + 1 to t + 1 +
        i."""
        rows = batch.tokens.shape[1] - 1
        inputs = [self.prefix(batch.final[:, :-1])]
        embedded = self.embed(functional.pad(batch.tokens, (0, self.depth)))
        states = []
        for step, blocks in enumerate(self.hydra_mlp):
            inputs.append(embedded[:, 1 + step : 1 + step + rows])
            states.append(blocks(torch.cat(inputs, -1)))
        return Drafted(states, [torch.arange(rows)] * self.depth)

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config = {
            "hydra_num_heads": self.depth,
            "hydra_num_layers": 2,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "vocab_size": self.num_tokens,
            "torch_dtype": "bfloat16",
        }
        tensors = dict(self.state_dict())
        if not has_head:
            return Files(config, {**tensors, "token_map": torch.tensor(self.vocabulary)})
        head = as_tensor(self._target.weights.head)
        for number in range(self.depth):
            name = f"hydra_lm_head.{number}.1"
            tensors |= {f"{name}.weight": head, f"{name}.bias": torch.zeros(len(head))}
        return Files(config, tensors)


class Prefix(nn.Module):
    """The layer of Hydra++ and its norm, which start as the target's last ones."""

    def __init__(self, target: Network) -> None:
        super().__init__()
        shape = layer_shape(target)
        layer = DraftLayer(shape, shape.width)
        layer.copy(target.weights.layers[-1])
        self.layers = nn.ModuleList([layer])
        self.norm = Norm(shape.width, shape.norm_eps)
        copy_norm(self.norm, target.weights.final_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        x = x + UnrolledAttention(layer.self_attn).step(layer.input_layernorm(x))
        output: torch.Tensor = self.norm(layer.add_mlp(x))
        return output


class HydraPlus(Hydra):
    """Hydra++: the heads read the output of a layer with keys and values of its own."""

    recipe = "hydra++"

    def __init__(self, target: Network, vocabulary: list[int], depth: int, mask: int) -> None:
        super().__init__(target, vocabulary, depth, mask)
        layers = target.spec.layers
        first, last = layers[0].rope, layers[-1].rope
        is_same = first and last and np.array_equal(first.frequencies, last.frequencies)
        if layers[0].qk_norm or not is_same:  # the engine runs it as the first
            raise UnsupportedCombinationError(
                "hydra++ needs a model without norms of queries and keys, whose first and last"
                " layers rotate alike"
            )
        # As it is spelt in published files.
        self.prefix_embeding_layer = Prefix(target)

    def prefix(self, final: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.prefix_embeding_layer(final)
        return output

    def files(self, target: dict[str, Any], has_head: bool) -> Files:
        config, tensors = super().files(target, has_head)
        return Files({**config, "hydra_head_arch": "prefix-mlp"}, tensors)
