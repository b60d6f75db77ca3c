"""Elastic-Cache: it equals the oracle, restarts keep its state, and the oracle detects errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.checks import Restarts, scripted_llm
from anydecode.certification.denoising import random_model
from anydecode.certification.oracles.diffusion.elastic_cache import engine_run, oracle
from anydecode.decoders.diffusion.elastic_policy import ElasticCachePolicy
from anydecode.errors import UnsupportedCombinationError
from certificates import assert_certified, assert_rejected, ignore_parameter


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("elastic-cache")


@pytest.mark.parametrize("parameter", ["window", "threshold", "drift"])
def test_certificate_rejects_an_ignored_parameter(
    parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignore_parameter(monkeypatch, "elastic-cache", parameter)
    assert_rejected("elastic-cache")


@pytest.mark.parametrize(("shift", "size"), [(1, None), (0, 4)])
def test_shifted_logits_and_model_blocks_equal_the_oracle(shift: int, size: int | None) -> None:
    with random_model(size, layers=3) as llm:
        model = llm.engine.runners["target"].model
        model.spec = replace(model.spec, logit_shift=shift)
        found = engine_run(llm, 21, window=6, threshold=0.4, drift=0.95)
        assert found == oracle(model, 21, 6, 0.4, 0.95, shift, size)
        assert set(found[2]) > {0, 3}
        assert found != oracle(model, 21, 6, 0.4, 0.95, 1 - shift, size)


def _one_layer_late(since: int, num_layers: int) -> int:
    return min(since + 1, num_layers)


def _never(since: int, num_layers: int) -> int:
    return num_layers


@pytest.mark.parametrize("mistake", [_one_layer_late, _never])
def test_a_refresh_from_a_wrong_layer_is_detected(
    mistake: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ElasticCachePolicy._drifted

    def wrong(*args: Any) -> tuple[int, list[np.ndarray]]:
        since, current_rows = right(*args)
        return mistake(since, 4), current_rows

    monkeypatch.setattr(ElasticCachePolicy, "_drifted", wrong)
    with random_model(layers=4) as llm:
        found = engine_run(llm, 16, window=6, threshold=0.4, drift=0.99)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.99)
    assert found != expected


def test_attention_of_a_wrong_layer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticCachePolicy._drifted

    def wrong(*args: Any) -> tuple[int, list[np.ndarray]]:
        since, current_rows = right(*args)
        return since, current_rows[::-1]

    monkeypatch.setattr(ElasticCachePolicy, "_drifted", wrong)
    with random_model(layers=4) as llm:
        found = engine_run(llm, 16, window=6, threshold=0.4, drift=0.9)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.9)
    assert found != expected


def test_a_wrong_tracked_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticCachePolicy._track

    def wrong(*args: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        tracked, attention = right(*args)
        return np.zeros_like(tracked), attention

    monkeypatch.setattr(ElasticCachePolicy, "_track", wrong)
    with random_model(layers=4) as llm:
        found = engine_run(llm, 16, window=6, threshold=0.4, drift=0.9)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.9)
    assert found != expected


def answers(llm: LLM) -> list[list[int]]:
    prompts = ["copy: Ada Mia Omar", "shuffle: Uma Elsa Rosa Tess Hugo"]
    decoder = "elastic-cache:window=5,threshold=0.999,drift=0.99"
    found = llm.generate(prompts, decoder=decoder, max_tokens=16, ignore_eos=True)
    return [answer.tokens for answer in found]


def test_restarts_do_not_change_the_text_with_packed_weights() -> None:
    with LLM("tiny-diffusion", threads=1) as llm:
        expected = answers(llm)
        with Restarts(llm.engine, seed=5, share=0.5):
            assert answers(llm) == expected
            llm.engine.check_integrity()


def test_wrong_states_after_a_restart_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticCachePolicy._rebuild
    with LLM("tiny-diffusion", threads=1) as llm:
        expected = answers(llm)
        monkeypatch.setattr(
            ElasticCachePolicy,
            "_rebuild",
            lambda self, sequence, canvas, states: right(
                self, sequence, canvas, np.zeros_like(states)
            ),
        )
        with Restarts(llm.engine, seed=5, share=0.5):
            assert answers(llm) != expected


def test_a_model_without_readable_weights_raises_an_error() -> None:
    with (
        scripted_llm(causal=False) as llm,
        pytest.raises(UnsupportedCombinationError, match="attention weights cannot be computed"),
    ):
        llm.generate("x", decoder="elastic-cache", max_tokens=8)
