"""Prepacking: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anydecode.engine.schedules import prepacking
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("prepacking")


def test_certificate_rejects_the_first_bin_with_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
        bins: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            for one in bins:
                if sum(lengths[i] for i in one) + lengths[index] <= capacity:
                    one.append(index)
                    break
            else:
                bins.append([index])
        return bins

    monkeypatch.setattr(prepacking, "pack", first_fit)
    assert_rejected("prepacking")


def test_certificate_rejects_short_prompts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "is_prompt", lambda request: False)
    assert_rejected("prepacking")


@pytest.mark.parametrize(("parameter", "value"), [("capacity", 63), ("capacity", 65)])
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, prepacking.Prepacking, parameter, value)
    assert_rejected("prepacking")
