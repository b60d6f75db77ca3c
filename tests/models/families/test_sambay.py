"""SambaY: its certificate, mistakes that the certificate rejects, and what its configs may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.api.llm import LLM
from anydecode.certification.oracles.families.sambay import Forward
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.kernels.library import load_library
from anydecode.kernels.recurrent import PassStates, Scan
from anydecode.models.differential import DifferentialWeights
from anydecode.models.families import build, build_model, spec_from_config
from anydecode.models.memory_unit import MemoryUnit
from anydecode.models.opening import choose_executor
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.spec import ModelSpec
from certificates import assert_certified, assert_rejected
from tiny_models import chain, logits, whole

BACKENDS = ["torch", *(["native"] if load_library() is not None else [])]
TOKENS = [int(token) for token in np.random.default_rng(5).integers(97, 103, 30)]


def open_llm(**options: Any) -> LLM:
    model = build_model(sambay_checkpoint(), executor=choose_executor(None, threads=1))
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024, **options)


def test_certificate() -> None:
    assert_certified("sambay")


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_those_of_the_oracle(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    checkpoint = sambay_checkpoint(seed=3, layers=8, window=4)
    model = build_model(checkpoint, executor=choose_executor(backend, threads=2))
    found = logits(model, whole(chain(TOKENS), model), model.new_cache(64, "float32"))
    expected = Forward(checkpoint).logits(TOKENS)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_certificate_rejects_a_memory_unit_that_activates_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swapped(unit: MemoryUnit, backend: Any, x: Any, memory: Any) -> Any:
        gated = backend.gated(memory, unit.gate.apply(backend, x), "silu")
        return unit.output.apply(backend, gated)

    monkeypatch.setattr(MemoryUnit, "apply", swapped)
    assert_rejected("sambay")


def test_certificate_rejects_factors_of_layers_counted_from_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = build.read_differential
    monkeypatch.setattr(
        build,
        "read_differential",
        lambda reader, name, i, *rest: read(reader, name, i + 1, *rest),
    )
    assert_rejected("sambay")


def test_certificate_rejects_maps_that_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = DifferentialWeights.combine
    monkeypatch.setattr(
        DifferentialWeights,
        "combine",
        lambda own, *rest: combine(replace(own, factor=-own.factor), *rest),
    )
    assert_rejected("sambay")


def test_certificate_rejects_prompts_that_run_through_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModelSpec, "num_storing_layers", property(lambda spec: spec.num_layers))
    assert_rejected("sambay")


def test_states_of_rows_that_stop_early_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, scan = [], PassStates.scan

    def counting(states: PassStates, active: Any) -> Scan:
        found = scan(states, active)
        steps.append(len(found.slots) - found.lead * len(found.start))
        return found

    monkeypatch.setattr(PassStates, "scan", counting)
    with open_llm(row_budget=16) as llm:
        llm.generate([*TOKENS, *TOKENS], max_tokens=3, ignore_eos=True, decoder="autoregressive")
    # The rows of each chunk, and the next tokens. The last chunk's layers are run in two parts.
    assert steps == [16, 16, 16, 12, 12, 1, 1]


@pytest.mark.parametrize("decoder", ["layerskip", "easyspec", "gear"])
def test_methods_that_need_other_layers_are_refused(decoder: str) -> None:
    draft = build_model(sambay_checkpoint(), executor=choose_executor(None, threads=1))
    with open_llm(draft=draft) as llm, pytest.raises(UnsupportedCombinationError) as caught:
        llm.generate(TOKENS, max_tokens=8, decoder=decoder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10}, "a multiple of 4"),
        ({"mb_per_layer": 3}, "mb_per_layer"),
        ({"num_key_value_heads": 1}, "an even number"),
    ],
)
def test_other_layouts_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**sambay_checkpoint().config, **changes})


def test_a_window_per_layer_is_that_of_the_layers_that_have_one() -> None:
    config = sambay_checkpoint().config
    windows = [7 if layer in (1, 3, 5) else None for layer in range(12)]
    spec = spec_from_config({**config, "sliding_window": windows})
    found = [layer.attention and layer.attention.window for layer in spec.layers]
    assert found == windows
