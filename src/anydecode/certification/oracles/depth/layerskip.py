"""Oracle test of drafts from the first layers: the early layers' logits are recomputed, and the
rows that each pass computes are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks, same_layers
from anydecode.certification.rounds import (
    VOCABULARY,
    Logits,
    TracedRound,
    plain_token,
    rounds,
    wordy,
)
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel, normal_row

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")
LAYERS, EXIT, SIZE, LENGTH = 7, 2, 4, 32
TARGET = wordy()


class _RecordingModel(ScriptedModel):
    """Records (position, first layer, last layer) of every row it runs."""

    def __init__(self, target: Logits) -> None:
        super().__init__(target, vocab_size=VOCABULARY, num_layers=LAYERS, seed=3)
        self.ran: list[tuple[int, int, int]] = []

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        for position, start, stop in zip(rows.positions, rows.start, rows.stop, strict=True):
            self.ran.append((int(position), int(start), int(stop)))
        return super().run(rows, cache, output_spec)


def early_logits(seen: tuple[int, ...], layers: int, target: Logits = TARGET) -> np.ndarray:
    """The logits of the scripted model of `target` after its first `layers` layers."""
    error = normal_row((3, 2, *seen[-4:])) / layers
    row: np.ndarray = (target(seen) + error).astype(np.float32)
    return row


@oracle_test("layerskip")
def layerskip() -> Iterator[Check]:
    """Up to four tokens are sampled from the first third of the layers, with the target's noise;
    the remaining layers verify them, and no layer runs twice for a token."""
    yield from penalty_checks("layerskip", same_layers)
    for temperature in (0.0, 0.8):
        wrong = num_accepted = num_rejected = repeated = num_short = 0
        for prompt in PROMPTS:
            trace, ran = _run(prompt, temperature)
            wrong += [one.tokens for one in trace] != _drafts(trace, temperature)
            num_accepted += sum(len(one.accepted) for one in trace)
            num_rejected += sum(len(one.accepted) < len(one.tokens) for one in trace)
            num_short += sum(len(one.tokens) < SIZE for one in trace)
            repeated += repeats(ran, trace, [EXIT] * len(trace))
        detail = f"{num_short} shortened by the limit of tokens"
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0 < num_short, detail)
        detail = f"{num_accepted} accepted, {num_rejected} rounds with a rejection"
        name = f"drafts at T={temperature} are accepted and rejected"
        yield Check(name, min(num_accepted, num_rejected) > 0, detail)
        yield Check(f"no layer runs twice for a token, T={temperature}", repeated == 0)
    yield from _ends()


def _ends() -> Iterator[Check]:
    """Nothing is drafted behind a token that ends the text."""
    stops, ended, wrong = frozenset(b"abc"), 0, 0
    for seed in range(4):
        trace, _ = _run("the cab had a bad ", 0.8, seed=seed, stop_tokens=sorted(stops))
        drafts = [one.tokens for one in trace]
        ended += sum(1 < len(one) < SIZE and one[-1] in stops for one in drafts)
        wrong += drafts != _drafts(trace, 0.8, stops, seed)
    yield Check("a draft ends at a token that ends the text", wrong == 0 < ended, f"{ended} ended")


def _run(
    prompt: str, temperature: float, **options: Any
) -> tuple[list[TracedRound], list[tuple[int, int, int]]]:
    return traced("layerskip", prompt, temperature, LENGTH, **options)


def traced(
    decoder: str,
    prompt: str,
    temperature: float,
    length: int,
    target: Logits = TARGET,
    **options: Any,
) -> tuple[list[TracedRound], list[tuple[int, int, int]]]:
    """The rounds of a generation, and the rows that it computed."""
    model = _RecordingModel(target)
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        trace = rounds(llm, decoder, prompt, length, temperature=temperature, **options)
        return trace, model.ran


def _drafts(
    trace: list[TracedRound],
    temperature: float,
    stops: frozenset[int] = frozenset(),
    seed: int = 5,
) -> list[list[int]]:
    """What the first layers draft in each round: four tokens, fewer where one of them ends the text
    or fewer may be generated behind the round's own token."""
    all_drafts = []
    for one in trace:
        size = min(SIZE, LENGTH - (len(one.text) - len(trace[0].text)) - 1)
        drafts: list[int] = []
        while len(drafts) < size and not stops.intersection(drafts):
            seen = (*one.text, *drafts)
            drafts.append(plain_token(early_logits(seen, EXIT), len(seen), temperature, seed))
        all_drafts.append(drafts)
    return all_drafts


def repeats(
    ran: list[tuple[int, int, int]],
    trace: list[TracedRound],
    exits: list[int],
    num_layers: int = LAYERS,
) -> bool:
    """Whether the rows differ from the method's: per round, a row per draft through the layers
    before its exit, the same rows through the others, and one row, that of the last draft, through
    all."""
    expected = [(position, 0, num_layers) for position in range(len(trace[0].text) - 1)]
    for one, layers in zip(trace, exits, strict=True):
        start, size = len(one.text) - 1, len(one.tokens)
        expected += [(position, 0, layers) for position in range(start, start + size)]
        expected += [(position, layers, num_layers) for position in range(start, start + size)]
        expected.append((start + size, 0, num_layers))
    return sorted(expected) != sorted(ran)
