"""Oracle test of SpecBound: exits and drafts are replayed from scripted logits of all layers, and
the rows that every pass must compute from the depths of the pending tokens. Those of trained heads
are replayed by a forward pass."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.depth.layerskip import (
    LAYERS,
    PROMPTS,
    early_logits,
    traced,
)
from anydecode.certification.oracles.speculative.forward_pass import Forward
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks, same_layers
from anydecode.certification.rounds import TracedRound, plain_token, rounds, wordy
from anydecode.certification.tiny import tiny_model
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.scripted import ByteTokenizer

LENGTH, MAX_DRAFTS, THRESHOLD, SLOPE = 48, 8, 0.7, 0.5
EXITS = (1, 2, 3, 4)
TARGET = wordy(spread=3.35)


@oracle_test("specbound")
def specbound() -> Iterator[Check]:
    """A draft leaves at the first exit whose annealed confidence is .7 or more. One that leaves at
    none ends the draft. Pending tokens go deeper together, and no layer runs twice for a token."""
    yield from penalty_checks("specbound:threshold=0", same_layers)
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
    yield from _trained_heads()


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


class _HeadedForward(Forward):
    """Exits whose states pass a linear map before the norm and the head."""

    def exit_logits(self, token: int, tensors: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
        """Adds a position; returns the logits of each exit."""
        x, found = self._embedding(token), {}
        for layer in range(LAYERS):
            x = x + self._attention(x, layer)
            x = x + self._mlp(x, layer)
            if layer + 1 in EXITS:
                weight, bias = (
                    tensors[f"layers.{layer + 1}.{part}"] for part in ("weight", "bias")
                )
                found[layer + 1] = self._logits(x + weight.astype(np.float64) @ x + bias)
        return found

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        for rows in (*self.keys, *self.values):
            del rows[length:]


def _trained_heads() -> Iterator[Check]:
    """With a file of heads, drafts and exits follow from its linear maps."""
    model, random = tiny_model(layers=LAYERS, residual=0.1), np.random.default_rng(1)
    size, tensors = model.spec.hidden_size, dict[str, np.ndarray]()
    for exit in EXITS:
        # The deeper the exit, the surer: so that tokens leave at all of them.
        weight = (0.4 + 0.3 * exit) * np.eye(size) + 0.02 * random.standard_normal((size, size))
        tensors[f"layers.{exit}.weight"] = weight.astype(np.float32)
        tensors[f"layers.{exit}.bias"] = 0.2 * random.standard_normal(size).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "heads.safetensors"
        metadata = {"fingerprint": model_fingerprint(model.network)}
        save_file(tensors, file, metadata=metadata)
        for temperature in (0.0, 0.8):
            wrong, num_drafts, num_accepted, depths = 0, 0, 0, list[int]()
            with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
                key = f"specbound:threshold=0.3,heads={file}"
                for prompt in PROMPTS:
                    trace = rounds(llm, key, prompt, LENGTH, temperature=temperature)
                    forward = _HeadedForward(model.network)
                    for one in trace:
                        limit = min(MAX_DRAFTS, LENGTH - (len(one.text) - len(prompt)) - 1)
                        drafts, exits = _headed(forward, tensors, one, limit, temperature)
                        wrong += drafts != one.tokens
                        num_drafts += len(drafts)
                        num_accepted += len(one.accepted)
                        depths += exits
            where = f"heads of a file, T={temperature}"
            yield Check(f"drafts equal the oracle's, {where}", wrong == 0, f"{wrong} wrong")
            detail = f"{sorted(set(depths))}, {num_accepted} of {num_drafts} accepted"
            is_varied = len(set(depths)) > 1 and 0 < num_accepted < num_drafts
            yield Check(f"tokens leave at several depths, {where}", is_varied, detail)


def _headed(
    forward: _HeadedForward,
    tensors: dict[str, np.ndarray],
    one: TracedRound,
    limit: int,
    temperature: float,
) -> tuple[list[int], list[int]]:
    """The drafts of a round, and the exit of each."""
    drafts, exits = list[int](), list[int]()
    for token in one.text[len(forward.keys[0]) : -1]:
        forward.step(token)
    while len(drafts) < limit:
        logits = forward.exit_logits([*one.text, *drafts][-1], tensors)
        for layers, row in logits.items():
            scaled = row / (1 + SLOPE * (LAYERS - layers) / LAYERS)
            if np.exp(scaled.max() - np.logaddexp.reduce(scaled)) >= 0.3:
                position = len(one.text) + len(drafts)
                drafts.append(plain_token(row.astype(np.float32), position, temperature))
                exits.append(layers)
                break
        else:
            break
    forward.truncate(len(one.text) - 1)
    return drafts, exits
