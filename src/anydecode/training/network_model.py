"""Any diffusion model that the engine opens, in torch: the engine's own network, computed by a
backend through which gradients flow, with low-rank updates of its matrices (LoRA, Hu et al.,
arXiv:2106.09685), which are trained.

Routers, routed experts, norms, embeddings, the head, and what depends on the time or on the last
predictions alone stay as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anydecode.models.lora import layer_linears
from anydecode.models.network import Experts, Network
from anydecode.models.spec import ModelSpec
from anydecode.training.gradient_backend import FrozenNetwork, GradientBackend, Stored, TextRows
from anydecode.training.transformer import CanvasShape

#: The blocks in which a model is trained that denoises a sliding window (WeDLM): its window.
WINDOW = 16


class NetworkModel(nn.Module):
    """A network with an adapter, which returns logits: `[batch, length]` tokens to `[batch, length,
    vocab]`.

    Args:
        network: The network.
        rank: The rank of the updates.
        seed: Of their initial values; the updates are zero at first.
        is_ordered: See `CanvasShape`.

    Attributes:
        shape: How rows see and predict positions.
        names: The names of the matrices that are updated.
    """

    def __init__(
        self, network: Network, rank: int, seed: int = 0, *, is_ordered: bool = False
    ) -> None:
        super().__init__()
        spec = network.spec
        self.shape = CanvasShape(
            spec.vocab_size,
            logit_shift=spec.logit_shift,
            block_size=WINDOW if is_ordered else spec.block_size,
            has_prompt_block=spec.has_prompt_block,
            has_causal_context=spec.has_causal_context or is_ordered,
            context_predicts_next=spec.context_predicts_next,
            is_ordered=is_ordered,
        )
        self._frozen = FrozenNetwork(network)
        generator, self.names = torch.Generator().manual_seed(seed), []
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for layer in network.weights.layers:
            router = layer.mlp.router if isinstance(layer.mlp, Experts) else None
            for linear in layer_linears(layer):
                if linear is not router:
                    rows, columns = linear.weight.out_features, linear.weight.in_features
                    down = torch.randn(rank, columns, generator=generator) * columns**-0.5
                    self.names.append(linear.weight.name)
                    self.down.append(nn.Parameter(down))
                    self.up.append(nn.Parameter(torch.zeros(rows, rank)))

    @property
    def network(self) -> Network:
        """The network without the adapter."""
        return self._frozen.network

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return self.network.spec

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        causal: bool = False,
        output_rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of all positions, or of selected ones; arguments as those of
        `Transformer`. `visible` may also be `[batch, length, length]`."""
        count, length = tokens.shape
        at = torch.arange(length) if positions is None else positions
        if visible is None:
            visible = torch.ones(length, length, dtype=torch.bool)
            visible = visible.tril() if causal else visible
        seen = visible if visible.dim() == 3 else visible[None]
        x = self._run(self.network, self._embedded(tokens), TextRows(count, at, seen, at))
        return self._logits(self.network, x if output_rows is None else x[output_rows])

    def denoised(
        self,
        tokens: torch.Tensor,
        noised: torch.Tensor,
        time: float | None = None,
        expected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of a noised canvas, `[batch, canvas, vocab]`.

        Args:
            tokens: Prompts of one length with their clean answers, `[batch, length]`. Of a model
                with blocks, each block is read after the clean text before it.
            noised: The noised answers, `[batch, canvas]`.
            time: What the embedding of times receives, for a model that has one; the context of a
                block is at time 0.
            expected: The expected embeddings of the last pass over the canvas, `[batch, canvas,
                hidden_size]`, for a model that reads them; None in the first one.
        """
        start, size = tokens.shape[1] - noised.shape[1], self.shape.block_size
        network = self.network if time is None else self.network.at_time(time)
        if size is None:
            length = tokens.shape[1]
            at, seen = torch.arange(length), torch.ones(1, length, length, dtype=torch.bool)
            x = self._embedded(torch.cat([tokens[:, :start], noised], 1))
            x = self._run(network, x, TextRows(len(tokens), at, seen, at))
            return self._logits(network, x[:, start:])
        if time is None and self.spec.has_canvas:
            network = network.canvas_layers()
        stored, clean = Stored(), torch.arange(tokens.shape[1])
        context = TextRows(len(tokens), clean, (clean[:, None] >= clean)[None], clean, None, stored)
        self._run(self.network, self._embedded(tokens), context)
        at = clean[start:]
        starts = start + (at - start) // size * size
        seen = torch.cat([clean < starts[:, None], starts[:, None] == starts], 1)[None]
        canvas = TextRows(len(tokens), at, seen, torch.cat([clean, at]), starts, stored)
        x = self._canvas_inputs(noised, expected)
        return self._logits(network, self._run(network, x, canvas))

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """The mean embeddings under the distributions of logits, `[..., hidden_size]`."""
        table = self._frozen.matrix(self.network.weights.embedding)
        return logits.softmax(-1) @ table * self.spec.embedding_scale

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self._frozen.matrix(self.network.weights.embedding)
        return functional.embedding(tokens, table) * self.spec.embedding_scale

    def _canvas_inputs(self, tokens: torch.Tensor, expected: torch.Tensor | None) -> torch.Tensor:
        """What rows of a canvas read, `[batch, canvas, hidden_size]`."""
        embedded, weights = self._embedded(tokens), self.network.weights.self_conditioning
        if weights is None:
            return embedded
        given = None if expected is None else expected.flatten(0, 1).numpy()
        inputs = weights.inputs(embedded.flatten(0, 1).numpy(), given, self.spec)
        return torch.from_numpy(np.ascontiguousarray(inputs, np.float32)).view_as(embedded)

    def _run(self, network: Network, x: torch.Tensor, rows: TextRows) -> torch.Tensor:
        """The states after the last layer, `[batch, rows, width]`."""
        pairs = zip(self.down, self.up, strict=True)
        updates = dict(zip(self.names, pairs, strict=True))
        backend = GradientBackend(self._frozen, updates, rows)
        states = functional.pad(x, (0, self.spec.extra_width)).flatten(0, 1)
        for index in range(self.spec.num_layers):
            states = network.layer(backend, states, index)
        return states.view(*x.shape[:2], -1)

    def _logits(self, network: Network, states: torch.Tensor) -> torch.Tensor:
        """The logits `[..., vocab]` of states after the last layer."""
        rows = TextRows(1, torch.arange(0), torch.ones(1, 0, 0, dtype=torch.bool), torch.arange(0))
        backend = GradientBackend(self._frozen, {}, rows)
        logits: torch.Tensor = network.head(backend, states.reshape(-1, states.shape[-1]))
        return logits.view(*states.shape[:-1], -1)


def reads_noise(spec: ModelSpec) -> bool:
    """Whether a model's canvas holds noise that it is trained to recognise, random tokens at least
    in part: its layers read the time of the diffusion, or its last predictions."""
    return spec.time is not None or spec.has_canvas
