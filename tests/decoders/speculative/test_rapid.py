"""RAPID: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.decoders.speculative import rapid
from anydecode.decoders.speculative.rapid import retrieve_chunks
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("rapid")


@pytest.mark.parametrize(
    "defaults", [{"size": 9}, {"chunk": 65}, {"count": 7}, {"query": 127}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "rapid", **defaults)
    assert_rejected("rapid")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "rapid", "speculative-sampling")
    assert_rejected("rapid")


def test_certificate_rejects_the_query_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rapid, "retrieve_chunks", lambda prompt, chunk, count, query: prompt[-query:]
    )
    assert_rejected("rapid")


def test_retrieved_prompt_ends_with_the_query() -> None:
    assert retrieve_chunks([1, 2, 3], 4, 2, 8) == [1, 2, 3]
    assert retrieve_chunks(list(range(20)), 5, 1, 3)[-3:] == [17, 18, 19]
