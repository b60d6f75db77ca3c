"""Aggressive decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.speculative.aggressive import InputPointer
from certificates import assert_certified, assert_rejected, replace_method


def test_certificate() -> None:
    assert_certified("aggressive")


def test_certificate_rejects_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "aggressive", "prompt-lookup")
    assert_rejected("aggressive")


def test_certificate_rejects_copying_that_never_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputPointer, "_find_unique_suffix", lambda self: None)
    assert_rejected("aggressive")


def test_input_pointer_restarts_at_a_unique_suffix() -> None:
    pointer = InputPointer([1, 2, 3, 1, 2, 4])
    positions = []
    for token in (2, 1, 2, 4, 9, 3):
        pointer.advance(token)
        positions.append(pointer.position)
    # 2 is ambiguous, as are 1 and "1 2"; "2 1 2" does not occur; 4 and 3 occur once.
    assert positions == [None, None, None, 6, None, 3]
