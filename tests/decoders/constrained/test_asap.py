"""Grammar-aligned decoding (ASAp): its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.decoders.constrained.asap import Asap, Node
from certificates import assert_certified, assert_rejected


def test_certificate() -> None:
    assert_certified("asap")


def test_certificate_rejects_estimates_that_never_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "update", lambda self: None)
    assert_rejected("asap")


def test_certificate_rejects_estimates_of_the_last_prefix_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Asap, "_refine", staticmethod(lambda path: path[-1].update()))
    assert_rejected("asap")
