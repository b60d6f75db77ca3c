"""Exits by routers pass their certificate; other exits, and other keys and values behind them, do
not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import LLM
from anydecode.certification.tiny import routed_model, tiny_model
from anydecode.decoders.depth.routed_exits import RoutedExit
from anydecode.errors import AnydecodeError
from anydecode.kernels.interface import PROPAGATE, OutputSpec, Rows
from anydecode.kernels.routes import RoutedPass
from anydecode.models.exit_routers import ExitRouters
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("tide")


@pytest.mark.parametrize("defaults", [{"threshold": 0.7}, {"min_layers": 6}], ids=str)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "tide", **defaults)
    assert_rejected("tide")


def test_keys_and_values_that_are_copied_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutedPass, "propagate", RoutedPass.copy)
    assert_rejected("tide")


def test_holes_behind_exits_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: RoutedPass, active: np.ndarray, first: int, last: int) -> None:
        left.update(id(self.guides[row]) for row in active.tolist())
        for row in active.tolist():
            self.guides[row].num_layers = first

    def keep(self: RoutedPass, active: np.ndarray, layer: int) -> None:
        for row in active.tolist():
            if id(self.guides[row]) not in left:
                self.guides[row].num_layers = layer

    left: set[int] = set()
    monkeypatch.setattr(RoutedPass, "propagate", stop)
    monkeypatch.setattr(RoutedPass, "stop", keep)
    monkeypatch.setattr(RoutedExit, "leaves_holes", True)
    assert_rejected("tide")


def test_states_that_are_normed_before_routers_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    score = ExitRouters.__call__

    def normed(self: ExitRouters, exit: int, states: np.ndarray) -> np.ndarray:
        spread = np.sqrt((states * states).mean(-1, keepdims=True))
        return score(self, exit, states / spread)

    monkeypatch.setattr(ExitRouters, "__call__", normed)
    assert_rejected("tide")


def test_layers_behind_an_exit_store_bit_for_bit_what_they_make_of_its_state() -> None:
    """In every later layer, the keys and values of a row that left are those of a pass of its own
    that only stores its state, whatever else was in its pass."""
    left: list[tuple[int, int, int, np.ndarray]] = []
    own = RoutedPass.propagate

    def recording(self: RoutedPass, active: np.ndarray, first: int, last: int) -> None:
        own(self, active, first, last)
        for row in active.tolist():
            position, slot = int(self.rows.positions[row]), int(self.rows.slots[row])
            left.append((slot, position, first, self.states[row].copy()))

    with pytest.MonkeyPatch.context() as patch, routed_model() as llm:
        patch.setattr(RoutedPass, "propagate", recording)
        prompts = ["abcabc", "the cat sat", "q"]
        requests = [
            llm.request(one, decoder="tide", max_tokens=40, ignore_eos=True) for one in prompts
        ]
        for request in requests:
            llm.start(request, background=False)
        llm.driver.advance(lambda: len(left) > 60)
        model, cache = llm.model, llm.engine.runners["target"].pool.cache
        for slot, position, exit, state in left:
            alone = model.new_cache(1)
            model.run(_stored_row(position, exit, state), alone, OutputSpec(np.empty(0, np.int32)))
            for layer in range(exit, 16):
                assert np.array_equal(cache.keys[layer][slot], alone.keys[layer][0])
                assert np.array_equal(cache.values[layer][slot], alone.values[layer][0])


def _stored_row(position: int, exit: int, state: np.ndarray) -> Rows:
    """A row that the layers from `exit` on store in slot 0."""

    def one(value: int) -> np.ndarray:
        return np.array([value], np.int32)

    return Rows(
        tokens=one(-1), positions=one(position), slots=one(0), tables=[one(0)], table=one(0),
        prefix=one(1), tails=np.empty(0, np.int32), tail_start=one(0), tail_length=one(0),
        start=one(exit), stop=one(16), inputs=state[None], variant=one(0), variants=[PROPAGATE],
    )  # fmt: skip


def test_large_states_are_scored_without_overflow() -> None:
    one = np.ones((1, 2), np.float32)
    routers = ExitRouters({1: -one}, {1: one[0, :1]}, "", "")
    with np.errstate(all="raise"):
        scores = routers(1, np.array([[1e4, 1e4], [-1e4, -1e4]], np.float32))
    assert np.allclose(scores, [0.5, 1.0])


def test_routers_that_never_fire_give_the_text_of_plain_decoding() -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with routed_model() as llm:
        plain = llm.generate("abc", decoder="autoregressive", **options)
        assert llm.generate("abc", decoder="tide:threshold=1", **options).tokens == plain.tokens
        assert llm.generate("abc", decoder="tide", **options).tokens != plain.tokens


def test_routers_of_a_file_replace_those_of_the_model(tmp_path: Path) -> None:
    with routed_model() as llm:
        own: Any = llm.model.exit_routers  # type: ignore[attr-defined]
        silent = replace(own, up={exit: 0 * own.up[exit] for exit in own.up})
        silent.save(tmp_path / "routers.safetensors")
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
        plain = llm.generate("abc", decoder="autoregressive", **options)
        decoder = f"tide:routers={tmp_path / 'routers.safetensors'}"
        assert llm.generate("abc", decoder=decoder, **options).tokens == plain.tokens


def test_bad_routers_and_models_are_refused_in_one_line(tmp_path: Path) -> None:
    with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as llm:
        with pytest.raises(AnydecodeError, match="needs exit routers"):
            llm.generate("a", decoder="tide")
    with routed_model() as llm:
        own: Any = llm.model.exit_routers  # type: ignore[attr-defined]
        own.save(tmp_path / "routers.safetensors")
        with LLM(ScriptedModel(), tokenizer=ByteTokenizer()) as scripted:
            with pytest.raises(AnydecodeError, match="needs a transformer"):
                file = tmp_path / "routers.safetensors"
                scripted.generate("a", decoder=f"tide:routers={file}")
        with pytest.raises(AnydecodeError, match="leaves no exit"):
            llm.generate("a", decoder="tide:min_layers=14")
        with pytest.raises(AnydecodeError, match="guidance"):
            llm.generate("a", decoder="tide", guidance_scale=2.0)
    with LLM(tiny_model(layers=16, seed=1), tokenizer=ByteTokenizer()) as llm:
        llm.model.network.weights.final_norm[0] = 2  # type: ignore[attr-defined]
        with pytest.raises(AnydecodeError, match="another model"):
            llm.generate("a", decoder=f"tide:routers={tmp_path / 'routers.safetensors'}")
        (tmp_path / "broken").write_text("no tensors")
        with pytest.raises(AnydecodeError, match="exit routers"):
            llm.generate("a", decoder=f"tide:routers={tmp_path / 'broken'}")


@pytest.mark.parametrize(
    ("key", "target", "is_fine"),
    [("tide", "cosine 0.98", True), ("tide", "token 1", True), ("tide", "token 3", False),
     ("tide", "token 10", False), ("tide", "", False), ("dynamax", "token 3", True),
     ("dynamax", "cosine 0.98", False)],
    ids=str,
)  # fmt: skip
def test_routers_with_the_label_of_another_method_are_refused(
    tmp_path: Path, key: str, target: str, is_fine: bool
) -> None:
    file = tmp_path / "routers.safetensors"
    with routed_model() as llm:
        own: Any = llm.model.exit_routers  # type: ignore[attr-defined]
        replace(own, target=target).save(file)
        if is_fine:
            llm.generate("abc", decoder=f"{key}:routers={file}", max_tokens=2)
            return
        with pytest.raises(AnydecodeError, match="have learned .* needs those of `anydecode train"):
            llm.generate("abc", decoder=f"{key}:routers={file}", max_tokens=2)
