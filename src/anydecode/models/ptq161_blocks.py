"""Learns the scales of matrices in PTQ161, one layer of a model after the other (arXiv:2502.13179).

Both the outputs of the original layer for its original inputs, and those for the inputs that the
quantised layers before it make, are targets of the quantised layer. Between two quantisations, a
low-rank update restores what the first one has damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from ml_dtypes import bfloat16
from torch import nn
from torch.nn import functional

from anydecode.kernels.blocks import BlockBackend
from anydecode.kernels.formats import dequantize, dequantize_rows
from anydecode.kernels.interface import Weight
from anydecode.kernels.ptq161 import num_salient, pack
from anydecode.models.network import Network

#: Learning rates of the scales of signs, and of those of outputs and inputs.
SIGN_RATE, RANK_ONE_RATE = 5e-4, 1e-3
#: Of the low-rank updates: their rank, their factor, the dropout of their inputs, the largest
#: learning rate, the share of steps until it is reached, and texts per step.
RANK, LORA_SCALE, DROPOUT, RESTORING_RATE, WARMUP, BATCH = 64, 16 / 64, 0.1, 1e-3, 0.05, 2
_MIN_ACTIVATION = 1e-5
_HALF = torch.float16


class Binarized(nn.Module):
    """A matrix with signs and codes, and the scales that are learned.

    Args:
        matrix: float32 `[out, in]`.
        largest: The largest absolute value of each input, float32 `[in]`. The inputs with the
            largest ones are salient.
    """

    def __init__(self, matrix: torch.Tensor, largest: torch.Tensor) -> None:
        super().__init__()
        count = num_salient(matrix.shape[1])
        ranked = torch.sort(largest.clamp(min=_MIN_ACTIVATION), descending=True, stable=True)
        self.salient = torch.sort(ranked.indices[:count]).values
        self.signed = torch.sort(ranked.indices[count:]).values
        values = matrix[:, self.signed]
        self.mean = values.mean(1, keepdim=True)
        self.signs = torch.where(values - self.mean >= 0, 1.0, -1.0)
        self.spread = nn.Parameter(values.abs().mean(1, keepdim=True))
        self.output_scale = nn.Parameter(torch.ones(len(matrix), 1))
        self.input_scale = nn.Parameter(torch.ones(1, len(self.signed)))
        self._round_salient(matrix[:, self.salient])
        self.order = torch.argsort(torch.cat((self.signed, self.salient)))

    def _round_salient(self, values: torch.Tensor) -> None:
        """Codes of four bits between the smallest and the largest value of each output."""
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        self.step = ((high - low) / 30).to(_HALF).float()
        self.middle = ((high + low) / 2).to(_HALF).float()
        step = torch.where(self.step == 0, 1.0, self.step)
        self.codes = (((values - self.middle) / step + 15) / 2).round().clamp(0, 15)
        self.coded = self.step * (2 * self.codes - 15) + self.middle

    def forward(self) -> torch.Tensor:
        """The matrix, float32 `[out, in]`."""
        signed = self.output_scale * self.input_scale * (self.spread * self.signs + self.mean)
        return torch.cat((signed, self.coded), 1)[:, self.order]

    def packed(self, name: str) -> Weight:
        """The weight in PTQ161."""
        scale = self.output_scale.detach()
        numbers = (scale * self.spread.detach(), scale * self.mean, self.step, self.middle)
        columns = np.zeros(len(self.order), bfloat16)
        scales = self.input_scale.detach()[0].numpy().astype(bfloat16)
        columns[self.signed.numpy()] = np.where(scales == 0, bfloat16(1e-30), scales)
        return pack(
            torch.cat(numbers, 1).numpy().astype(np.float16),
            (self.signs > 0).numpy(),
            self.codes.numpy().astype(np.uint8),
            columns,
            name,
        )


def distance(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared error and the angle between hidden states."""
    cosine = functional.cosine_similarity(found, target, dim=-1).abs().clamp(min=1e-6)
    return functional.mse_loss(found, target) - cosine.log().mean()


