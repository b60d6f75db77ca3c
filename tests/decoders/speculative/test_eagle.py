"""EAGLE: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode import JsonSchema, Regex
from anydecode.certification.oracles.speculative import eagle as oracle
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint, with_drafter
from anydecode.errors import UnsupportedCombinationError
from anydecode.models import draft_heads
from anydecode.models.network import Network
from anydecode.models.states import StateWeights
from anydecode.models.transformer import Transformer
from anydecode.scoring.draft_states import DraftStates
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import (
    CONDITIONS,
    LONG,
    assert_constrained_text_of_plain_decoding,
    assert_text_of_plain_decoding,
    assert_turns_leave_no_position_out,
    generate,
    num_accepted,
    only_drafter,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 8},
        "b": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4},
    },
    "required": ["a", "b"],
}
Checkpoint = Callable[..., Any]
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("eagle")


@pytest.mark.parametrize("defaults", [{"size": 7}, {"depth": 3}, {"width": 3}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    replace_defaults(monkeypatch, "eagle", **defaults)
    assert_rejected("eagle")


def test_certificate_rejects_speculative_sampling(monkeypatch: Patch) -> None:
    replace_method(monkeypatch, "eagle", "speculative-sampling")
    assert_rejected("eagle")


def test_certificate_rejects_rows_from_own_states_that_stay(monkeypatch: Patch) -> None:
    """EAGLE computes the rows of accepted tokens again, from the target's states."""

    def align(self: DraftStates, kv_cache: Any) -> None:
        self.confirmed = kv_cache.length

    monkeypatch.setattr(DraftStates, "align", align)
    assert_rejected("eagle")


def test_certificate_rejects_states_of_the_same_position(monkeypatch: Patch) -> None:
    project = DraftStates._project

    def shifted(self: DraftStates, taps: np.ndarray) -> np.ndarray:
        return project(self, np.concatenate([taps[1:], taps[-1:]]))

    monkeypatch.setattr(DraftStates, "_project", shifted)
    assert_rejected("eagle")


def test_certificate_rejects_states_without_the_final_norm(monkeypatch: Patch) -> None:
    original = DraftStates.__init__

    def without(self: DraftStates, *given: Any) -> None:
        original(self, *given[:3], lambda taps: taps, *given[4:])

    monkeypatch.setattr(DraftStates, "__init__", without)
    assert_rejected("eagle")


@pytest.mark.parametrize("norm", ["embedding_norm", "attention_norm", "final_norm"])
def test_certificate_rejects_drafters_of_speculators_without_a_norm(
    monkeypatch: Patch, norm: str
) -> None:
    only_drafter(monkeypatch, oracle, "EAGLE of speculators, norms")
    read = draft_heads._Eagle.read

    def without(self: draft_heads._Eagle) -> Network:
        weights = (network := read(self)).weights
        holders = {"embedding_norm": weights.states, "attention_norm": weights.layers[0]}
        holder: Any = holders.get(norm, weights)
        setattr(holder, norm, np.ones_like(getattr(holder, norm)))
        return network

    monkeypatch.setattr(draft_heads._Eagle, "read", without)
    assert_rejected("eagle")


@pytest.mark.parametrize(("name", "shift"), [("EAGLE-3", 1), ("EAGLE-3 of SpecForge", -1)])
def test_certificate_rejects_the_other_taps(monkeypatch: Patch, name: str, shift: int) -> None:
    """Those of outputs where the files mean inputs, and the other way round."""
    only_drafter(monkeypatch, oracle, name)
    taps = draft_heads._Eagle3._taps
    monkeypatch.setattr(
        draft_heads._Eagle3, "_taps", lambda self: tuple(tap + shift for tap in taps(self))
    )
    assert_rejected("eagle")


