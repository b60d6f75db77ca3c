"""Oracle test of elastic-cache (arXiv:2510.14973): the published algorithm, layer by layer;
and accuracy, passes and rows on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.denoising import (
    PROMPT,
    TASKS,
    accuracy_lost,
    benchmark_results,
    passes_ratio,
    random_model,
    softmax,
)
from anydecode.certification.oracles.diffusion.task_losses import DETERMINED
from anydecode.certification.oracles.transformer import gated_mlp, rms_norm, rotate
from anydecode.certification.oracles.transformer import softmax as attention_softmax
from anydecode.models.scripted import MASK

#: Of the rotary embedding of `random_model`, radians per position.
FREQUENCIES = 10_000.0 ** (-np.arange(4) / 4)


@dataclass
class Elastic:
    """The algorithm on one canvas. Per layer: the input `states[l]`, `keys[l]` and `values[l]` of
    every position, the most attended token `tracked[l]`, and `attention[l]`, the attention of that
    token when it was chosen."""

    model: Any
    shift: int = 0
    size: int | None = None  # block size of block-causal attention
    states: list[np.ndarray] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    tracked: list[int] = field(default_factory=list)
    attention: list[np.ndarray] = field(default_factory=list)
    rows: int = 0

    def step(self, canvas: list[int], window: list[int], last: list[int], drift: float) -> int:
        """One pass over `window`, the tokens `last` unmasked by the step before, and the tracked
        ones. Returns the first layer that was computed for all positions."""
        network = self.model.network
        depth, length = network.spec.num_layers, len(canvas)
        table = network.weights.embedding.data
        everything = list(range(length))
        if not self.states:
            self.states = [np.empty((length, 32)) for _ in range(depth + 1)]
            self.keys = [np.empty((length, 2, 8)) for _ in range(depth)]
            self.values = [np.empty((length, 2, 8)) for _ in range(depth)]
            rows, since = everything, 0
        else:
            before_window = [position - self.shift for position in window]
            rows, since = sorted({*window, *before_window, *last, *self.tracked}), depth
            self.rows += len(rows)
        self.states[0][rows] = table[[canvas[i] for i in rows]]
        tracked, before = self.tracked, self.attention
        self.tracked, self.attention = [], []
        for index in range(depth):
            self._store(index, rows)
            if tracked and since == depth:
                now = self._attention(index, [tracked[index]])[0].mean(0)[0]
                sizes = np.linalg.norm(now) * np.linalg.norm(before[index])
                if now @ before[index] / sizes < drift:
                    since = index + 1
            self.states[index + 1][rows] = self._layer(index, rows)
            if (
                since == index + 1 < depth
            ):  # from this layer on every position is computed, from its cached state
                rows = everything
            weights = self._attention(index, window)[0].mean(0).sum(0)
            unmasked = [i for i in everything if canvas[i] != MASK]
            self.tracked.append(max(unmasked, key=lambda i: float(weights[i])))
            self.attention.append(self._attention(index, self.tracked[-1:])[0].mean(0)[0])
        self.rows += length if since < depth else 0
        return since

    def logits(self, position: int) -> np.ndarray:
        """Logits `[vocab_size]` of one position."""
        weights = self.model.network.weights
        normed = rms_norm(self.states[-1][position - self.shift], weights.final_norm, 1e-6)
        logits: np.ndarray = weights.head.data @ normed
        return logits

    def _store(self, index: int, rows: list[int]) -> None:
        one = self.model.network.weights.layers[index]
        x = rms_norm(self.states[index][rows], one.attention_norm, 1e-6)
        keys = (x @ one.key.weight.data.T).reshape(-1, 2, 8)
        self.keys[index][rows] = rotate(rms_norm(keys, one.key_norm, 1e-6), rows, FREQUENCIES)
        self.values[index][rows] = (x @ one.value.weight.data.T).reshape(-1, 2, 8)

    def _attention(self, index: int, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Attention weights `[heads, rows, positions]` and outputs `[rows, 32]`."""
        one = self.model.network.weights.layers[index]
        x = rms_norm(self.states[index][rows], one.attention_norm, 1e-6)
        queries = (x @ one.query.weight.data.T).reshape(-1, 4, 8)
        queries = rotate(rms_norm(queries, one.query_norm, 1e-6), rows, FREQUENCIES)
        keys, values = (x.repeat(2, 1) for x in (self.keys[index], self.values[index]))
        scores = np.einsum("rhd,khd->hrk", queries, keys) / 8**0.5
        if self.size:
            for row, position in enumerate(rows):
                scores[:, row, (position // self.size + 1) * self.size :] = -np.inf
        weights = attention_softmax(scores)
        return weights, np.einsum("hrk,khd->rhd", weights, values).reshape(-1, 32)

    def _layer(self, index: int, rows: list[int]) -> np.ndarray:
        one = self.model.network.weights.layers[index]
        gathered = self._attention(index, rows)[1]
        x: np.ndarray = self.states[index][rows] + gathered @ one.output.weight.data.T
        return x + gated_mlp(rms_norm(x, one.mlp_norm, 1e-6), one.mlp)


Run = tuple[list[int], list[list[int]], list[int], int]


def oracle(
    model: Any,
    length: int,
    window: int,
    threshold: float,
    drift: float,
    shift: int = 0,
    size: int | None = None,
    block: int | None = None,
) -> Run:
    """The tokens, the positions filled per step, the first layer computed for all positions per
    step, and the number of rows. With `block`, the masks are those of the first block of this size
    that has any."""
    canvas, filled, since = [*PROMPT, *[MASK] * length], [], []
    state, last = Elastic(model, shift, size), list[int]()
    while MASK in canvas:
        masks = [i for i, token in enumerate(canvas) if token == MASK][:window]
        if block:
            end = len(PROMPT) + ((masks[0] - len(PROMPT)) // block + 1) * block
            masks = [i for i in masks if i < end]
        since.append(state.step(canvas, masks, last, drift))
        probabilities = {i: softmax(state.logits(i)) for i in masks}
        threshold_used = min(threshold, max(float(p.max()) for p in probabilities.values()))
        last = [i for i in masks if probabilities[i].max() >= threshold_used]
        for i in last:
            canvas[i] = int(probabilities[i].argmax())
        filled.append(last)
    return canvas[len(PROMPT) :], filled, since, state.rows


def engine_run(llm: Any, length: int, key: str = "elastic-cache", **parameters: Any) -> Run:
    """The same results of the engine."""
    decoder = f"{key}:" + ",".join(f"{name}={value}" for name, value in parameters.items())
    answer = llm.generate(
        list(PROMPT), decoder=decoder, max_tokens=length, ignore_eos=True, trace=True
    )
    positions = [sorted(record["filled"]) for record in answer.trace]
    since = [record["since"] for record in answer.trace]
    return answer.tokens, positions, since, answer.trace[-1]["meter"]["rows"]


@oracle_test("elastic-cache")
def elastic_cache() -> Iterator[Check]:
    """Tokens, positions, the first layer of each refresh, and rows, for several drift
    thresholds."""
    with random_model(layers=4) as llm:
        model = llm.engine.runners["target"].model
        begun = set()
        for drift in (0.0, 0.9, 0.99, 1.1):
            expected = oracle(model, 24, 6, 0.4, drift)
            actual = engine_run(llm, 24, window=6, threshold=0.4, drift=drift)
            for name, one, other in zip(
                ("text", "positions", "layers", "rows"), actual, expected, strict=True
            ):
                yield Check(f"drift {drift}: {name}", one == other, f"{one}")
            begun |= set(actual[2])
        yield Check("refreshes start at every layer", begun == {0, 1, 2, 3, 4}, f"{begun}")
        actual = engine_run(llm, 24, "fast-dllm", block=6, threshold=0.4, cache="elastic")
        expected = oracle(model, 24, 24, 0.4, 0.9, block=6)
        yield Check("as the cache of another method, with its blocks", actual == expected)


@measure("elastic-cache", "accuracy lost, tasks with one right answer", samples=48, margin=0.05)
def determined_loss(samples: int) -> float:
    """With the default options."""
    return accuracy_lost("elastic-cache", samples, DETERMINED)


@measure("elastic-cache", "accuracy lost if every step refreshes", samples=64, margin=0.05)
def refreshed_loss(samples: int) -> float:
    """All tasks; stale rows do harm where tokens depend on each other."""
    return accuracy_lost("elastic-cache:drift=1.1", samples, TASKS)


@measure("elastic-cache", "passes relative to one token per pass", samples=48, margin=0.5)
def passes(samples: int) -> float:
    """Passes with a refresh count as one pass."""
    return passes_ratio("elastic-cache", samples, DETERMINED)


@measure("elastic-cache", "rows relative to a refresh in every step", samples=64, margin=0.8)
def rows(samples: int) -> float:
    """All tasks; a partly computed row counts as a whole one."""
    method, always = "elastic-cache", "elastic-cache:drift=1.1"
    return benchmark_results(method, samples).rows / benchmark_results(always, samples).rows
