"""QuickPrefill: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest
import torch

from anydecode.certification.checks import measures_of
from anydecode.decoders.prefill import quickprefill
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("quickprefill")


def test_certificate_rejects_the_keys_of_largest_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(keys: torch.Tensor, count: int) -> torch.Tensor:
        norms = keys.float().flatten(1).norm(dim=1)
        return torch.sort(norms, descending=True).indices[:count].sort().values

    monkeypatch.setattr(quickprefill, "smallest", largest)
    (measure,) = measures_of("quickprefill")
    assert measure.run(3) > measure.margin
    assert_rejected("quickprefill")


def test_certificate_rejects_the_first_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickprefill, "smallest", lambda keys, count: torch.arange(count))
    assert_rejected("quickprefill")
