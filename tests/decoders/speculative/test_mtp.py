"""Multi-token prediction: its certificate, mistakes that the certificate rejects, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import mtp as oracle
from anydecode.certification.tiny import with_drafter
from anydecode.certification.tiny_heads import mtp_checkpoint
from anydecode.decoders.speculative import mtp
from anydecode.models.spec import StateSpec
from anydecode.models.states import StateWeights
from anydecode.models.transformer import Transformer
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import (
    CONDITIONS,
    LONG,
    PROMPTS,
    assert_constrained_text_of_plain_decoding,
    assert_rule_accepts,
    assert_text_of_plain_decoding,
    assert_turns_leave_no_position_out,
    generate,
    only_drafter,
)

QWEN = partial(mtp_checkpoint, layout="qwen")
MODULES = partial(mtp_checkpoint, layout="mimo v2", modules=3)
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("mtp")


@pytest.mark.parametrize("size", [2, 4])
def test_certificate_rejects_other_sizes(monkeypatch: Patch, size: int) -> None:
    replace_defaults(monkeypatch, "mtp", size=size)
    assert_rejected("mtp")


@pytest.mark.parametrize("other", ["prompt-lookup", "eagle"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    replace_method(monkeypatch, "mtp", other)
    assert_rejected("mtp")


def _pairs(monkeypatch: Patch, change: Any) -> None:
    """Replaces the inputs of the projection, `[rows, 2 * size]`, by `change` of them."""
    pair = StateWeights._pair

    def changed(self: StateWeights, backend: Any, *given: Any) -> Any:
        joined = pair(self, backend, *given)
        return change(backend, joined)

    monkeypatch.setattr(StateWeights, "_pair", changed)


def test_certificate_rejects_the_other_order(monkeypatch: Patch) -> None:
    """MiMo's projection reads the state first; the loader exchanges its columns."""
    only_drafter(monkeypatch, oracle, "mimo")
    size = 64
    _pairs(
        monkeypatch,
        lambda backend, x: backend.join(
            backend.columns(x, size, size), backend.columns(x, 0, size)
        ),
    )
    assert_rejected("mtp")


@pytest.mark.parametrize("norm", ["embedding_norm", "state_norm"])
def test_certificate_rejects_inputs_without_their_norms(monkeypatch: Patch, norm: str) -> None:
    pair = StateWeights._pair

    def without(self: StateWeights, *given: Any) -> Any:
        weight: np.ndarray = getattr(self, norm)
        setattr(self, norm, np.ones_like(weight))
        return pair(self, *given)

    monkeypatch.setattr(StateWeights, "_pair", without)
    assert_rejected("mtp")


def test_certificate_rejects_own_states_without_the_last_norm(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Transformer, "own_states", lambda self, hidden: hidden.copy())
    assert_rejected("mtp")


def test_certificate_rejects_rows_from_own_states_that_stay(monkeypatch: Patch) -> None:
    def align(self: DraftStates, kv_cache: Any) -> None:
        self.confirmed = kv_cache.length

    monkeypatch.setattr(DraftStates, "align", align)
    assert_rejected("mtp")


@pytest.mark.parametrize("twin", ["one module", "earlier states"])
def test_certificate_rejects_modules_that_are_not_run_as_trained(
    monkeypatch: Patch, twin: str
) -> None:
    """The first module drafts all tokens, or each reads the state of one position further back."""
    only_drafter(monkeypatch, oracle, "mimo v2, three modules")
    if twin == "one module":
        monkeypatch.setattr(mtp, "FURTHER_DRAFTS", ())
    else:
        made = DraftStates.__init__

        def earlier(self: DraftStates, spec: StateSpec, *given: Any) -> None:
            made(self, replace(spec, delay=spec.delay + 1), *given)

        monkeypatch.setattr(DraftStates, "__init__", earlier)
    assert_rejected("mtp")


@CONDITIONS
@pytest.mark.parametrize(
    "drafter", [mtp_checkpoint, QWEN, MODULES], ids=["nextn", "qwen", "modules"]
)
def test_the_text_is_that_of_plain_decoding(
    drafter: Any, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        drafter, ("mtp", "mtp"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 10


@pytest.mark.parametrize(
    "drafter", [mtp_checkpoint, QWEN, MODULES], ids=["nextn", "qwen", "modules"]
)
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Any) -> None:
    """The module has keys and values, which the prefix cache keeps."""
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "mtp") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.parametrize(
    ("drafter", "lags"), [(mtp_checkpoint, [1]), (MODULES, [1, 2, 3])], ids=["nextn", "modules"]
)
def test_turns_of_a_chat_leave_no_position_out(
    monkeypatch: Patch, drafter: Any, lags: list[int]
) -> None:
    """Wrong twin: the target takes all of a prefix from its cache, and the first rows behind it
    have no states."""
    assert_turns_leave_no_position_out(monkeypatch, drafter, "mtp", lags)
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(Sequence, "always_drafts", never, raising=False)
    with pytest.raises(AssertionError):
        assert_turns_leave_no_position_out(monkeypatch, drafter, "mtp", lags)


@pytest.mark.one_in(2)  # each method
@pytest.mark.parametrize("decoder", ["mtp", "medusa", "eagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float, decoder: str) -> None:
    """With other methods that draft after each pass, too."""
    assert_constrained_text_of_plain_decoding(mtp_checkpoint, decoder, temperature=temperature)


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(mtp_checkpoint, "mtp", rule)
