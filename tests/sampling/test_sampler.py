"""When a backend may sample in the place of the sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anydecode import Regex
from anydecode.certification.oracles.prefill.dense_pass import deep_model, open_llm
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.penalties import CountPenalty
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.truncation import TopK

STATE: Any = SimpleNamespace(mask=lambda: None)
CONSTRAINT, COMBINER = Constrained(STATE), SimpleNamespace(companions=1, capture_layers=())


@pytest.mark.parametrize(
    ("parts", "temperature_only", "constraint_only"),
    [
        ({}, True, False),
        ({"pre_temperature": [CONSTRAINT]}, False, True),
        ({"pre_temperature": [CountPenalty(1.0)]}, False, False),
        ({"pre_temperature": [CountPenalty(1.0), CONSTRAINT]}, False, False),
        ({"post_temperature": [TopK(1)]}, False, False),
        ({"pre_temperature": [CONSTRAINT], "post_temperature": [TopK(1)]}, False, False),
        ({"combiner": COMBINER}, False, False),
        ({"pre_temperature": [CONSTRAINT], "combiner": COMBINER}, False, False),
    ],
)
def test_only_a_temperature_and_a_constraint_leave_the_token_to_the_backend(
    parts: dict[str, Any], temperature_only: bool, constraint_only: bool
) -> None:
    sampler = Sampler(0.7, **parts)
    assert sampler.is_temperature_only == temperature_only
    assert sampler.is_constraint_only == constraint_only


def test_a_truncation_holds_beside_a_constraint() -> None:
    options: dict[str, Any] = {"constraint": Regex("[ -~]{20}"), "max_tokens": 20, "seed": 1}
    with open_llm(deep_model()) as llm:
        likeliest = llm.generate("abc", **options).tokens
        assert llm.generate("abc", temperature=2.0, top_k=1, **options).tokens == likeliest
        assert llm.generate("abc", temperature=2.0, **options).tokens != likeliest
