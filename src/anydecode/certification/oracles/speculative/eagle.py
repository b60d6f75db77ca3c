"""Oracle test of eagle (arXiv:2401.15077, 2406.16858, 2503.01840): the trees that follow from a
forward pass of target and drafter over the whole text, written from the drafter's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from anydecode.certification.tiny import (
    eagle3_checkpoint,
    eagle_checkpoint,
    speculators_eagle_checkpoint,
)
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

#: The drafters of the test by name.
DRAFTERS: dict[str, Drafter] = {
    "EAGLE": eagle_checkpoint,
    "EAGLE, two layers": partial(eagle_checkpoint, layers=2),
    "EAGLE of speculators": speculators_eagle_checkpoint,
    "EAGLE of speculators, norms": partial(speculators_eagle_checkpoint, layernorms=True),
    "EAGLE-3": eagle3_checkpoint,
    "EAGLE-3, normed states": partial(
        eagle3_checkpoint, norm_before_residual=True, norm_before_fc=True, norm_output=True
    ),
    "EAGLE-3, normed taps": partial(eagle3_checkpoint, fc_norm=True),
    "EAGLE-3 of SpecForge": partial(eagle3_checkpoint, architectures=["LlamaForCausalLMEagle3"]),
    "EAGLE-3, all tokens": partial(eagle3_checkpoint, has_all_tokens=True),
}


@dataclass
class Cache:
    """Keys and values of a drafter's layers, and the rows' positions."""

    positions: list[int] = field(default_factory=list)
    keys: dict[int, list[np.ndarray]] = field(default_factory=dict)
    values: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def copy(self) -> Cache:
        return Cache(
            list(self.positions),
            {layer: list(rows) for layer, rows in self.keys.items()},
            {layer: list(rows) for layer, rows in self.values.items()},
        )


class Drafting:
    """A drafter in float64, row by row, from its tensors and its config."""

    def __init__(self, checkpoint: Checkpoint, target: Network) -> None:
        self.tensors: dict[str, Any] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }
        nested = checkpoint.config.get("transformer_layer_config", {})
        self.config, self.target = {**nested, **checkpoint.config}, target
        numbered = "layers.0.hidden_norm.weight" in self.tensors
        self.is_third = numbered or "midlayer.hidden_norm.weight" in self.tensors
        self.first = "layers.0" if numbered else "midlayer"  # the name of EAGLE-3's first layer
        self.size, self.eps = self.config["hidden_size"], self.config["rms_norm_eps"]

    def target_state(self, states: list[np.ndarray], final: np.ndarray) -> np.ndarray:
        """What the drafter reads of the target's hidden states at one position."""
        if not self.is_third:
            return final
        layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        # SpecForge names layers by their outputs, the others by their inputs.
        is_output = self.config.get("architectures") == ["LlamaForCausalLMEagle3"]
        taps = [states[layer + is_output] for layer in layers]
        if self.config.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)]
        joined = np.concatenate(taps)
        if self.config.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm")
        return np.asarray(self.tensors["fc.weight"] @ joined)

    def row(
        self, cache: Cache, token: int, state: np.ndarray, position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds a row to the cache; returns its logits, of all tokens, and the drafter's state."""
        own = self.tensors.get("embed_tokens.weight", self.target.weights.embedding.data)
        embedded = own[token].astype(np.float64)
        cache.positions.append(position)
        if self.is_third:
            normed = self._norm(state, f"{self.first}.hidden_norm")
            pair = np.concatenate([self._norm(embedded, f"{self.first}.input_layernorm"), normed])
            x = normed if self.config.get("norm_before_residual") else state
            x = self._layer(cache, 0, self.first, x, pair)
            for layer in range(1, self.config["num_hidden_layers"]):
                name = f"layers.{layer}"
                x = self._layer(cache, layer, name, x, self._norm(x, f"{name}.input_layernorm"))
            logits = np.full(self.config["vocab_size"], -np.inf)
            tokens = np.arange(len(self.tensors["lm_head.weight"]))
            if "d2t" in self.tensors:
                tokens += self.tensors["d2t"].astype(int)
            y = self._norm(x, "norm")
            logits[tokens] = self.tensors["lm_head.weight"] @ y
            return logits, y if self.config.get("norm_output") else x
        if "fusion_fc.weight" in self.tensors:
            return self._speculators_row(cache, embedded, state)
        x = self.tensors["fc.weight"] @ np.concatenate([embedded, state]) + self.tensors["fc.bias"]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = self._layer(
                cache, layer, name, x, self._norm(x, f"{name}.input_layernorm") if layer else x
            )
        return self.target.weights.head.data.astype(np.float64) @ x, x

    def _speculators_row(
        self, cache: Cache, embedded: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A row of EAGLE in the layout of speculators, whose norms may be missing."""

        def normed(x: np.ndarray, name: str) -> np.ndarray:
            return self._norm(x, name) if f"{name}.weight" in self.tensors else x

        pair = np.concatenate([normed(embedded, "embedding_layernorm"), state])
        x = self.tensors["fusion_fc.weight"] @ pair + self.tensors["fusion_fc.bias"]
        inputs = normed(x, "transformer.input_layernorm")
        y = normed(self._layer(cache, 0, "transformer", x, inputs), "pre_lm_head_layernorm")
        return self.target.weights.head.data.astype(np.float64) @ y, y

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def _layer(
        self, cache: Cache, layer: int, name: str, x: np.ndarray, inputs: np.ndarray
    ) -> np.ndarray:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width = self.size // heads
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)

        def product(part: str, rows: np.ndarray) -> np.ndarray:
            return np.asarray(self.tensors[f"{name}.{part}.weight"] @ rows)

        def rotated(part: str, count: int) -> np.ndarray:
            rows = product(f"self_attn.{part}", inputs).reshape(1, count, width)
            return np.asarray(rotate(rows, cache.positions[-1:], frequencies)[0])

        keys, values = cache.keys.setdefault(layer, []), cache.values.setdefault(layer, [])
        keys.append(rotated("k_proj", kv_heads))
        values.append(product("self_attn.v_proj", inputs).reshape(kv_heads, width))
        k, v = (np.stack(rows).repeat(heads // kv_heads, 1) for rows in (keys, values))
        scores = np.einsum("hd,khd->hk", rotated("q_proj", heads), k) / np.sqrt(width)
        mixed = np.einsum("hk,khd->hd", softmax(scores), v).reshape(-1)
        x = x + product("self_attn.o_proj", mixed)
        if f"{name}.mlp.gate_proj.weight" not in self.tensors:
            return np.asarray(x)
        y = self._norm(x, f"{name}.post_attention_layernorm")
        gate = product("mlp.gate_proj", y)
        inner = gate / (1 + np.exp(-gate)) * product("mlp.up_proj", y)
        return np.asarray(x + product("mlp.down_proj", inner))


def drafted(
    drafting: Drafting, text: list[int], temperature: float, size: int, depth: int, width: int
) -> list[Path]:
    """The nodes of the tree after `text`, as paths: `depth` times the best `width` nodes of a level
    are expanded into `width` children, and the best `size` of all are kept."""
    target, cache = TargetStates(drafting.target), Cache()
    before: np.ndarray | None = None
    for position, token in enumerate(text):
        if before is not None:
            root = drafting.row(cache, token, before, position)
        if position < len(text) - 1:
            states = target.states(token)
            before = drafting.target_state(states, target.normed(states[-1]))
    rows: dict[Path, tuple[np.ndarray, np.ndarray]] = {(): root}
    caches: dict[Path, Cache] = {(): cache}
    weights: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for _ in range(depth):
        children: list[Path] = []
        for path in level:
            if path:
                branch = caches[path[:-1]].copy()
                state = rows[path[:-1]][1]
                place = len(text) + len(path) - 1
                rows[path], caches[path] = (
                    drafting.row(branch, path[-1], state, place),
                    branch,
                )
            beliefs = shares(rows[path][0], temperature, len(text) + len(path))
            for token, belief in beliefs[:width]:
                child = (*path, token)
                children.append(child)
                weights[child] = weights[path] * belief
        level = sorted(children, key=lambda path: -weights[path])[:width]
    return sorted(filter(None, weights), key=lambda path: -weights[path])[:size]


@oracle_test("eagle")
def eagle() -> Iterator[Check]:
    """The trees of published kinds of drafters equal the oracle's, which computes every row again
    from the text."""
    for name, drafter in DRAFTERS.items():
        yield from compare_trees(name, "eagle", drafter, _oracle(8, 4, 4))
    key = "eagle:size=5,depth=2,width=3"
    yield from compare_trees("EAGLE-3", key, eagle3_checkpoint, _oracle(5, 2, 3))


def _oracle(size: int, depth: int, width: int) -> Oracle:
    def paths(
        checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
    ) -> list[Path]:
        return drafted(Drafting(checkpoint, target), text, temperature, size, depth, width)

    return paths
