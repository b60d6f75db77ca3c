"""Oracle test of clover (arXiv:2405.00263): the trees that follow from a drafter's tensors, the
target's states before its final norm and the embeddings of drafted tokens."""

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
from anydecode.certification.tiny_heads import clover_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "3 heads": clover_checkpoint,
    "4 heads, 2 layers": partial(clover_checkpoint, heads=4, layers=2, seed=3),
}


class Regression:
    """A drafter of Clover-2 behind a text, from its tensors, in float64."""

    def __init__(self, checkpoint: Checkpoint, target: Network, text: list[int]) -> None:
        self.tensors = {name: np.asarray(x, np.float64) for name, x in checkpoint.tensors.items()}
        self.config = checkpoint.config["clover"]
        self.num_heads = int(self.config["num_heads"])
        self.attention_heads = int(checkpoint.config["num_attention_heads"])
        self.spec, self.head = target.spec, target.weights.head.data.astype(np.float64)
        self.table = self.tensors.get("clover_embed_tokens.weight", target.weights.embedding.data)
        forward = TargetStates(target)
        states = [forward.states(token)[-1] for token in text[:-1]]
        self._states: dict[Path, np.ndarray] = {(): self._first(states, text)}

    def _first(self, states: list[np.ndarray], text: list[int]) -> np.ndarray:
        """The state behind the text, from the target's states before its last token."""
        name = "clover_head_mlp_rnn"
        rows = [self._add(name, x, token) for x, token in zip(states, text[1:], strict=True)]
        return self._augmented(np.stack(rows))

    def _augmented(self, x: np.ndarray) -> np.ndarray:
        for layer in range(int(self.config["num_layers"])):
            x = self._layer(x, f"layers.{layer}")
        return self._norm(x[-1], "clover_norm")

    def logits(self, path: Path) -> np.ndarray:
        """The logits behind `path`, of all tokens."""
        y = self._output(path)
        row: np.ndarray = self.head @ self._norm(y, "clover_head_norm")
        if "token_map" in self.tensors:
            row[np.setdiff1d(np.arange(len(row)), self.tensors["token_map"].astype(int))] = -np.inf
        return row

    def _output(self, path: Path) -> np.ndarray:
        """What the norm before the head reads behind `path`."""
        if not path:
            return self._product("clover_head_mlp", self._state(path))
        state = np.concatenate([self._state(path), self.table[path[-1]]])
        return self._product("clover_head_mlp2", state)

    def _block(self, path: Path) -> str:
        """The name of the block that adds the last token of `path`."""
        return "clover_head_mlp_rnn2"

    def _state(self, path: Path) -> np.ndarray:
        if path not in self._states:
            self._states[path] = self._add(self._block(path), self._state(path[:-1]), path[-1])
        return self._states[path]

    def _add(self, name: str, x: np.ndarray, token: int) -> np.ndarray:
        """The state with a token's values, each head of them times the cosine of query and key."""
        embedded = self.table[token]
        parts = (
            self._product(f"{name}.q", self._norm(x, f"{name}.input_layernorm")),
            self._product(f"{name}.k", embedded),
            self._product(f"{name}.v", embedded),
        )
        q, k, v = (part.reshape(self.attention_heads, -1) for part in parts)
        cosine = (q * k).sum(1) / (np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1))
        return np.asarray(x + (v * cosine[:, None]).reshape(-1))

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.asarray(self.tensors[f"{name}.weight"] @ x + self.tensors[f"{name}.bias"])

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.spec.norm_eps)

    def _layer(self, x: np.ndarray, name: str) -> np.ndarray:
        """All rows of `x` `[rows, hidden_size]` after a layer of the augmenting block."""

        def product(part: str, rows: np.ndarray) -> np.ndarray:
            return np.asarray(rows @ self.tensors[f"{name}.{part}.weight"].T)

        rope, y = self.spec.layers[0].rope, self._norm(x, f"{name}.input_layernorm")
        assert rope is not None
        count, width = len(x), 2 * len(rope.frequencies)
        q, k, v = (product(f"self_attn.{p}_proj", y).reshape(count, -1, width) for p in "qkv")
        shared = q.shape[1] // k.shape[1]
        q, k = (rotate(part, range(count), rope.frequencies) for part in (q, k))
        k, v = k.repeat(shared, 1), v.repeat(shared, 1)
        mixed = []
        for row in range(count):
            scores = np.einsum("hd,khd->hk", q[row], k[: row + 1]) * width**-0.5
            mixed.append(np.einsum("hk,khd->hd", softmax(scores), v[: row + 1]).reshape(-1))
        x = x + product("self_attn.o_proj", np.stack(mixed))
        y = self._norm(x, f"{name}.post_attention_layernorm")
        gate = product("mlp.gate_proj", y)
        inner = gate / (1 + np.exp(-gate)) * product("mlp.up_proj", y)
        return np.asarray(x + product("mlp.down_proj", inner))


class FirstRegression(Regression):
    """A drafter of Clover behind a text: the layers read the target's states, and each head adds
    its token with a block of its own."""

    def _first(self, states: list[np.ndarray], text: list[int]) -> np.ndarray:
        return self._add(self._block(()), self._augmented(np.stack(states)), text[-1])

    def _block(self, path: Path) -> str:
        return f"clover_heads.{len(path)}.attention"

    def _output(self, path: Path) -> np.ndarray:
        state = self._state(path)
        y = self._product(f"clover_heads.{len(path)}.mlp", state)
        return np.asarray(state + y / (1 + np.exp(-y)))


def regression(checkpoint: Checkpoint, target: Network, text: list[int]) -> Regression:
    """A drafter behind a text."""
    is_first = "clover_heads.0.mlp.weight" in checkpoint.tensors
    return (FirstRegression if is_first else Regression)(checkpoint, target, text)


def drafted_by(size: int, depth: int, top_p: float = 0.95, least: float = 0.25) -> Oracle:
    """The paths of the budget of `size` tokens, level by level, of candidates with at least the
    share `least` of the best one's probability."""

    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        drafter = regression(checkpoint, target, text)
        level: list[tuple[float, Path]] = [(1.0, ())]
        kept: list[Path] = []
        for number in range(min(depth, drafter.num_heads)):
            found: list[tuple[float, Path]] = []
            for weight, path in level:
                ranked = shares(drafter.logits(path), temperature, len(text) + number)
                mass = 0.0
                for rank, (token, share) in enumerate(ranked):
                    mass += share
                    if rank and (mass > top_p or share < least * ranked[0][1]):
                        break
                    found.append((weight * share, (*path, token)))
            level = sorted(found, key=lambda one: -one[0])[: size - len(kept)]
            kept += [path for _, path in level]
        return kept

    return paths


@oracle_test("clover")
def clover() -> Iterator[Check]:
    """The trees equal the oracle's."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "clover", drafter, drafted_by(8, 5))
    deep = partial(clover_checkpoint, heads=7, seed=4)
    yield from compare_trees("many nodes", "clover:size=20", deep, drafted_by(20, 5))
    key = "clover:size=14,depth=3,top_p=0.6,min_share=0.1"
    yield from compare_trees("3 heads", key, clover_checkpoint, drafted_by(14, 3, 0.6, 0.1))
