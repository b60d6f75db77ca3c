"""QuickPrefill: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.certification.checks import measures_of
from anydecode.decoders.prefill import quickprefill
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("quickprefill")


def test_certificate_rejects_the_keys_of_largest_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(keys: np.ndarray, count: int) -> np.ndarray:
        norms = np.linalg.norm(keys.reshape(len(keys), -1), axis=1)
        return np.sort(np.argsort(-norms)[:count])

    monkeypatch.setattr(quickprefill, "smallest", largest)
    (measure,) = measures_of("quickprefill")
    assert measure.run(3) > measure.margin
    assert_rejected("quickprefill")


def test_certificate_rejects_the_first_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickprefill, "smallest", lambda keys, count: np.arange(count))
    assert_rejected("quickprefill")


@pytest.mark.parametrize(
    ("parameter", "value"), [("group", 255), ("keep", 0.49), ("query", 63), ("query", 65)]
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "quickprefill", **{parameter: value})
    assert_rejected("quickprefill")
