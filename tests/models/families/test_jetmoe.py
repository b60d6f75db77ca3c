"""JetMoE's experts of attention with packed matrices, which the parity tests do not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.kernels.library import load_library
from anydecode.models.opening import choose_executor
from tiny_models import chain, hf_logits, hf_model, logits, own_model

TEXT = [(7 * i + 3) % 131 for i in range(20)]
#: Rows of whole blocks. All experts run: rounded weights would change which are chosen.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_channels": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 3,
}


@pytest.mark.parametrize("backend", ["torch", *(["native"] if load_library() else [])])
def test_experts_in_q8_0(backend: str) -> None:
    theirs = hf_model("JetMoe", **SIZES)
    expected = hf_logits(theirs, TEXT)
    executor = choose_executor(backend, threads=1)
    own = own_model(theirs, dtype="int8", executor=executor)
    error = np.abs(logits(own, chain(TEXT)) - expected).mean()
    assert error < 0.1 * np.abs(expected).mean()
    for layer in own.network.weights.layers:
        assert layer.attention_experts is not None
        assert {weight.format for weight in layer.attention_experts.queries} == {"Q8_0"}
        assert layer.attention_experts.router.weight.format == "F32"


def test_rows_choose_their_own_experts() -> None:
    """Rows of a pass and the same rows alone have the same bits."""
    own = own_model(hf_model("JetMoe", **{**SIZES, "num_experts_per_tok": 2}))
    together = logits(own, chain(TEXT))
    for count in (1, 7):
        assert np.array_equal(logits(own, chain(TEXT[:count])), together[:count])
