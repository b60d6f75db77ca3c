"""Spilled prefixes: their certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.memory.spill import DiskSpill, MemorySpill
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("prefix-spill")


def test_certificate_rejects_blocks_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    get = MemorySpill.get

    def flipped(self: MemorySpill, key: bytes) -> bytes | None:
        block = get(self, key)
        return block and bytes([block[0] ^ 1]) + block[1:]

    monkeypatch.setattr(MemorySpill, "get", flipped)
    assert_rejected("prefix-spill")


def test_certificate_rejects_a_spill_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskSpill, "get", lambda self, key: None)
    assert_rejected("prefix-spill")
