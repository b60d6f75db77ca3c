"""What decoders keep of earlier texts is bounded by bytes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.api.methods import Methods
from anydecode.certification.checks import scripted_llm
from anydecode.models.hidden_transfer import HiddenTransfer

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
        decoder: Any = known.find(f"suffix:memory={1_000_000_000 + number}")
        decoder.drafter.learn(list(range(1000)))  # some 400 KB
        decoders.append(decoder)
        assert known.learned_bytes <= 1.5 * (1 << 20)
    assert known.find("suffix:memory=1000000004") is decoders[4]
    assert known.find("suffix:memory=1000000000") is not decoders[0]
    decoders[4].drafter.learn([*range(4000)])  # more than all may have
    known.find("prompt-lookup")
    assert known.find("suffix:memory=1000000004") is not decoders[4]


def test_a_decoder_is_built_anew_when_its_file_has_changed(tmp_path: Path) -> None:
    file, known = tmp_path / "maps.safetensors", Methods()

    def write(value: float, ranks: int) -> Any:
        maps, accuracies = np.full((1, 4, 4), value, np.float32), np.full((1, ranks), 0.1)
        HiddenTransfer(maps, (0,), accuracies, "model").save(file)
        return known.find(f"hidden-transfer:maps={file}")

    first = write(1.0, 2)
    assert known.find(f"hidden-transfer:maps={file}") is first
    second = write(2.0, 3)
    assert second is not first and known.find(f"hidden-transfer:maps={file}") is second


def test_requests_on_several_threads_find_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread adds a decoder while another adds up what all have learned: without a lock, the
    dictionary changes while it is read."""
    known = Methods()
    known.find("suffix")
    others: list[threading.Thread] = []

    def num_bytes(self: Any) -> int:
        if not others:
            others.append(threading.Thread(target=known.find, args=("token-recycling",)))
            others[0].start()
            others[0].join(timeout=0.3)
        return 0

    monkeypatch.setattr(type(known.find("suffix")), "num_bytes", property(num_bytes))
    assert known.find("prompt-lookup") is known.find("prompt-lookup")
    others[0].join()
