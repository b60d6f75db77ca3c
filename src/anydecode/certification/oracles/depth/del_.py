"""Oracle test of DEL: exits and draft lengths are replayed from the scripted logits of all layers
at the positions of each round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.layerskip import (
    LAYERS,
    PROMPTS,
    TARGET,
    early_logits,
    repeats,
    traced,
)
from anydecode.certification.rounds import TracedRound, plain_token

LENGTH, MAX_SIZE, MEMORY, WINDOW = 48, 17, 0.95, 32


@oracle_test("del")
def dynamic_exits() -> Iterator[Check]:
    """The exit and the length of each round have the most expected tokens per layer, by decayed
    rates of agreement of all layers; a draft ends at a token below the exit's threshold."""
    for temperature in (0.0, 0.8):
        chosen: set[tuple[int, int]] = set()
        wrong = again = shortened = 0
        for prompt in (*PROMPTS, "abcabcab" * 6):
            trace, ran = traced("del", prompt, temperature, LENGTH)
            expected = _replay(trace, temperature)
            found = [(one.entry.get("layers"), one.entry.get("size"), one.tokens) for one in trace]
            wrong += found != expected
            again += repeats(ran, trace, [layers or LAYERS for layers, _, _ in expected])
            chosen |= {(layers, size) for layers, size, _ in expected if layers and size}
            limits = [min(size or 0, LENGTH - _done(one, trace) - 1) for one, (_, size, _) in
                      zip(trace, expected, strict=True)]  # fmt: skip
            shortened += sum(
                len(one.tokens) < limit for one, limit in zip(trace, limits, strict=True)
            )
        yield Check(f"exits, lengths and drafts equal the replay, T={temperature}", wrong == 0)
        detail = f"{len(chosen)} pairs; {shortened} drafts ended below the threshold"
        name = f"several exits and lengths are chosen, T={temperature}"
        exits, sizes = {one for one, _ in chosen}, {one for _, one in chosen}
        yield Check(name, min(len(exits), len(sizes), shortened) > 1, detail)
        yield Check(f"no layer runs twice for a token, T={temperature}", again == 0)


def _done(one: TracedRound, trace: list[TracedRound]) -> int:
    return len(one.text) - len(trace[0].text)


def _replay(
    trace: list[TracedRound], temperature: float
) -> list[tuple[int | None, int | None, list[int]]]:
    """The exit (in layers), the length and the drafts of each round; None for plain ones."""
    exits = range(1, LAYERS)
    counts = {layers: [0.0, 0.0, 0.0, 0.0] for layers in exits}

    def record(texts: list[list[int]]) -> None:
        for layers in exits:
            counts[layers] = [MEMORY * one for one in counts[layers]]
            for text in texts:
                row = early_logits(tuple(text), layers).astype(np.float64)
                sure = float(np.exp(row.max() - np.logaddexp.reduce(row)))
                index = int(row.argmax() != TARGET(tuple(text)).argmax())
                counts[layers][index] += 1
                counts[layers][2 + index] += sure

    prompt = trace[0].text
    ends = range(max(1, len(prompt) - WINDOW), len(prompt))
    if len(ends):
        record([prompt[:end] for end in ends])
    rounds: list[tuple[int | None, int | None, list[int]]] = []
    for one in trace:
        size, layers = _most_tokens(counts)
        limit = min(size, LENGTH - _done(one, trace) - 1)
        drafts: list[int] = []
        if limit < 1:
            rounds.append((None, None, []))
            record([one.text])
            continue
        matches, misses, sure, unsure = counts[layers]
        bound = (sure / matches + unsure / misses) / 2 if matches and misses else 0.0
        while len(drafts) < limit:
            row = early_logits((*one.text, *drafts), layers)
            drafts.append(plain_token(row, len(one.text) + len(drafts), temperature))
            wide = row.astype(np.float64)
            if np.exp(wide.max() - np.logaddexp.reduce(wide)) < bound:
                break
        rounds.append((layers, size, drafts))
        seen = min(len(one.accepted) + 1, len(drafts))
        record([[*one.text, *drafts[:count]] for count in range(seen)])
    return rounds


def _most_tokens(counts: dict[int, list[float]]) -> tuple[int, int]:
    """The length and the exit with the most tokens per layer."""
    best = (-1.0, 0, 0)
    for size in range(MAX_SIZE + 1):
        for layers, (matches, misses, _, _) in counts.items():
            rate = matches / (matches + misses) if matches + misses else 0.0
            tokens = sum(rate**power for power in range(size + 1))
            value = tokens / (LAYERS + size * layers)
            if value > best[0] * (1 + 1e-12):
                best = (value, size, layers)
    return best[1:]
