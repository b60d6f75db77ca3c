"""Oracle test of hydra (arXiv:2402.05109): the trees that follow from the heads' tensors, the
target's states and the embeddings of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.state_drafters import (
    Drafter,
    Oracle,
    Path,
    TargetStates,
    best_paths,
    compare_trees,
)
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.tiny_heads import hydra_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "Hydra": hydra_checkpoint,
    "Hydra, 5 heads of 1 block": partial(hydra_checkpoint, heads=5, layers=1),
    "Hydra++": partial(hydra_checkpoint, has_prefix=True),
}


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class Heads:
    """Hydra's heads behind a text, from their tensors, in float64."""

    def __init__(self, checkpoint: Checkpoint, target: Network, text: list[int]) -> None:
        self.tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
        self.embedding, self.spec = target.weights.embedding.data, target.spec
        self.num_heads = sum(name.endswith("1.res_connection.bias") for name in self.tensors)
        self.last = text[-1]
        forward = TargetStates(target)
        states = [forward.normed(forward.states(token)[-1]) for token in text[:-1]]
        has_prefix = any(name.startswith("prefix") for name in self.tensors)
        self.state = self._prefix(np.stack(states)) if has_prefix else states[-1]

    def logits(self, path: Path) -> np.ndarray:
        """The logits behind `path`, from the head of its length."""
        head = len(path)
        x = np.concatenate([self.state, *(self.embedding[token] for token in (self.last, *path))])
        numbers = [
            n for n in range(1, 20, 2) if f"hydra_mlp.{head}.{n}.linear.bias" in self.tensors
        ]
        for number in numbers:
            name = f"hydra_mlp.{head}.{number}"
            residual = self._product(f"{name}.res_connection", x) if number == 1 else x
            x = residual + silu(self._product(f"{name}.linear", x))
        return self._product(f"hydra_lm_head.{head}.1", x)

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self.tensors[f"{name}.weight"] @ x
        return np.asarray(y + self.tensors[f"{name}.bias"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.tensors[f"prefix_embeding_layer.{name}.weight"]
        return rms_norm(x, weight, self.spec.norm_eps)

    def _prefix(self, x: np.ndarray) -> np.ndarray:
        """The state of the last row of `x` `[rows, hidden_size]` after the layer of Hydra++."""

        def product(part: str, rows: np.ndarray) -> np.ndarray:
            weight = self.tensors[f"prefix_embeding_layer.layers.0.{part}.weight"]
            return np.asarray(rows @ weight.T)

        rope, shape = self.spec.layers[0].rope, self.spec.layers[0].attention
        assert rope is not None and shape is not None
        y, count = self._norm(x, "layers.0.input_layernorm"), len(x)
        q, k, v = (
            product(f"self_attn.{p}_proj", y).reshape(count, -1, shape.head_dim) for p in "qkv"
        )
        shared = shape.num_heads // shape.num_kv_heads
        q = rotate(q[-1:], [count - 1], rope.frequencies)[0]
        k = rotate(k, range(count), rope.frequencies).repeat(shared, 1)
        weights = softmax(np.einsum("hd,khd->hk", q, k) * shape.scale)
        mixed = np.einsum("hk,khd->hd", weights, v.repeat(shared, 1)).reshape(-1)
        state = x[-1] + product("self_attn.o_proj", mixed)
        y = self._norm(state, "layers.0.post_attention_layernorm")
        inner = silu(product("mlp.gate_proj", y)) * product("mlp.up_proj", y)
        return self._norm(state + product("mlp.down_proj", inner), "norm")


def drafted_by(size: int, depth: int) -> Oracle:
    """The best `size` paths of up to `depth` heads."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        heads = Heads(checkpoint, target, text)
        levels = min(depth, heads.num_heads)
        return best_paths(heads.logits, len(text), temperature, size, levels)

    return paths


@oracle_test("hydra")
def hydra() -> Iterator[Check]:
    """The trees of Hydra and Hydra++ equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "hydra", drafter, drafted_by(8, 4))
    key = "hydra:size=5,depth=2"
    yield from compare_trees("Hydra", key, hydra_checkpoint, drafted_by(5, 2))
