"""Oracle test of multi-step: the tokens of plain decoding, with one resumption for every eight
tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.plain_tokens import PROMPT, plain_tokens
from anydecode.certification.rounds import scripted, wordy
from anydecode.decoders.multi_step import MultiStep
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence


class CountingMultiStep(MultiStep):
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
        decoder = CountingMultiStep(8)
        with scripted(wordy()) as llm:
            options: dict[str, Any] = {"temperature": temperature, "seed": 5, "ignore_eos": True}
            answer = llm.generate(PROMPT, decoder=decoder, max_tokens=30, **options)
        same = answer.tokens == plain_tokens(temperature, 30)
        yield Check(f"T={temperature} equals the formula", same)
        yield Check("resumed once per eight tokens", decoder.resumptions == 5)
