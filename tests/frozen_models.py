"""A small random transformer whose weights are not trained, two texts for it, and small MLPs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from anydecode.training.small_mlps import SmallMlp
from anydecode.training.transformer import Shape, Transformer

#: Tokens and whether they are an answer's, `[2, 5]`.
TEXTS = (
    torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]),
    torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]).bool(),
)


def frozen_model() -> Transformer:
    """A model of 4 layers and 32 numbers per state."""
    torch.manual_seed(0)
    model = Transformer(Shape(50, width=32, layers=4, heads=2, hidden=48))
    return model.eval().requires_grad_(False)


def random_mlps(model: Transformer, layers: Iterable[int]) -> nn.ModuleDict:
    """Small MLPs of some layers, which add something."""
    mlps = nn.ModuleDict({str(one): SmallMlp(model.blocks[one].ff_norm, 8) for one in layers})
    for mlp in mlps.values():
        nn.init.normal_(mlp.down.weight)
    return mlps.requires_grad_(False)
