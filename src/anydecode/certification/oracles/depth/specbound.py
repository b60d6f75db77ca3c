"""Oracle test of SpecBound: exits and drafts are replayed from scripted logits of all layers, and
the rows that every pass must compute from the depths of the pending tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.layerskip import (
    LAYERS,
    PROMPTS,
    early_logits,
    traced,
)
from anydecode.certification.rounds import TracedRound, plain_token, wordy

LENGTH, MAX_DRAFTS, THRESHOLD, SLOPE = 48, 8, 0.7, 0.5
EXITS = (1, 2, 3, 4)
TARGET = wordy(spread=3.35)


@oracle_test("specbound")
def specbound() -> Iterator[Check]:
    """A draft leaves at the first exit whose annealed confidence is .7 or more. One that leaves at
    none ends the draft. Pending tokens go deeper together, and no layer runs twice for a token."""
    for temperature in (0.0, 0.8):
        wrong = wrong_rows = num_hard = num_bounded = num_joined = cut = 0
        depths: set[int] = set()
        for prompt in PROMPTS:
            trace, ran = traced("specbound", prompt, temperature, LENGTH, TARGET)
            expected = [(position, 0, LAYERS) for position in range(len(prompt) - 1)]
            for one in trace:
                limit = min(MAX_DRAFTS, LENGTH - (len(one.text) - len(prompt)) - 1)
                drafts, rows, exits = _round(one, limit, temperature)
                wrong += drafts != one.tokens
                expected += rows
                depths |= set(exits)
                num_hard += 0 < len(drafts) < limit
                num_bounded += len(drafts) == MAX_DRAFTS
                num_joined += any(start in EXITS for _, start, stop in rows if stop in EXITS[2:])
                cut += len(one.accepted) < len(drafts)
            wrong_rows += sorted(expected) != sorted(ran)
        where = f"T={temperature}"
        yield Check(f"drafts equal the oracle's, {where}", wrong == 0, f"{wrong} wrong")
        yield Check(f"the rows of all passes equal the oracle's, {where}", wrong_rows == 0)
        detail = f"{sorted(depths)}, {num_hard} drafts ended by depth, {num_bounded} by length"
        is_varied = len(depths) > 2 and num_hard > 2 and num_joined > 2
        yield Check(f"tokens leave at several depths, {where}", is_varied, detail)
        if temperature:
            yield Check(f"drafts are rejected and bounded, {where}", min(cut, num_bounded) > 0)


def _round(
    one: TracedRound, limit: int, temperature: float
) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """The drafts of a round, its rows (position, first layer, end), and the exit of each draft."""
    first, drafts, exits = len(one.text) - 1, list[int](), list[int]()
    rows: list[tuple[int, int, int]] = []
    if limit < 1:
        return [], [(first, 0, LAYERS)], []
    pending: list[int] = []
    while len(drafts) < limit:
        pending.append(0)
        seen = (*one.text, *drafts)
        for layers in EXITS:
            for index, depth in enumerate(pending):
                if depth < layers:
                    rows.append((first + index, depth, layers))
                    pending[index] = layers
            row = early_logits(seen, layers, TARGET).astype(np.float64)
            scaled = row / (1 + SLOPE * (LAYERS - layers) / LAYERS)
            if np.exp(scaled.max() - np.logaddexp.reduce(scaled)) >= THRESHOLD:
                token = plain_token(row.astype(np.float32), len(seen), temperature)
                drafts.append(token)
                exits.append(layers)
                break
        else:
            break
    rows += [(first + index, depth, LAYERS) for index, depth in enumerate(pending)]
    if len(pending) == len(drafts):  # the last draft has not run
        rows.append((first + len(drafts), 0, LAYERS))
    return drafts, rows, exits
