"""Oracle test of longspec (LongSpec, arXiv:2502.17421): beams of a model that attends to the sinks
and the window only, and the size of its cache; beams of the paper's draft layer, from a forward
pass of target and layer over the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.reading_drafts import (
    LONG_PROMPT,
    PROMPTS,
    TARGET,
    context_logits,
)
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.certification.oracles.speculative.state_drafters import (
    Path,
    TargetStates,
    compare_trees,
    shares,
)
from anydecode.certification.oracles.transformer import rms_norm, rotate, softmax
from anydecode.certification.rounds import accepted, rounds, scripted
from anydecode.certification.tiny import longspec_checkpoint
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network
from anydecode.sampling.noise import Noise


@oracle_test("longspec")
def longspec() -> Iterator[Check]:
    """The draft model attends to the sinks and the window only, and caches no more than that. Each
    level has the most probable beams. Samples under the rejection rule for chosen tokens follow the
    target."""
    for key, prompts, beams, window, sinks in (
        ("longspec", ("h", LONG_PROMPT), (2, 4), 512, 4),
        ("longspec:width=3,depth=3,window=6,sinks=2", PROMPTS, (3, 3), 6, 2),
    ):
        yield from _compare_drafts(key, prompts, beams, window, sinks)
    sizes = [_max_used(count) for count in (60, 120)]
    yield Check("the cache size is constant", sizes[0] == sizes[1] <= 2 + 2 * 6 + 9, f"{sizes}")
    for window in (7, 64):
        drafter = partial(longspec_checkpoint, window=window)
        name = f"draft layer with a window of {window}"
        yield from compare_trees(name, "longspec", drafter, _layer_beams)
    yield from rejection_checks("longspec")


def _layer_beams(
    checkpoint: Checkpoint, target: Network, text: list[int], temperature: float
) -> list[Path]:
    """The paths of 4 levels of 2 beams that the draft layer gives."""
    layer = DraftLayer(checkpoint, target, text)
    level: list[tuple[float, Path]] = [(1.0, ())]
    tree: list[Path] = []
    for _ in range(4):
        options = [
            (weight * share, (*path, token))
            for weight, path in level
            for token, share in shares(layer.logits(path), temperature, len(text) + len(path))
        ]
        level = sorted(options, key=lambda option: -option[0])[:2]
        tree += [path for _, path in level]
    return tree


class DraftLayer:
    """LongSpec's draft layer behind a text, in float64, from its tensors and its config. The target
    has computed the states of all tokens of the text but the last."""

    def __init__(self, checkpoint: Checkpoint, target: Network, text: list[int]) -> None:
        self.tensors: dict[str, Any] = {
            name: np.asarray(tensor, np.float64) for name, tensor in checkpoint.tensors.items()
        }
        self.config, self.target, self.text = checkpoint.config, target, text
        last = target.weights.layers[-1]
        assert last.key is not None and last.value is not None
        forward, depth = TargetStates(target), target.spec.num_layers
        states = [forward.states(token)[depth - 1] for token in text[:-1]]
        inputs = [rms_norm(state, last.attention_norm, target.spec.norm_eps) for state in states]
        self.keys, self.values = self._keys_values(
            inputs, last.key.weight.data, last.value.weight.data, 0
        )

    def logits(self, path: Path) -> np.ndarray:
        """The logits of all tokens behind the text and a path; -inf for those left out."""
        tokens = [*self.text, *path]
        embedded = [self.target.weights.embedding.data[token] for token in tokens]
        first = max(0, len(tokens) - self.config["sliding_window"])
        inputs = [self._norm(one, "input_layernorm") for one in embedded[first:]]
        k, v = (self.tensors[f"self_attn.{part}_proj.weight"] for part in ("k", "v"))
        keys, values = self._keys_values(inputs, k, v, first)
        x = embedded[-1].astype(np.float64)
        place = len(tokens) - 1
        x = x + self._attend("self_attn", inputs[-1], place, keys, values)
        normed = self._norm(x, "cross_layernorm")
        x = x + self._attend("cross_attn", normed, place, self.keys, self.values)
        y = self._norm(x, "post_attention_layernorm")
        gate = self.tensors["mlp.gate_proj.weight"] @ y
        inner = gate / (1 + np.exp(-gate)) * (self.tensors["mlp.up_proj.weight"] @ y)
        x = self._norm(x + self.tensors["mlp.down_proj.weight"] @ inner, "norm")
        kept = self.tensors["d2t"].astype(int) + np.arange(len(self.tensors["d2t"]))
        logits = np.full(self.config["vocab_size"], -np.inf)
        # Rows of the target's head for a part of its tokens are read in bfloat16.
        rows = self.target.weights.head.data[kept].astype(bfloat16)
        logits[kept] = rows.astype(np.float64) @ x
        return logits

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def _rotated(self, rows: np.ndarray, heads: int, first: int) -> np.ndarray:
        width = rows.shape[-1] // heads
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)
        places = list(range(first, first + len(rows)))
        return np.asarray(rotate(rows.reshape(len(rows), heads, width), places, frequencies))

    def _keys_values(
        self, inputs: list[np.ndarray], key: np.ndarray, value: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values `[positions, heads, numbers]`, a copy for every query head."""
        rows, heads = np.stack(inputs), self.config["num_key_value_heads"]
        repeats = self.config["num_attention_heads"] // heads
        keys = self._rotated(rows @ key.T, heads, first)
        values = (rows @ value.T).reshape(len(rows), heads, -1)
        return keys.repeat(repeats, 1), values.repeat(repeats, 1)

    def _attend(
        self, name: str, x: np.ndarray, place: int, keys: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        heads = self.config["num_attention_heads"]
        q = self._rotated((self.tensors[f"{name}.q_proj.weight"] @ x)[None], heads, place)[0]
        weights = softmax(np.einsum("hd,khd->hk", q, keys) / np.sqrt(q.shape[-1]))
        mixed = np.einsum("hk,khd->hd", weights, values).reshape(-1)
        return np.asarray(self.tensors[f"{name}.o_proj.weight"] @ mixed)


def _compare_drafts(
    key: str, prompts: tuple[str, ...], beams: tuple[int, int], window: int, sinks: int
) -> Iterator[Check]:
    for temperature in (0.0, 0.8):
        num_used, wrong, total, num_forks = 0, 0, 0, 0
        with scripted(TARGET, context_logits) as llm:
            pool = llm.engine.runners["draft"].pool
            for prompt in prompts:
                trace = rounds(llm, key, prompt, 30, temperature=temperature)
                first_kept, length = sinks, 0
                for one in trace:
                    while len(one.text) - length > window:
                        length += window
                        first_kept = max(first_kept, length - window)
                    wrong += one.paths != _beams(one.text, beams, sinks, first_kept, temperature)
                    num_forks += len({path[:1] for path in one.paths}) > 1
                    # The nodes of the last level are not in the draft model's cache.
                    length = len(one.text) + min(len(one.accepted), beams[1] - 1)
                    first_kept = max(first_kept, length - window)
                total += accepted(trace)
                num_used = max(num_used, pool.num_used)
        yield Check(f"{key} at T={temperature} equals the oracle", wrong == 0)
        yield Check(f"{key} at T={temperature}: drafts are accepted", total > 0, f"{total}")
        yield Check(f"{key} at T={temperature}: beams fork", num_forks > 0, f"{num_forks}")
        yield Check(f"{key}: all slots are freed", num_used == 0)


def _beams(
    text: list[int], beams: tuple[int, int], sinks: int, first_kept: int, temperature: float
) -> list[tuple[int, ...]]:
    """The paths of all levels, from rows of what the draft model attends to."""
    width, depth = beams
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    tree: list[tuple[int, ...]] = []
    for _ in range(depth):
        options = []
        for weight, path in level:
            seen = [*text, *path]
            # The scripted model rotates its logits by one token per hole in the positions.
            row = np.roll(context_logits((*seen[:sinks], *seen[first_kept:])), first_kept - sinks)
            scores = row.astype(float) / (temperature or 1.0)
            top = np.sort(np.argsort(-scores, kind="stable")[:64])
            keys = scores[top]
            if temperature:
                keys = keys + Noise(5).gumbel(top, len(seen))
            keys = keys - keys.max()
            keys -= np.log(np.exp(keys).sum())
            options += [
                (weight + float(keys[at]), (*path, int(top[at]))) for at in np.argsort(-keys)
            ]
        level = sorted(options, key=lambda option: -option[0])[:width]
        tree += [path for _, path in level]
    return tree


def _max_used(count: int) -> int:
    used = [0]

    def draft(seen: tuple[int, ...]) -> np.ndarray:
        used.append(llm.engine.runners["draft"].pool.num_used)
        return TARGET(seen)

    with scripted(TARGET, draft) as llm:
        options: dict[str, Any] = {
            "decoder": "longspec:width=3,depth=3,window=6,sinks=2",
            "ignore_eos": True,
        }
        llm.generate("abcabcabdabc" * 4, max_tokens=count, **options)
    return max(used)
