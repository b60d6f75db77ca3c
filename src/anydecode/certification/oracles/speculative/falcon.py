"""Oracle test of falcon (arXiv:2412.12639): the trees that follow from the drafter's tensors, the
target's states, and the drafter's own outputs block after block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from heapq import heappop, heappush

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
from anydecode.certification.tiny_heads import falcon_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "blocks of 2": falcon_checkpoint,
    "blocks of 3": partial(falcon_checkpoint, size=3),
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Blocks:
    """A drafter of Falcon behind a text, from its tensors, in float64.

    The row of position p reads the token there and the state before it, and predicts the token and
    the state that `size` further rows stand for.
    """

    def __init__(self, checkpoint: Checkpoint, target: Network, text: list[int]) -> None:
        self.tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
        self.config, self.text = checkpoint.config, text
        self.size = int(checkpoint.config["k_mask"])
        self.embedding = target.weights.embedding.data.astype(np.float64)
        self.head = target.weights.head.data.astype(np.float64)
        forward = TargetStates(target)
        states = [forward.normed(forward.states(token)[-1]) for token in text[:-1]]
        rows = [self._cells(token, state) for token, state in zip(text[1:], states, strict=True)]
        before = self._keys_values(np.stack(rows), list(range(1, len(text))))
        self._outputs: dict[Path, np.ndarray] = {}
        self._seen: dict[Path, tuple[np.ndarray, ...]] = {(): before}
        self._run((), np.stack(rows[-self.size :]), before)

    def logits(self, path: Path) -> np.ndarray:
        """The logits behind `path`, of all tokens."""
        end = len(path) - len(path) % self.size
        return np.asarray(self.head @ self._block(path[:end])[len(path) - end])

    def _block(self, path: Path) -> np.ndarray:
        """The outputs of the rows of the last tokens of `path`, which is of whole blocks, `[size,
        hidden_size]`."""
        if path not in self._outputs:
            states = self._block(path[: -self.size])
            tokens = path[-self.size :]
            rows = np.stack([self._cells(*pair) for pair in zip(tokens, states, strict=True)])
            first = len(self.text) + len(path) - self.size
            own = self._keys_values(rows, list(range(first, first + self.size)))
            before = self._seen[path[: -self.size]]
            self._seen[path] = tuple(np.concatenate(pair) for pair in zip(before, own, strict=True))
            self._run(path, rows, self._seen[path])
        return self._outputs[path]

    def _cells(self, token: int, state: np.ndarray) -> np.ndarray:
        """Two LSTM cells, each from a state of zeros."""
        x = np.concatenate([self.embedding[token], state])
        for number in range(2):
            weight, hidden = (self.tensors[f"lstm.weight_{p}_l{number}"] for p in ("ih", "hh"))
            short = memory = np.zeros(hidden.shape[1])
            gates = weight @ x + self.tensors[f"lstm.bias_ih_l{number}"]
            gates = gates + hidden @ short + self.tensors[f"lstm.bias_hh_l{number}"]
            entry, forget, candidate, exit = np.split(gates, 4)
            memory = sigmoid(forget) * memory + sigmoid(entry) * np.tanh(candidate)
            x = sigmoid(exit) * np.tanh(memory)
        return x

    def _heads(self, part: str, rows: np.ndarray, positions: list[int] | None) -> np.ndarray:
        width = len(self.head[0]) // self.config["num_attention_heads"]
        product = rows @ self.tensors[f"layers.0.self_attn.{part}_proj.weight"].T
        product = product.reshape(len(rows), -1, width)
        if positions is None:
            return np.asarray(product)
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)
        return rotate(product, positions, frequencies)

    def _keys_values(self, rows: np.ndarray, positions: list[int]) -> tuple[np.ndarray, ...]:
        return self._heads("k", rows, positions), self._heads("v", rows, None), np.array(positions)

    def _run(self, path: Path, rows: np.ndarray, seen: tuple[np.ndarray, ...]) -> None:
        """Store the outputs of rows, each of which attends to all of `seen`."""
        k, v, positions = seen
        q = self._heads("q", rows, positions[-len(rows) :].tolist())
        shared = q.shape[1] // k.shape[1]
        scores = np.einsum("qhd,khd->qhk", q, k.repeat(shared, 1)) * q.shape[2] ** -0.5
        weights = np.stack([softmax(one) for one in scores])
        mixed = np.einsum("qhk,khd->qhd", weights, v.repeat(shared, 1)).reshape(len(rows), -1)
        x = rows + mixed @ self.tensors["layers.0.self_attn.o_proj.weight"].T
        norm = self.tensors["layers.0.post_attention_layernorm.weight"]
        y = rms_norm(x, norm, self.config["rms_norm_eps"])
        names = ("gate", "up", "down")
        gate, up, down = (self.tensors[f"layers.0.mlp.{name}_proj.weight"] for name in names)
        inner = (y @ gate.T) * sigmoid(y @ gate.T) * (y @ up.T)
        self._outputs[path] = x + inner @ down.T


def drafted_by(size: int, blocks: int, threshold: float) -> Oracle:
    """The best `size` paths of up to `blocks` blocks, of probability at least `threshold`."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        drafter = Blocks(checkpoint, target, text)
        heap: list[tuple[float, Path]] = [(-1.0, ())]
        found: list[Path] = []
        while heap and len(found) < size:
            weight, path = heappop(heap)
            if path:
                found.append(path)
            if len(path) < blocks * drafter.size:
                ranked = shares(drafter.logits(path), temperature, len(text) + len(path))
                for token, share in ranked:
                    if -weight * share >= threshold:
                        heappush(heap, (weight * share, (*path, token)))
        return found

    return paths


@oracle_test("falcon")
def falcon() -> Iterator[Check]:
    """The trees equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "falcon", drafter, drafted_by(8, 2, 0.1))
    key = "falcon:size=14,blocks=3,threshold=0"
    yield from compare_trees("blocks of 2", key, falcon_checkpoint, drafted_by(14, 3, 0.0))
