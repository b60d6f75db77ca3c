"""Oracle test of chimera (arXiv:2402.15758): the trees that follow from the drafter's tensors, the
target's states, and the outputs of the full context encoder, token after token."""

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
    compare_trees,
    shares,
)
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.tiny_heads import chimera_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "4 resolvers": chimera_checkpoint,
    "2 resolvers, some tokens": partial(chimera_checkpoint, heads=2, modulus=9),
}


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


class Encoders:
    """A drafter of Chimera behind a text, from its tensors, in float64. What stands for the state
    at each position is the target's, then the outputs along a path."""

    def __init__(self, checkpoint: Checkpoint, target: Network, text: list[int]) -> None:
        self.tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
        self.config, self.text = checkpoint.config, text
        self.num_heads = int(self.config["chimera_num_heads"])
        self.embedding = target.weights.embedding.data.astype(np.float64)
        self.head = target.weights.head.data.astype(np.float64)
        forward = TargetStates(target)
        self.states = [forward.normed(forward.states(token)[-1]) for token in text[:-1]]
        self._outputs: dict[Path, np.ndarray] = {}

    def logits(self, path: Path) -> np.ndarray:
        """The logits behind `path`, of all tokens."""
        pair = np.concatenate([self.states[-1], self._output(path)])
        row: np.ndarray = self.head @ (self.tensors[f"resolvers.{len(path)}.weight"] @ pair)
        if "token_map" in self.tensors:
            row[np.setdiff1d(np.arange(len(row)), self.tensors["token_map"].astype(int))] = -np.inf
        return row

    def _output(self, path: Path) -> np.ndarray:
        """The encoder's output for the trigram that ends with `path`."""
        if path not in self._outputs:
            before = [self._output(path[:count]) for count in range(len(path))]
            x = np.stack([*self.states, *before, self._trigram(path)])
            self._outputs[path] = self._layer(x)
        return self._outputs[path]

    def _trigram(self, path: Path) -> np.ndarray:
        tokens = [*self.text, *path]
        last = [tokens[0]] * (3 - len(tokens)) + tokens[-3:]
        x = np.concatenate([self.embedding[token] for token in last])
        weight, bias = (self.tensors[f"trimlp.0.linear.{part}"] for part in ("weight", "bias"))
        return np.asarray(self.tensors["trimlp.1.weight"] @ (x + silu(weight @ x + bias)))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.tensors[f"fast_layer1.0.{name}.weight"]
        return rms_norm(x, weight, self.config["rms_norm_eps"])

    def _layer(self, x: np.ndarray) -> np.ndarray:
        """The last of the rows x `[rows, hidden_size]` after a layer."""

        def product(part: str, rows: np.ndarray) -> np.ndarray:
            return np.asarray(rows @ self.tensors[f"fast_layer1.0.{part}.weight"].T)

        heads, y = self.config["num_attention_heads"], self._norm(x, "input_layernorm")
        width = x.shape[1] // heads
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)
        q, k, v = (product(f"self_attn.{p}_proj", y).reshape(len(x), -1, width) for p in "qkv")
        q, k = (rotate(part, range(len(x)), frequencies) for part in (q, k))
        k, v = (part.repeat(heads // part.shape[1], 1) for part in (k, v))
        weights = softmax(np.einsum("hd,khd->hk", q[-1], k) * width**-0.5)
        mixed = np.einsum("hk,khd->hd", weights, v).reshape(-1)
        state = x[-1] + product("self_attn.o_proj", mixed)
        y = self._norm(state, "post_attention_layernorm")
        inner = silu(product("mlp.gate_proj", y)) * product("mlp.up_proj", y)
        return np.asarray(state + product("mlp.down_proj", inner))


def drafted_by(size: int, depth: int, width: int) -> Oracle:
    """The best `size` of the paths that follow if the best `width` paths of each level are
    continued by `width` tokens."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        drafter = Encoders(checkpoint, target, text)
        level: list[tuple[float, Path]] = [(1.0, ())]
        found: list[tuple[float, Path]] = []
        for number in range(min(depth, drafter.num_heads)):
            following = [
                (weight * share, (*path, token))
                for weight, path in level
                for token, share in shares(drafter.logits(path), temperature, len(text) + number)[
                    :width
                ]
            ]
            found += following
            level = sorted(following, key=lambda one: -one[0])[:width]
        return [path for _, path in sorted(found, key=lambda one: -one[0])[:size]]

    return paths


@oracle_test("chimera")
def chimera() -> Iterator[Check]:
    """The trees equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "chimera", drafter, drafted_by(8, 4, 4))
    key = "chimera:size=12,depth=3,width=5"
    yield from compare_trees("4 resolvers", key, chimera_checkpoint, drafted_by(12, 3, 5))
