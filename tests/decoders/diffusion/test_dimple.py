"""Dimple: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.decoders.diffusion.dimple import dimple
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dimple")


@pytest.mark.parametrize("parameter", ["threshold", "priors", "steps", "prefill", "cache"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "dimple", parameter)
    assert_rejected("dimple")


def test_a_prior_outside_of_the_canvas_is_refused_at_the_request() -> None:
    with scripted_llm(causal=False) as llm:
        for offset in (-1, 8):
            with pytest.raises(InvalidRequestError, match=f"a token at offset {offset}"):
                llm.request("abc", decoder=dimple(priors={offset: "x"}), max_tokens=8)
        found = llm.generate("abc", decoder=dimple(priors={7: "x"}), max_tokens=8, ignore_eos=True)
        assert found.text.endswith("x")
