"""The search over all patterns of MLPs passes its certificate; other searches do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.depth.duo_llm import random_routers
from anydecode.certification.oracles.depth.fewer_layers import layered
from anydecode.decoders.depth import duo_llm
from anydecode.decoders.depth.duo_llm import Patterns, RoutedPatterns
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.kernels.interface import SkippedParts
from anydecode.kernels.routes import RoutedPass
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.mlp_routers import NOTHING, MlpRouters
from anydecode.models.small_mlps import SmallMlps
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("duo-llm")


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [{"layers": 7}, {"budget": 5}], ids=str)
def test_other_defaults_are_rejected(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "duo-llm", **defaults)
    assert_rejected("duo-llm")


def test_patterns_one_layer_late_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Patterns.run

    def late(self: Patterns, routed: RoutedPass) -> None:
        run(Patterns(self.first + 1, self.count), routed)

    monkeypatch.setattr(Patterns, "run", late)
    assert_rejected("duo-llm")


@pytest.mark.slow
def test_a_choice_that_does_not_read_the_label_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = duo_llm.losses

    def swapped(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return losses(logits, labels[::-1] if len(logits) > 1 else labels)

    monkeypatch.setattr(duo_llm, "losses", swapped)
    assert_rejected("duo-llm")


@pytest.mark.slow
def test_full_models_that_lack_their_own_keys_and_values_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text continues from the keys and values of a pattern without the first MLP."""

    def score(self: Sequence, *given: Any, **options: Any) -> Any:
        request = own(self, *given, **options)
        request.groups[0][-1].variant = SkippedParts(mlps=frozenset((1,)))
        return request

    own = Sequence.score
    monkeypatch.setattr(Sequence, "score", score)
    assert_rejected("duo-llm")


def test_the_best_pattern_has_the_least_loss_within_the_budget() -> None:
    with layered(6, 1.0) as llm:
        options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "trace": True}
        plain = llm.generate("abc", decoder="autoregressive", **options)
        found = llm.generate("abc", decoder="duo-llm:layers=4,budget=2", **options)
        assert found.tokens == plain.tokens
        for one in found.trace or ():
            losses = {
                number: loss for number, loss in enumerate(one["losses"]) if number.bit_count() == 2
            }
            best = min(losses, key=lambda number: losses[number])
            assert len(one["losses"]) == 16
            assert one["pattern"] == [1 + bit for bit in range(4) if best >> bit & 1]
            assert one["loss"] == losses[best]
            # With every MLP a pattern is the full model.
            assert one["losses"][15] == pytest.approx(one["full_loss"], abs=1e-4)


def test_bad_budgets_are_refused_in_one_line() -> None:
    with layered(6, 1.0) as llm:
        with pytest.raises(AnydecodeError, match="more than the 6 layers"):
            llm.generate("a", decoder="duo-llm:budget=7")
        with pytest.raises(AnydecodeError, match="guidance"):
            llm.generate("a", decoder="duo-llm", guidance_scale=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["none", "without the norm"], ids=str)
def test_other_small_mlps_are_rejected(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    call = SmallMlps.__call__

    def wrong(self: SmallMlps, layer: int, states: np.ndarray, eps: float) -> np.ndarray:
        if mistake == "none":
            return np.zeros_like(states)
        ones = {one: np.ones_like(norm) for one, norm in self.norm.items()}
        return call(replace(self, norm=ones), layer, states, eps)

    monkeypatch.setattr(SmallMlps, "__call__", wrong)
    assert_rejected("duo-llm")


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["the other choice", "another threshold", "earlier states"])
def test_other_choices_of_the_routers_are_rejected(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    own = RoutedPatterns.needs

    def wrong(self: RoutedPatterns, number: int, routed: RoutedPass) -> np.ndarray:
        layer = self.first + number
        if mistake == "the other choice":
            return ~own(self, number, routed)
        if mistake == "another threshold":
            needs = self.routers.scores(layer, routed.states) >= 1
        else:  # of the layer before
            needs = self.routers.scores(layer, self._before) >= 0  # type: ignore[attr-defined]
        for row in np.flatnonzero(needs).tolist():
            routed.guides[row].pattern |= 1 << number
        return needs

    run = RoutedPass.run

    def remember(self: RoutedPass, *given: Any, **options: Any) -> None:
        before = self.states.copy()
        run(self, *given, **options)
        RoutedPatterns._before = before  # type: ignore[attr-defined]

    monkeypatch.setattr(RoutedPatterns, "_before", None, raising=False)
    monkeypatch.setattr(RoutedPass, "run", remember)
    monkeypatch.setattr(RoutedPatterns, "needs", wrong)
    assert_rejected("duo-llm")


def test_routers_of_the_models_folder_are_used_if_they_fit() -> None:
    with layered(6, 1.0) as llm:
        model: Any = llm.model
        options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "trace": True}
        fingerprint = random_routers(model.network, NOTHING).fingerprint
        weight = np.zeros((2, model.spec.hidden_size), np.float32)
        bias = np.array([1, -1], np.float32)
        model.mlp_routers = MlpRouters([2, 3], weight, bias, fingerprint, NOTHING)
        for one in llm.generate("abc", decoder="duo-llm:layers=2", **options).trace or ():
            assert one["routed_pattern"] == [2] and one["routed_loss"] == one["losses"][1]
        for one in llm.generate("abc", decoder="duo-llm:layers=3", **options).trace or ():
            assert "routed_pattern" not in one


def test_files_of_other_routers_are_refused_in_one_line(tmp_path: Path) -> None:
    with layered(10, 1.0) as llm:
        model: Any = llm.model
        routers = random_routers(model.network, NOTHING)
    mlps, layers, other = (tmp_path / name for name in ("mlps", "layers", "other"))
    routers.save(mlps)
    LayerRouters(routers.layers, routers.weight, routers.bias, routers.fingerprint).save(layers)
    replace(routers, fingerprint="another").save(other)
    with pytest.raises(CheckpointError, match=r"routers of another kind; .* first-router`"):
        LayerRouters.load(mlps)
    with layered(10, 1.0) as llm:
        for decoder, message in (
            (f"duo-llm:routers={layers}", "routers of another kind; .* duo-llm`"),
            (f"duo-llm:routers={other}", "MLP routers are those of another model"),
            (f"duo-llm:layers=4,routers={mlps}", r"layers=4 layers \[3, 4, 5, 6\] have a choice"),
        ):
            with pytest.raises(AnydecodeError, match=message):
                llm.generate("a", decoder=decoder, max_tokens=1)
