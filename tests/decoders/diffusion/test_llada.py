"""LLaDA: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM, catalogue
from anydecode.certification.certify import claim
from anydecode.decoders.diffusion.llada import Llada
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("llada")


@pytest.mark.parametrize("parameter", ["block", "steps", "remasking", "guidance", "end"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "llada", parameter)
    assert_rejected("llada")


def test_certificate_rejects_guidance_towards_the_masked_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Llada.forward

    def swapped(self: Llada, *args: Any) -> Any:
        found = yield from forward(self, *args)
        return found[::-1]

    monkeypatch.setattr(Llada, "forward", swapped)
    assert_rejected("llada")


@pytest.mark.parametrize(
    ("parameters", "message"), [("guidance=-1", "0 or more"), ("end=first", "allowed, last, never")]
)
def test_wrong_parameters_raise_an_error(parameters: str, message: str) -> None:
    with LLM("tiny-diffusion") as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate("a", decoder=f"llada:{parameters}")


def test_guidance_survives_restarts_and_batches() -> None:
    checks = list(claim(catalogue.find("llada").card, lambda: catalogue.build("llada", guidance=1)))
    assert len(checks) == 4 and all(check.passed for check in checks), checks