class RestoredBackend(BlockBackend):
    """A `BlockBackend` that adds to products low-rank updates of their matrices.

    Args:
        length: Tokens per text.
        updates: A factor `[rank, in_features]` and one `[out_features, rank]` by the name of the
            weight.
    """

    def __init__(
        self, length: int, updates: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__(length)
        self._updates = updates

    def linear(
        self, x: torch.Tensor, weight: Weight, bias: np.ndarray | None = None
    ) -> torch.Tensor:
        y = super().linear(x, weight, bias)
        if weight.name in self._updates:
            down, up = self._updates[weight.name]
            dropped = functional.dropout(x, DROPOUT)
            y = y + functional.linear(functional.linear(dropped, down), LORA_SCALE * up)
        return y


def restore(
    network: Network,
    quantized: Sequence[Weight],
    tokens: np.ndarray,
    steps: int,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Replace the matrices of the layers by those that they were quantised to, plus a low-rank
    update that is trained to predict the texts (Hu et al., arXiv:2106.09685). It leaves out the
    output projections of attention.

    Args:
        network: The model, with float32 matrices.
        quantized: The weights of its layers in PTQ161.
        tokens: The texts, int `[texts, length]`.
        steps: Steps of `BATCH` texts each.
        progress: Called with the steps that are done.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = {weight.name: torch.from_numpy(dequantize(weight)) for weight in quantized}
    outputs = {layer.output.weight.name for layer in network.weights.layers if layer.output}
    updates = {
        name: (
            nn.Parameter((2 * torch.rand(RANK, len(matrix[0]), generator=generator) - 1)
                         * len(matrix[0]) ** -0.5),
            nn.Parameter(torch.zeros(len(matrix), RANK)),
        )
        for name, matrix in matrices.items() if name not in outputs
    }  # fmt: skip
    factors = [factor for both in updates.values() for factor in both]
    optimizer = torch.optim.AdamW(factors, RESTORING_RATE, weight_decay=0.0)
    backend = RestoredBackend(tokens.shape[1], updates)
    backend.matrices = matrices
    texts = torch.from_numpy(tokens)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RESTORING_RATE * _share_of_rate(step / steps)
            batch = texts[torch.randint(len(texts), (min(BATCH, len(texts)),))]
            loss = text_loss(network, backend, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress(step + 1)
    for layer in network.weights.layers:
        for weight in layer.matrices:
            merged = matrices[weight.name]
            if weight.name in updates:
                down, up = updates[weight.name]
                merged = merged + LORA_SCALE * up.detach() @ down.detach()
            weight.data, weight.scale = merged.numpy(), 1.0


def _share_of_rate(done: float) -> float:
    """The learning rate after a share of the steps: a linear rise, then half a cosine."""
    return min(1.0, (done + 1e-3) / WARMUP) * 0.5 * (1 + math.cos(math.pi * done))


def text_loss(network: Network, backend: BlockBackend, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the tokens `[texts, length]` after the first."""
    embedded = dequantize_rows(network.weights.embedding, tokens.flatten().numpy())
    x = torch.from_numpy(embedded * np.float32(network.spec.embedding_scale))
    for index in range(network.spec.num_layers):
        x = network.layer(backend, x, index)
    logits = network.head(backend, x).view(*tokens.shape, -1)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def quantize_layers(
    network: Network,
    tokens: np.ndarray,
    epochs: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Weight]:
    """Quantise every matrix of the layers of a causal model.

    Args:
        network: The model.
        tokens: Texts to calibrate with, int `[texts, length]`.
        epochs: How often the scales of a layer are learned from all texts.
        progress: Called with the layers that are done.
    """
    texts, length = tokens.shape
    backend = BlockBackend(length)
    embedded = dequantize_rows(network.weights.embedding, tokens.ravel())
    states = torch.from_numpy(embedded * np.float32(network.spec.embedding_scale))
    exact = [*torch.split(states, length)]
    quantized = [*exact]
    for index in range(network.spec.num_layers):
        backend.largest, backend.matrices = {}, {}
        with torch.no_grad():
            targets = [network.layer(backend, x, index) for x in exact]
            largest = dict(backend.largest)
            shifted = [network.layer(backend, x, index) for x in quantized]
        modules = {
            weight.name: Binarized(torch.from_numpy(dequantize(weight)), largest[weight.name])
            for weight in network.weights.layers[index].matrices
        }
        _learn(
            network,
            backend,
            index,
            modules,
            quantized,
            [*zip(targets, shifted, strict=True)],
            epochs,
        )
        weights = [module.packed(name) for name, module in modules.items()]
        yield from weights
        backend.matrices = {weight.name: torch.from_numpy(dequantize(weight)) for weight in weights}
        with torch.no_grad():
            quantized = [network.layer(backend, x, index) for x in quantized]
        exact = targets
        progress(index + 1)


def _learn(
    network: Network,
    backend: BlockBackend,
    index: int,
    modules: dict[str, Binarized],
    inputs: list[torch.Tensor],
    targets: list[tuple[torch.Tensor, torch.Tensor]],
    epochs: int,
) -> None:
    """Learn the scales of the matrices of one layer."""
    groups = [
        {"params": [module.spread for module in modules.values()], "lr": SIGN_RATE},
        {
            "params": [
                scale
                for module in modules.values()
                for scale in (module.output_scale, module.input_scale)
            ],
            "lr": RANK_ONE_RATE,
        },
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for _ in range(epochs):
        for x, (target, shifted) in zip(inputs, targets, strict=True):
            backend.matrices = {name: module() for name, module in modules.items()}
            found = network.layer(backend, x, index)
            loss = distance(found, target) + distance(found, shifted)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