def test_certificate_rejects_the_targets_tokens_in_another_order(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "EAGLE-3, all tokens")
    head = draft_heads._Eagle3._head

    def turned(self: draft_heads._Eagle3, packed: list[Any]) -> tuple[Any, Any]:
        weight, tokens = head(self, packed)
        return replace(weight, data=np.roll(weight.data, 1, 0)), tokens

    monkeypatch.setattr(draft_heads._Eagle3, "_head", turned)
    assert_rejected("eagle")


def test_certificate_rejects_a_head_of_the_first_tokens(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "EAGLE-3")
    monkeypatch.setattr(draft_heads._Eagle3, "_tokens", lambda self, size: np.arange(size))
    assert_rejected("eagle")


def test_certificate_rejects_a_residual_without_its_norm(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "EAGLE-3, normed states")
    monkeypatch.setattr(StateWeights, "inputs", lambda self, backend, x, embedding, spec: x)
    assert_rejected("eagle")


@pytest.mark.parametrize("name", ["EAGLE-3, normed states", "EAGLE of speculators, norms"])
def test_certificate_rejects_own_states_without_the_output_norm(
    monkeypatch: Patch, name: str
) -> None:
    only_drafter(monkeypatch, oracle, name)
    monkeypatch.setattr(Transformer, "own_states", lambda self, hidden: hidden)
    assert_rejected("eagle")


def test_certificate_rejects_taps_without_their_norms(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "EAGLE-3, normed taps")
    project = StateWeights.project

    def plain(self: StateWeights, taps: list[np.ndarray], *rest: Any) -> np.ndarray:
        self.target_norms = []
        return project(self, taps, *rest)

    monkeypatch.setattr(StateWeights, "project", plain)
    assert_rejected("eagle")


@CONDITIONS
@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_the_text_is_that_of_plain_decoding(
    drafter: Checkpoint, options: dict[str, Any], temperature: float
) -> None:
    accepted = assert_text_of_plain_decoding(
        drafter, ("eagle", "eagle"), options, temperature=temperature
    )
    assert min(accepted) > 20


@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Checkpoint) -> None:
    """The drafter's cache of a prefix is found with that of the target; a draft from it is equal to
    one from the whole prompt."""
    prompt = LONG + "one"
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (generate(llm, prompt, "eagle") for _ in range(2))
        assert llm.engine.runners["draft"].prefixes.num_hits
        assert second.stats.num_cached_tokens > len(prompt) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_a_prefix_that_only_the_target_knows_is_left_out(drafter: Checkpoint) -> None:
    with with_drafter(drafter, cache_positions=2048) as llm:
        plain = generate(llm, LONG, "autoregressive")
        drafted = generate(llm, LONG, "eagle")
        assert drafted.stats.num_cached_tokens > len(LONG) // 2
        assert not llm.engine.runners["draft"].prefixes.num_hits
        llm.engine.check_integrity()
    assert drafted.tokens == plain.tokens
    assert num_accepted([drafted]) > 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("decoder", ["eagle", "opt-tree", "rsd", "speculative-sampling"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_constraints_hold_and_the_text_is_exact(
    drafter: Checkpoint, temperature: float, decoder: str
) -> None:
    """The head of EAGLE-3's drafter has a part of the tokens: sometimes none of those allowed."""
    constraints = (JsonSchema(SCHEMA), Regex("[0-9]{3,9}\\n?x"))
    assert_constrained_text_of_plain_decoding(
        drafter, decoder, constraints, temperature=temperature, seed=4
    )


@pytest.mark.parametrize("decoder", ["pearl", "saguaro", "s2d"])
def test_methods_that_draft_without_the_targets_states_refuse(decoder: str) -> None:
    with (
        with_drafter(eagle_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="states") as refused,
    ):
        llm.generate("x", decoder=decoder, max_tokens=4)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint], ids=["1", "3"])
def test_turns_of_a_chat_leave_no_position_out(monkeypatch: Patch, drafter: Any) -> None:
    assert_turns_leave_no_position_out(monkeypatch, drafter, "eagle")
