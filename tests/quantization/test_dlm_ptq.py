"""Weight formats of diffusion models: their certificate, and mistakes that it rejects."""

from __future__ import annotations

import numpy as np
import pytest

from anydecode.benchmarks.parallelbench.bench import diffusion_methods
from anydecode.certification.certify import certify_one
from anydecode.certification.denoising import bidirectional, dense
from anydecode.certification.oracles.quantization.dlm_ptq import loss
from anydecode.errors import InvalidRequestError
from anydecode.kernels.formats import quantize
from anydecode.kernels.interface import Weight
from anydecode.models import gptq
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("dlm-ptq")


def test_certificate_rejects_another_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(gptq, "DAMPING", 0.5)
    assert_rejected("dlm-ptq")


@pytest.mark.slow
def test_codes_that_are_one_too_low_fail_the_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(
        gptq, "quantize_matrix", lambda matrix, hessian, name="": shifted(matrix, name)
    )
    loss.cache_clear()
    failures = [check.name for check in certify_one("dlm-ptq").checks if not check.passed]
    loss.cache_clear()
    assert {"accuracy lost, int4-gptq", "nats lost per masked token, int4-gptq"} <= {*failures}
    assert not any(name.endswith((" int4", " int8")) for name in failures)


def shifted(matrix: np.ndarray, name: str) -> Weight:
    """Q4_0 with the low nibble of each byte one too low."""
    weight = quantize(matrix, "Q4_0", name)
    codes = weight.data.reshape(len(matrix), -1, 18)[..., 2:]
    codes -= (codes & 15 > 0).astype(np.uint8)
    return weight


def test_dlm_ptq_is_not_a_decoder() -> None:
    assert "dlm-ptq" not in diffusion_methods()
    with bidirectional(dense()) as llm, pytest.raises(InvalidRequestError, match="not a decoder"):
        llm.generate([5], decoder="dlm-ptq", max_tokens=2)
