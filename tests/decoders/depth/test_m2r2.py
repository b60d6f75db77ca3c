"""Drafts of an accelerated stream pass their certificate; other streams do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import accelerated_model, add_accelerators, tiny_model
from anydecode.decoders.depth import m2r2
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.kernels.arithmetic import RowArithmetic
from anydecode.models import accelerators
from anydecode.models.accelerators import Accelerators
from anydecode.models.exit_files import write_exits
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("m2r2")


@pytest.mark.slow
def test_another_draft_length_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "m2r2", size=4)
    assert_rejected("m2r2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", ["the last key only", "keys before it", "queries without positions", "no norm"]
)
def test_other_streams_are_rejected(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    own = Accelerators.__call__
    if mistake == "queries without positions":
        monkeypatch.setattr(RowArithmetic, "rope", lambda self, x, *given: x)
    elif mistake == "no norm":
        monkeypatch.setattr(RowArithmetic, "rms_norm", lambda self, x, *given: x)
    else:

        def wrong(self: Any, spec: Any, state: Any, position: int, keys_values: Any) -> Any:
            part = slice(-1, None) if mistake == "the last key only" else slice(None, -1)
            return own(
                self,
                spec,
                state,
                position,
                lambda layer: tuple(one[part] for one in keys_values(layer)),
            )

        monkeypatch.setattr(Accelerators, "__call__", wrong)
    assert_rejected("m2r2")


@pytest.mark.slow
def test_a_stream_that_starts_behind_the_first_adapter_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = m2r2._Session.__init__

    def later(self: Any, *given: Any) -> None:
        start(self, *given)
        self.first = self.exit

    monkeypatch.setattr(m2r2._Session, "__init__", later)
    assert_rejected("m2r2")


@pytest.mark.slow
def test_the_head_of_the_model_s_own_stream_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerators, "__call__", lambda self, spec, state, *given: state)
    assert_rejected("m2r2")


def test_the_stream_stores_nothing() -> None:
    """The keys and values of a text are, bit for bit, those of plain decoding."""
    found = []
    for decoder in ("autoregressive", "m2r2"):
        with accelerated_model(prefix_cache=False) as llm:
            request = llm.request("abc", decoder=decoder, max_tokens=30, ignore_eos=True)
            llm.start(request, background=False)
            jobs = llm.engine.running

            def has_text(jobs: list[Any] = jobs) -> bool:
                return bool(jobs) and len(jobs[0].sequence.tokens) > 20

            llm.driver.advance(has_text)
            kv_cache = jobs[0].sequence.kv_cache()
            slots, cache = kv_cache.table[:20], kv_cache.pool.cache
            found.append([one[slots].copy() for one in (*cache.keys, *cache.values)])
    plain, drafted = found
    assert all(np.array_equal(one, other) for one, other in zip(plain, drafted, strict=True))


def test_texts_of_a_batch_are_those_that_each_has_alone() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    prompts = ["abc", "the cat", "q"]
    with accelerated_model() as llm:
        plain = [one.tokens for one in llm.generate(prompts, decoder="autoregressive", **options)]
        found = llm.generate(prompts, decoder="m2r2", trace=True, **options)
    assert [one.tokens for one in found] == plain
    assert sum(len(entry["accepted"]) for one in found for entry in one.trace or ()) > 20


def test_accelerators_are_read_as_written(tmp_path: Path) -> None:
    file = tmp_path / accelerators.FILE_NAME
    with accelerated_model() as llm:
        own: Accelerators = llm.model.accelerators  # type: ignore[attr-defined]
        own.save(file)
        found = Accelerators.load(file)
        assert found.layers == [1, 2, 3] and found.fingerprint == own.fingerprint
        for part in accelerators.PARTS:
            for layer in found.layers:
                assert np.array_equal(getattr(found, part)[layer], getattr(own, part)[layer])
        options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "trace": True}
        drafted = [
            [entry["drafted"] for entry in llm.generate("a", decoder=one, **options).trace or ()]
            for one in (f"m2r2:accelerators={file}", "m2r2")
        ]
        assert drafted[0] == drafted[1] != []


def test_bad_accelerators_and_models_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "accelerators.safetensors"
    with accelerated_model() as llm:
        own: Accelerators = llm.model.accelerators  # type: ignore[attr-defined]
        own.save(file)
        with pytest.raises(AnydecodeError, match="size is 0; allowed are 1"):
            llm.generate("a", decoder="m2r2:size=0")
    with LLM(ScriptedModel(num_layers=4), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="m2r2 needs accelerators"):
            llm.generate("a", decoder="m2r2")
        with pytest.raises(AnydecodeError, match="needs a transformer"):
            llm.generate("a", decoder=f"m2r2:accelerators={file}")
    with LLM(tiny_model(layers=5), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="those of another model"):
            llm.generate("a", decoder=f"m2r2:accelerators={file}")
    model = tiny_model(layers=3)
    add_accelerators(model, range(1, 3))
    with LLM(model, tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="layers=3 leaves none to verify with"):
            llm.generate("a", decoder="m2r2")


@pytest.mark.parametrize("mistake", ["a layer is missing", "another rank", "another width"])
def test_files_of_other_tensors_are_refused(tmp_path: Path, mistake: str) -> None:
    file = tmp_path / "accelerators.safetensors"
    shapes = {
        "query_down": (2, 8), "query_up": (12, 2), "output_down": (2, 12),
        "output_up": (8, 2), "mlp_down": (2, 8), "mlp_up": (8, 2),
    }  # fmt: skip
    layers = (1, 3) if mistake == "a layer is missing" else (1, 2)
    parts = {
        part: {one: np.ones(shape, np.float32) for one in layers} for part, shape in shapes.items()
    }
    if mistake == "another rank":
        parts["mlp_up"][2] = np.ones((8, 3), np.float32)
    elif mistake == "another width":
        parts["mlp_up"][2] = np.ones((9, 2), np.float32)
    write_exits(file, parts, "a model")
    with pytest.raises(CheckpointError, match="accelerators .*do not fit together"):
        Accelerators.load(file)
