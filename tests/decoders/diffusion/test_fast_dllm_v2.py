"""Fast-dLLM v2: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM, catalogue
from anydecode.certification.certify import claim
from anydecode.decoders.diffusion import named_caches, sub_blocks
from anydecode.decoders.diffusion.caches import BlockCausalCache
from anydecode.decoders.diffusion.sub_blocks import SubBlockCache, SubBlocks
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("fast-dllm-v2")


@pytest.mark.parametrize("parameter", ["sub_block", "threshold", "cache"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "fast-dllm-v2", parameter)
    assert_rejected("fast-dllm-v2")


@pytest.mark.parametrize("defaults", [{"sub_block": 16}, {"threshold": 0.9}])
def test_certificate_rejects_other_defaults(
    defaults: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_defaults(monkeypatch, "fast-dllm-v2", **defaults)
    assert_rejected("fast-dllm-v2")


def test_certificate_rejects_blocks_without_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first position of a block is predicted together with the others."""
    monkeypatch.setattr(sub_blocks, "is_first_of_block", lambda canvas, position: False)
    assert_rejected("fast-dllm-v2")


def test_certificate_rejects_sub_blocks_from_the_first_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SubBlocks, "start", lambda self, canvas, position: position)
    assert_rejected("fast-dllm-v2")


def test_certificate_rejects_finished_blocks_that_keep_masked_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SubBlockCache, "num_finished", lambda self, canvas, cache: cache.length)
    assert_rejected("fast-dllm-v2")


def test_certificate_rejects_a_hierarchical_cache_of_whole_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(named_caches, "SubBlockCache", lambda size, parts: BlockCausalCache(size))
    assert_rejected("fast-dllm-v2")


def test_the_cache_of_sub_blocks_survives_restarts_and_batches() -> None:
    def make() -> Any:
        return catalogue.build("fast-dllm-v2", sub_block=2, threshold=0.5, cache="dual")

    checks = list(claim(catalogue.find("fast-dllm-v2").card, make))
    assert len(checks) == 4 and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("sub_block=0", "sub_block is 0; allowed are 1 to 65536"),
        ("threshold=2", "between 0 and 1"),
        ("cache=prefix", "one of none, dual"),
    ],
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with LLM("tiny-blocks") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", decoder=f"fast-dllm-v2:{parameters}")
