"""The search over all patterns of MLPs passes its certificate; other searches do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.depth.fewer_layers import layered
from anydecode.decoders.depth import duo_llm
from anydecode.decoders.depth.duo_llm import Patterns
from anydecode.errors import AnydecodeError
from anydecode.kernels.interface import SkippedParts
from anydecode.kernels.routes import RoutedPass
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
