"""GEAR passes its certificate; wrong compressions of a full buffer do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.decoders.prefill import gear
from anydecode.decoders.prefill.gear import Gear
from anydecode.memory.sequence_cache import SequenceCache
from certificates import assert_certified, assert_rejected, replace_class_default

compress, compress_block = gear.compress, Gear._compress


def test_certificate() -> None:
    assert_certified("gear")


def test_buffers_with_the_rank_of_the_prompt_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_rank(self: Gear, kv_cache: SequenceCache, start: int, rank: int) -> None:
        compress_block(self, kv_cache, start, self.rank)

    monkeypatch.setattr(Gear, "_compress", same_rank)
    assert_rejected("gear")


def test_buffers_that_are_never_compressed_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt_only(self: Gear, kv_cache: SequenceCache, start: int, rank: int) -> None:
        if not start:
            compress_block(self, kv_cache, start, rank)

    monkeypatch.setattr(Gear, "_compress", prompt_only)
    assert_rejected("gear")


def test_keys_compressed_per_token_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_token(x: np.ndarray, **options: Any) -> Any:
        return compress(x, **{**options, "keys": False})

    monkeypatch.setattr(gear, "compress", per_token)
    assert_rejected("gear")


def test_buffers_compressed_again_with_the_next_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def from_the_first(self: Gear, kv_cache: SequenceCache, start: int, rank: int) -> None:
        compress_block(self, kv_cache, max(0, start - self.buffer), rank)

    monkeypatch.setattr(Gear, "_compress", from_the_first)
    assert_rejected("gear")


def test_compression_without_the_low_rank_part_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gear, "compress", lambda x, **o: compress(x, **{**o, "rank": 0}))
    assert_rejected("gear")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("bits", 5), ("rank", 3), ("tail", 1), ("sparse", 0.01), ("sparse", 0.03), ("buffer", 63)],
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, Gear, parameter, value)
    assert_rejected("gear")
