"""LongSpec: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.certification.oracles.speculative import longspec as oracle
from anydecode.certification.tiny import longspec_checkpoint, tiny_network
from anydecode.decoders.speculative.longspec import WindowDrafter
from anydecode.errors import CheckpointError
from anydecode.models import longspec
from anydecode.models.longspec import LongSpecNetwork, load_longspec
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.span import Span
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import CONDITIONS, assert_text_of_plain_decoding


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("longspec")


@pytest.mark.parametrize(
    "defaults", [{"width": 3}, {"depth": 3}, {"window": 511}, {"sinks": 3}], ids=str
)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "longspec", **defaults)
    assert_rejected("longspec")


def test_certificate_rejects_speculative_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_method(monkeypatch, "longspec", "speculative-sampling")
    assert_rejected("longspec")


def test_certificate_rejects_a_cache_that_is_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowDrafter, "evict", lambda self, kv_cache: None)
    assert_rejected("longspec")


@pytest.fixture
def layer_only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Restricts the oracle test to the draft layer."""
    for name in ("_compare_drafts", "rejection_checks"):
        monkeypatch.setattr(oracle, name, lambda *given: ())
    monkeypatch.setattr(oracle, "_max_used", lambda count: 14)
    return monkeypatch


def test_certificate_rejects_keys_of_drafts_in_place_of_the_targets(
    layer_only: pytest.MonkeyPatch,
) -> None:
    """Drafted rows and the last token's have no state of the target: nothing attends to theirs."""
    layer_only.setattr(Span, "_limit_context", lambda self, rows, at, count: None)
    assert_rejected("longspec")


def test_certificate_rejects_the_target_without_its_newest_state(
    layer_only: pytest.MonkeyPatch,
) -> None:
    context = DraftStates.context.fget  # type: ignore[attr-defined]
    layer_only.setattr(DraftStates, "context", property(lambda self: context(self) - 1))
    assert_rejected("longspec")


def test_certificate_rejects_states_after_the_last_layer(layer_only: pytest.MonkeyPatch) -> None:
    spec = longspec.StateSpec

    def after(taps: tuple[int, ...], *rest: Any, **more: Any) -> Any:
        return spec((taps[0] + 1,), *rest, **more)

    layer_only.setattr(longspec, "StateSpec", after)
    assert_rejected("longspec")


def test_certificate_rejects_a_layer_without_a_window(layer_only: pytest.MonkeyPatch) -> None:
    layer_only.setattr(longspec, "int_value", unlimited)
    assert_rejected("longspec")


def unlimited(config: Any, key: str, *rest: Any, **more: Any) -> int:
    return 64 if key == "sliding_window" else int(config[key])


def test_certificate_rejects_a_layer_without_its_window_attention(
    layer_only: pytest.MonkeyPatch,
) -> None:
    def without(self: LongSpecNetwork, backend: Any, x: Any, index: int) -> Any:
        y = layer(self, backend, x, index)
        if index:
            return y
        return backend.token_rows(self.weights.embedding, self.spec.embedding_scale)

    layer = LongSpecNetwork.layer
    layer_only.setattr(LongSpecNetwork, "layer", without)
    assert_rejected("longspec")


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    accepted = assert_text_of_plain_decoding(
        longspec_checkpoint, ("longspec", "longspec"), options, temperature=temperature
    )
    assert min(accepted) > 20


@pytest.mark.parametrize("decoder", ["eagle", "speculative-sampling", "auto"])
def test_other_methods_draft_with_the_layer(decoder: str) -> None:
    accepted = assert_text_of_plain_decoding(longspec_checkpoint, (decoder, decoder), {})
    assert min(accepted) > 10


def test_the_layer_fits_the_target() -> None:
    target = tiny_network(layers=3)
    checkpoint = longspec_checkpoint(target)
    network = load_longspec(checkpoint, target)
    assert network.weights.layers[1].key is target.weights.layers[-1].key
    del checkpoint.config["sliding_window"]
    with pytest.raises(CheckpointError, match="sliding_window"):
        load_longspec(checkpoint, target)
