"""WINO: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM
from anydecode.certification.denoising import bidirectional, dense, random_model
from anydecode.decoders.diffusion.wino import ShadowSpan
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("wino")


@pytest.mark.parametrize("parameter", ["threshold", "keep", "block"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "wino", parameter)
    assert_rejected("wino")


@pytest.mark.parametrize("defaults", [{"threshold": 0.65}, {"keep": 0.85}])
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "wino", **defaults)
    assert_rejected("wino")


def test_certificate_rejects_rows_that_see_their_own_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rows = ShadowSpan.write_rows

    def leaky(self: ShadowSpan, rows: Rows, at: int, count: int) -> None:
        write_rows(self, rows, at, count)
        rows.table[at : at + count] = rows.table[at]

    monkeypatch.setattr(ShadowSpan, "write_rows", leaky)
    assert_rejected("wino")


def test_finished_blocks_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    with random_model(block_size=4) as llm:
        plain, cached = (
            llm.generate([5, 6, 7], decoder=f"wino:cache={cache}", **options)
            for cache in ("none", "block")
        )
        assert cached.tokens == plain.tokens
        assert cached.stats.rows < plain.stats.rows
    write_rows = ShadowSpan.write_rows

    def forgetful(self: ShadowSpan, rows: Rows, at: int, count: int) -> None:
        first = len(rows.tables)
        write_rows(self, rows, at, count)
        for table in rows.tables[first:]:
            table[: self.kv_cache.length] = -1

    monkeypatch.setattr(ShadowSpan, "write_rows", forgetful)
    with random_model(block_size=4) as llm:
        wrong = llm.generate([5, 6, 7], decoder="wino:cache=block", **options)
        assert wrong.tokens != plain.tokens


def test_wrong_parameters_raise_an_error() -> None:
    with LLM("tiny-diffusion") as llm, pytest.raises(InvalidRequestError, match="between 0 and 1"):
        llm.generate("a", decoder="wino:keep=2")
    shifted = bidirectional(dense(), shift=1)
    with shifted as llm, pytest.raises(UnsupportedCombinationError, match="shifted logits"):
        llm.generate([5, 6], decoder="wino", max_tokens=8)
