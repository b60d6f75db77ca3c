"""Plain decoding, following, and drafts from the first layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.decoders.autoregressive import MultiStep
from anydecode.decoders.depth.layer_draft import LayerDraft
from anydecode.engine.llm import LLM
from anydecode.evaluation.certify import Check, mechanism
from anydecode.evaluation.rounds import VOCABULARY, picked, rounds, scripted, wordy
from anydecode.kernels.interface import KeyValues, Output, OutputSpec, Rows
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

PROMPT = list(b"the cab had")


def plain_oracle(temperature: float, count: int) -> list[int]:
    """Argmax of logits over temperature plus noise, from the whole text every time."""
    logits, text = wordy(), list(PROMPT)
    for _ in range(count):
        text.append(picked(logits(tuple(text)), len(text), temperature))
    return text[len(PROMPT) :]


@mechanism("autoregressive")
def autoregressive() -> Iterator[Check]:
    """One pass per token, and the token that the formula picks."""
    for temperature in (0.0, 0.8):
        with scripted(wordy()) as llm:
            options = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
            answer = llm.generate(PROMPT, decoder="autoregressive", **options)
        same = answer.tokens == plain_oracle(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("one pass per token", answer.stats.passes == 30)


class _Counted(MultiStep):
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


@mechanism("following")
def following() -> Iterator[Check]:
    """The same tokens in an eighth of the resumptions."""
    for temperature in (0.0, 0.8):
        decoder = _Counted(8)
        with scripted(wordy()) as llm:
            options = {"temperature": temperature, "seed": 5, "ignore_eos": True}
            answer = llm.generate(PROMPT, decoder=decoder, max_tokens=30, **options)
        same = answer.tokens == plain_oracle(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("resumed once for eight tokens", decoder.resumptions == 5)


class _Watched(ScriptedModel):
    """Keeps (position, first layer, last layer) of every row it runs."""

    ran: list[tuple[int, int, int]]

    def run(self, rows: Rows, cache: KeyValues, output_spec: OutputSpec) -> Output:
        positions = np.stack([rows.positions, rows.start, rows.stop], axis=1).tolist()
        self.ran += [tuple(position) for position in positions]
        return super().run(rows, cache, output_spec)


@mechanism("layer-draft")
def layer_draft() -> Iterator[Check]:
    """Drafts run the first layers only, and what they computed is never computed again."""
    model = _Watched(wordy(), vocab_size=VOCABULARY, num_layers=3)
    model.ran = []
    with LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        found = rounds(llm, LayerDraft(layers=1, size=3), PROMPT, 24)
    yield Check("three drafts a round", all(len(one.tokens) == 3 for one in found))
    yield Check("drafts are accepted", any(one.accepted for one in found))
    drafted = [ran for ran in model.ran if ran[1:] == (0, 1)]
    completed = [ran for ran in model.ran if ran[1:] == (1, 3)]
    yield Check(
        "each drafting row is completed once, from its layer on",
        len(drafted) == 3 * len(found)
        and sorted(position for position, _, _ in drafted)
        == sorted(position for position, _, _ in completed),
    )
    whole = [position for position, *layers in model.ran if layers == [0, 3]]
    last = [len(one.text) + 2 for one in found]
    yield Check(
        "only the prompt and the last draft of a round run all layers at once",
        all(position < len(PROMPT) - 1 or position in last for position in whole),
    )
