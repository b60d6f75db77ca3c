"""Elastic-Cache: what it keeps is what it says it keeps, and its oracle finds mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from anydecode.decoders.diffusion.elastic_cache import ElasticDenoiser
from anydecode.engine.llm import LLM
from anydecode.errors import UnsupportedCombinationError
from anydecode.evaluation.certify import _Restarts, scripted_llm
from anydecode.evaluation.denoising import random_model
from anydecode.evaluation.mechanisms.diffusion_elastic import oracle, story


@pytest.mark.parametrize(("shift", "size"), [(1, None), (0, 4)])
def test_shifted_models_and_models_with_blocks_do_what_the_oracle_does(
    shift: int, size: int | None
) -> None:
    with random_model(size, layers=3, readable=True) as llm:
        model = llm.engine.runners["target"].model
        model.spec = replace(model.spec, logit_shift=shift)
        found = story(llm, 21, window=6, threshold=0.4, drift=0.95)
        assert found == oracle(model, 21, 6, 0.4, 0.95, shift, size)
        assert set(found[2]) > {0, 3}
        assert found != oracle(model, 21, 6, 0.4, 0.95, 1 - shift, size)


def _one_layer_late(found: int, depth: int) -> int:
    return min(found + 1, depth)


def _never(found: int, depth: int) -> int:
    return depth


@pytest.mark.parametrize("mistake", [_one_layer_late, _never])
def test_a_refresh_from_another_layer_is_found_out(
    mistake: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ElasticDenoiser._drifted

    def wrong(*args: Any) -> tuple[int, list[np.ndarray]]:
        since, known = right(*args)
        return mistake(since, 4), known

    monkeypatch.setattr(ElasticDenoiser, "_drifted", wrong)
    with random_model(layers=4, readable=True) as llm:
        found = story(llm, 16, window=6, threshold=0.4, drift=0.99)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.99)
    assert found != expected


def test_a_row_kept_from_another_layer_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticDenoiser._drifted

    def wrong(*args: Any) -> tuple[int, list[np.ndarray]]:
        since, known = right(*args)
        return since, known[::-1]

    monkeypatch.setattr(ElasticDenoiser, "_drifted", wrong)
    with random_model(layers=4, readable=True) as llm:
        found = story(llm, 16, window=6, threshold=0.4, drift=0.9)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.9)
    assert found != expected


def test_the_row_of_another_token_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticDenoiser._track

    def wrong(*args: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        tracked, attention = right(*args)
        return np.zeros_like(tracked), attention

    monkeypatch.setattr(ElasticDenoiser, "_track", wrong)
    with random_model(layers=4, readable=True) as llm:
        found = story(llm, 16, window=6, threshold=0.4, drift=0.9)
        expected = oracle(llm.engine.runners["target"].model, 16, 6, 0.4, 0.9)
    assert found != expected


def answers(llm: LLM) -> list[list[int]]:
    prompts = ["copy: Ada Mia Omar", "shuffle: Uma Elsa Rosa Tess Hugo"]
    decoder = "elastic-cache:window=5,threshold=0.999,drift=0.99"
    found = llm.generate(prompts, decoder=decoder, max_tokens=16, ignore_eos=True)
    return [answer.tokens for answer in found]


def test_restarts_lose_nothing_where_the_kernels_have_packed_the_weights() -> None:
    with LLM("tiny-diffusion", threads=1) as llm:
        expected = answers(llm)
        with _Restarts(llm.engine, seed=5, share=0.5):
            assert answers(llm) == expected
            llm.engine.check_integrity()


def test_states_that_a_restart_forgot_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ElasticDenoiser._rebuild
    with LLM("tiny-diffusion", threads=1) as llm:
        expected = answers(llm)
        monkeypatch.setattr(
            ElasticDenoiser,
            "_rebuild",
            lambda self, sequence, canvas, states: right(
                self, sequence, canvas, torch.zeros_like(states)
            ),
        )
        with _Restarts(llm.engine, seed=5, share=0.5):
            assert answers(llm) != expected


def test_a_model_whose_layers_cannot_be_read_is_refused() -> None:
    with (
        scripted_llm(causal=False) as llm,
        pytest.raises(UnsupportedCombinationError, match="attention is not to be had"),
    ):
        llm.generate("x", decoder="elastic-cache", max_tokens=8)
