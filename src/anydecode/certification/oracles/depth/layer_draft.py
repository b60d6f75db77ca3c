"""Oracle test of drafts from the first layers: the early layers' logits are recomputed, and the
rows that each pass computes are recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import VOCABULARY, TracedRound, plain_token, rounds, wordy
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

PROMPTS = ("abcabcabd", "the cab had a bad cab", "h")
LAYERS, EXIT, SIZE = 7, 2, 4
TARGET = wordy()


class _RecordingModel(ScriptedModel):
    """Records (position, first layer, last layer) of every row it runs."""

    def __init__(self) -> None:
        super().__init__(TARGET, vocab_size=VOCABULARY, num_layers=LAYERS, seed=3)
        self.ran: list[tuple[int, int, int]] = []

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        for position, start, stop in zip(rows.positions, rows.start, rows.stop, strict=True):
            self.ran.append((int(position), int(start), int(stop)))
        return super().run(rows, cache, output_spec)


def early_logits(seen: tuple[int, ...], layers: int) -> np.ndarray:
    """The logits of the scripted model after its first `layers` layers."""
    error = np.random.default_rng((3, 2, *seen[-4:])).normal(size=VOCABULARY) / layers
    row: np.ndarray = (TARGET(seen) + error).astype(np.float32)
    return row


@oracle_test("layer-draft")
def layer_draft() -> Iterator[Check]:
    """Four tokens are sampled from the first third of the layers, with the target's noise; the
    remaining layers verify them, and no layer runs twice for a token."""
    for temperature in (0.0, 0.8):
        wrong = num_accepted = num_rejected = repeated = 0
        for prompt in PROMPTS:
            model = _RecordingModel()
            with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
                trace = rounds(llm, "layer-draft", prompt, 32, temperature=temperature)
            for one in trace:
                drafts: list[int] = []
                for _ in range(SIZE):
                    seen = (*one.text, *drafts)
                    drafts.append(plain_token(early_logits(seen, EXIT), len(seen), temperature))
                wrong += one.tokens != drafts
                num_accepted += len(one.accepted)
                num_rejected += len(one.accepted) < SIZE
            repeated += _repeats(model.ran, trace)
        yield Check(f"drafts at T={temperature} equal the oracle", wrong == 0)
        detail = f"{num_accepted} accepted, {num_rejected} rounds with a rejection"
        name = f"drafts at T={temperature} are accepted and rejected"
        yield Check(name, min(num_accepted, num_rejected) > 0, detail)
        yield Check(f"no layer runs twice for a token, T={temperature}", repeated == 0)


def _repeats(ran: list[tuple[int, int, int]], trace: list[TracedRound]) -> bool:
    """Whether the rows differ from the method's: per round, four rows through the first layers, the
    same rows through the others, and one row, that of the last draft, through all."""
    expected = [(position, 0, LAYERS) for position in range(len(trace[0].text) - 1)]
    for one in trace:
        start = len(one.text) - 1
        expected += [(position, 0, EXIT) for position in range(start, start + SIZE)]
        expected += [(position, EXIT, LAYERS) for position in range(start, start + SIZE)]
        expected.append((start + SIZE, 0, LAYERS))
    return sorted(expected) != sorted(ran)
