"""Sorted speculative decoding: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative.s2d import NestedDrafter
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("s2d")


@pytest.mark.parametrize("defaults", [{"size": 3}, {"exits": "0.5"}, {"confidence": 0.75}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "s2d", **defaults)
    assert_rejected("s2d")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "s2d", "speculative-sampling")
    assert_rejected("s2d")


def test_certificate_rejects_other_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_exits(self: NestedDrafter, depth: int) -> list[int]:
        return [layer for layer in (depth // 2 - 1, depth - 2) if layer > 0]

    monkeypatch.setattr(NestedDrafter, "layers", other_exits)
    assert_rejected("s2d")
