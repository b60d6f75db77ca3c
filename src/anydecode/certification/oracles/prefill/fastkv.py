"""Oracle test of fastkv (FastKV, arXiv:2502.01068): scores by hand, and the kept keys and values
per layer and head, from a dense pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.prefill.dense_pass import (
    DEPTH,
    TEXT,
    after_prefill,
    deep_model,
    dense_pass,
    is_close,
    open_llm,
    prompt_rows,
    same_text,
)
from anydecode.certification.oracles.prefill.planted_model import distance
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.fastkv import FastKV, chosen, window_scores
from anydecode.models.scripted import ByteTokenizer


@oracle_test("fastkv")
def fastkv() -> Iterator[Check]:
    """Scores by hand; then the kept keys and values per layer and head, from a dense pass."""
    share = np.array([[[4.0, 0.0, 8.0, 1.0, 1.0]], [[0.0, 4.0, 0.0, 1.0, 1.0]]]).repeat(2, 1)
    share[:, 1] *= 0.5
    pooled = window_scores(share, 1, 3)
    by_hand = np.array([[2.0 + 2.0, 6.0 + 2.0, 4.0 + 2.0]])  # sums 6 0 12 and 0 6 0, over 3
    yield Check("summed, averaged over neighbours, grouped", is_close(pooled, by_hand), str(pooled))
    yield Check(
        "ties go to the first position",
        chosen(np.array([[1.0, 2, 1, 2]]), 3).tolist() == [[0, 1, 3]],
    )
    model, window, budget = deep_model(), 8, 24
    layers = after_prefill(model, FastKV(budget, propagate=0.5), TEXT)
    rows = prompt_rows(model, TEXT)
    length, middle = len(rows), DEPTH // 2 - 1
    every = np.arange(length)
    whole = dense_pass(model, rows, dict.fromkeys(range(DEPTH), every))
    token = _window(whole[3][middle], window).sum(0)
    best = sorted(
        sorted(range(length - window), key=lambda i: -token[i])[: int(0.5 * length) - window]
    )
    positions = np.array([*best, *range(length - window, length)])
    seen = {layer: every if layer <= middle else positions for layer in range(DEPTH)}
    _, keys, values, shares = dense_pass(model, rows, seen)
    right = 0
    for layer in range(DEPTH):
        scores = _window(shares[layer], window)
        for head in range(2):
            order = sorted(range(scores.shape[1]), key=lambda i: -scores[head, i])  # noqa: B023
            last = range(len(keys[layer]) - window, len(keys[layer]))
            at = np.array([*sorted(order[: budget - window]), *last])
            right += is_close(layers[layer][0][:, head], keys[layer][at, head])
            right += is_close(layers[layer][1][:, head], values[layer][at, head])
    yield Check("keys and values per layer and head", right == 4 * DEPTH, f"{right} of {4 * DEPTH}")
    yield Check("no more than the budget is cached", all(len(k) == budget for k, _ in layers))
    with open_llm(model) as llm:
        plain = llm.generate(TEXT, max_tokens=12, ignore_eos=True).tokens
        short = llm.generate(TEXT, decoder="fastkv", max_tokens=12, ignore_eos=True).tokens
    yield Check("a prompt within the budget is unchanged", plain == short)
    yield from _default_checks()
    yield from same_text("fastkv:budget=24")


def _default_checks() -> Iterator[Check]:
    """By default, layers after the middle compute a fifth of a prompt, but at least what they
    cache; every layer caches 512 positions, and a prompt of at most 512 is not compressed. Its last
    token runs through all layers."""
    middle = DEPTH // 2
    for length, expected in (
        (513, {(0, DEPTH, 513)}),
        (514, {(0, middle, 513), (middle, DEPTH, 512), (0, DEPTH, 1)}),
        (3001, {(0, middle, 3000), (middle, DEPTH, 600), (0, DEPTH, 1)}),
    ):
        found, cached = _computed(length)
        detail = f"{sorted(found)}, {cached} cached"
        name = f"the default parameters are the published ones, {length} tokens"
        yield Check(name, found == expected and cached == 512, detail)


def _computed(length: int) -> tuple[set[tuple[int, int, int]], int]:
    """The number of rows that a prompt runs through each range of layers, and the number of its
    positions that are cached when the first token is generated."""
    rows: Counter[tuple[int, int]] = Counter()
    cached: list[int] = []
    prompt = np.random.default_rng(1).integers(97, 123, length).tolist()
    model = tiny_model(layers=DEPTH, positions=4096)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=4096) as llm:
        runner = llm.engine.runners["target"]
        run = runner.run

        def recorded(plan: Any) -> Any:
            for score, span, count in plan.scheduled:
                rows[span.start, span.stop] += count
                cached.append(int((score.sequence.kv_cache().table >= 0).sum()) - 1)
            return run(plan)

        runner.run = recorded  # type: ignore[method-assign]
        llm.generate(prompt, decoder="fastkv", max_tokens=1)
    return {(*layers, count) for layers, count in rows.items()}, cached[-1]


def _window(share: np.ndarray, window: int) -> np.ndarray:
    """The definition: attention of the last rows, a mean over 7 neighbours, heads in groups of
    two."""
    summed = share[:, -window:, :-window].sum(1)
    count = summed.shape[1]
    padded = np.pad(summed, ((0, 0), (3, 3)))
    pooled = np.stack([padded[:, i : i + 7].sum(1) / 7 for i in range(count)], 1)
    return np.stack([pooled[0] + pooled[1], pooled[2] + pooled[3]])


class RandomFastKV(FastKV):
    """FastKV with random scores: keeps the same number of positions, chosen at random."""

    random = np.random.default_rng(3)

    def _scores(self, *given: Any) -> list[np.ndarray]:
        return [self.random.random(one.shape) for one in super()._scores(*given)]


@measure("fastkv", "loss relative to a random choice of the same size", samples=12, margin=0.8)
def fastkv_loss(samples: int) -> float:
    """The claim: what the end of the prompt attends to is needed later."""
    ours = distance(lambda: FastKV(75, propagate=0.7), samples)
    return ours / distance(lambda: RandomFastKV(75, propagate=0.7), samples)
