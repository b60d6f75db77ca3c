"""Oracle tests of plain decoding, of multi-step decoding (`multi-step`), and of drafts from the
first layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.rounds import VOCABULARY, plain_token, rounds, scripted, wordy
from anydecode.decoders.autoregressive import MultiStep
from anydecode.decoders.depth.layer_draft import LayerDraft
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

PROMPT = list(b"the cab had")


def plain_oracle(temperature: float, count: int) -> list[int]:
    """Argmax of logits / T plus noise, recomputed from the whole text for every token."""
    logits, text = wordy(), list(PROMPT)
    for _ in range(count):
        text.append(plain_token(logits(tuple(text)), len(text), temperature))
    return text[len(PROMPT) :]


@oracle_test("autoregressive")
def autoregressive() -> Iterator[Check]:
    """One pass per token, and the token that the formula gives."""
    for temperature in (0.0, 0.8):
        with scripted(wordy()) as llm:
            options: dict[str, Any] = {
                "max_tokens": 30,
                "temperature": temperature,
                "seed": 5,
                "ignore_eos": True,
            }
            answer = llm.generate(PROMPT, decoder="autoregressive", **options)
        same = answer.tokens == plain_oracle(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("one pass per token", answer.stats.passes == 30)


class _CountingFollowing(MultiStep):
    resumptions = 0

    def decode(self, sequence: Sequence) -> Decoding:
        inner = super().decode(sequence)
        answer = None
        while True:
            try:
                answer = yield inner.send(answer)
            except StopIteration:
                return
            self.resumptions += 1


@oracle_test("multi-step")
def multi_step() -> Iterator[Check]:
    """The same tokens with one resumption for every eight tokens."""
    for temperature in (0.0, 0.8):
        decoder = _CountingFollowing(8)
        with scripted(wordy()) as llm:
            options: dict[str, Any] = {"temperature": temperature, "seed": 5, "ignore_eos": True}
            answer = llm.generate(PROMPT, decoder=decoder, max_tokens=30, **options)
        same = answer.tokens == plain_oracle(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("resumed once per eight tokens", decoder.resumptions == 5)


class _RecordingModel(ScriptedModel):
    """Records (position, first layer, last layer) of every row it runs."""

    ran: list[tuple[int, int, int]]

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        positions = np.stack([rows.positions, rows.start, rows.stop], axis=1).tolist()
        self.ran += [tuple(position) for position in positions]
        return super().run(rows, cache, output_spec)


@oracle_test("layer-draft")
def layer_draft() -> Iterator[Check]:
    """Drafting runs the first layers only, and their results are not computed again."""
    model = _RecordingModel(wordy(), vocab_size=VOCABULARY, num_layers=3)
    model.ran = []
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        trace = rounds(llm, LayerDraft(layers=1, size=3), PROMPT, 24)
    yield Check("three drafts per round", all(len(one.tokens) == 3 for one in trace))
    yield Check("drafts are accepted", any(one.accepted for one in trace))
    drafted = [ran for ran in model.ran if ran[1:] == (0, 1)]
    completed = [ran for ran in model.ran if ran[1:] == (1, 3)]
    yield Check(
        "each draft row is completed once, from its last layer on",
        len(drafted) == 3 * len(trace)
        and sorted(position for position, _, _ in drafted)
        == sorted(position for position, _, _ in completed),
    )
    whole = [position for position, *layers in model.ran if layers == [0, 3]]
    last = [len(one.text) + 2 for one in trace]
    yield Check(
        "only the prompt and the last draft of a round run all layers in one pass",
        all(position < len(PROMPT) - 1 or position in last for position in whole),
    )
