"""What decoders keep of earlier texts is bounded by bytes."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.methods import Methods
from anydecode.certification.checks import scripted_llm

#: Decoders that learn from one request to the next.
LEARNING = ("suffix", "stand", "aded", "token-recycling", "auto", "taps", "asap")


@pytest.mark.parametrize("key", LEARNING)
def test_decoders_report_what_they_have_learned(key: str) -> None:
    with scripted_llm() as llm:
        before = llm.decoder(key).num_bytes
        for prompt in ("abc abc", "xyz xyz"):
            llm.generate(prompt, decoder=key, max_tokens=40, temperature=1.0, seed=1)
        assert llm.decoder(key).num_bytes >= before + 2000


def test_decoders_are_dropped_when_they_have_learned_too_much() -> None:
    known = Methods(max_learned_bytes=1 << 20)
    decoders: list[Any] = []
    for number in range(5):
        decoder: Any = known.find(f"suffix:memory={90_000 + number}")
        decoder.drafter.learn(list(range(1000)))  # some 400 KB
        decoders.append(decoder)
        assert known.learned_bytes <= 1.5 * (1 << 20)
    assert known.find("suffix:memory=90004") is decoders[4]
    assert known.find("suffix:memory=90000") is not decoders[0]
    decoders[4].drafter.learn([*range(4000)])  # more than all may have
    known.find("prompt-lookup")
    assert known.find("suffix:memory=90004") is not decoders[4]
