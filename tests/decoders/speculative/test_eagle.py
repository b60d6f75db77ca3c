"""EAGLE: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydecode import Generation, JsonSchema, Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import eagle as oracle
from anydecode.certification.tiny import eagle3_checkpoint, eagle_checkpoint, with_drafter
from anydecode.errors import UnsupportedCombinationError
from anydecode.models import draft_heads
from anydecode.models.states import StateWeights
from anydecode.models.transformer import Transformer
from anydecode.scoring.draft_states import DraftStates
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method

LONG = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat. " * 3
PROMPTS = [LONG + "one", LONG + "two", "zq", LONG + "one more", LONG[:50]]
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


def _only(monkeypatch: Patch, name: str) -> None:
    """Restricts the oracle test to one drafter."""
    monkeypatch.setattr(oracle, "DRAFTERS", {name: oracle.DRAFTERS[name]})


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
        original(self, *given[:-1], lambda taps: taps)

    monkeypatch.setattr(DraftStates, "__init__", without)
    assert_rejected("eagle")


def test_certificate_rejects_taps_of_outputs(monkeypatch: Patch) -> None:
    _only(monkeypatch, "EAGLE-3")
    taps = draft_heads._Eagle3._taps
    monkeypatch.setattr(
        draft_heads._Eagle3, "_taps", lambda self: tuple(tap + 1 for tap in taps(self))
    )
    assert_rejected("eagle")


def test_certificate_rejects_a_head_of_the_first_tokens(monkeypatch: Patch) -> None:
    _only(monkeypatch, "EAGLE-3")
    monkeypatch.setattr(draft_heads._Eagle3, "_tokens", lambda self, size: np.arange(size))
    assert_rejected("eagle")


def test_certificate_rejects_a_residual_without_its_norm(monkeypatch: Patch) -> None:
    _only(monkeypatch, "EAGLE-3, normed states")
    monkeypatch.setattr(StateWeights, "inputs", lambda self, backend, x, embedding, spec: x)
    assert_rejected("eagle")


def test_certificate_rejects_own_states_without_the_output_norm(monkeypatch: Patch) -> None:
    _only(monkeypatch, "EAGLE-3, normed states")
    monkeypatch.setattr(Transformer, "own_states", lambda self, hidden: hidden)
    assert_rejected("eagle")


def test_certificate_rejects_taps_without_their_norms(monkeypatch: Patch) -> None:
    _only(monkeypatch, "EAGLE-3, normed taps")
    project = StateWeights.project

    def plain(self: StateWeights, taps: list[np.ndarray], *rest: Any) -> np.ndarray:
        self.target_norms = []
        return project(self, taps, *rest)

    monkeypatch.setattr(StateWeights, "project", plain)
    assert_rejected("eagle")


def _generate(llm: LLM, prompts: Any, decoder: str, **options: Any) -> Any:
    shared = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "trace": True}
    return llm.generate(prompts, decoder=decoder, **{**shared, **options})


def _accepted(generations: list[Generation]) -> int:
    return sum(len(event["accepted"]) for one in generations for event in one.trace or ())


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"cache_positions": 420}, 0.8),
        ({"row_budget": 16}, 0.0),
        ({"row_budget": 16, "backend": "torch"}, 0.8),
        ({"prefix_cache": False}, 0.8),
    ],
    ids=["preempted", "chunked", "torch", "uncached"],
)
@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_the_text_is_that_of_plain_decoding(
    drafter: Checkpoint, options: dict[str, Any], temperature: float
) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    with with_drafter(drafter, **{"cache_positions": 2048, **options}) as llm:
        plain = _generate(llm, PROMPTS, "autoregressive", temperature=temperature)
        alone = [_generate(llm, one, "eagle", temperature=temperature) for one in PROMPTS]
        together = _generate(llm, PROMPTS, "eagle", temperature=temperature)
        llm.engine.check_integrity()
    expected = [one.tokens for one in plain]
    assert [one.tokens for one in alone] == expected
    assert [one.tokens for one in together] == expected
    assert _accepted(alone) > 20 and _accepted(together) > 20


@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Checkpoint) -> None:
    """The drafter's cache of a prefix is found with that of the target; a draft from it is equal to
    one from the whole prompt."""
    prompt = LONG + "one"
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (_generate(llm, prompt, "eagle") for _ in range(2))
        assert llm.engine.runners["draft"].prefixes.num_hits
        assert second.stats.num_cached_tokens > len(prompt) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_a_prefix_that_only_the_target_knows_is_left_out(drafter: Checkpoint) -> None:
    with with_drafter(drafter, cache_positions=2048) as llm:
        plain = _generate(llm, LONG, "autoregressive")
        drafted = _generate(llm, LONG, "eagle")
        assert drafted.stats.num_cached_tokens > len(LONG) // 2
        assert not llm.engine.runners["draft"].prefixes.num_hits
        llm.engine.check_integrity()
    assert drafted.tokens == plain.tokens
    assert _accepted([drafted]) > 3


@pytest.mark.parametrize("decoder", ["eagle", "opt-tree", "rsd", "speculative-sampling"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [eagle_checkpoint, eagle3_checkpoint])
def test_constraints_hold_and_the_text_is_exact(
    drafter: Checkpoint, temperature: float, decoder: str
) -> None:
    """The head of EAGLE-3's drafter has a part of the tokens: sometimes none of those allowed."""
    options = {"temperature": temperature, "seed": 4, "max_tokens": 60, "ignore_eos": False}
    with with_drafter(drafter, cache_positions=1024) as llm:
        for constraint in (JsonSchema(SCHEMA), Regex("[0-9]{3,9}\\n?x")):
            plain, drafted = (
                _generate(llm, "x", key, constraint=constraint, **options)
                for key in ("autoregressive", decoder)
            )
            assert drafted.text == plain.text
        llm.engine.check_integrity()


@pytest.mark.parametrize("decoder", ["pearl", "saguaro", "longspec", "s2d"])
def test_methods_that_draft_without_the_targets_states_refuse(decoder: str) -> None:
    with (
        with_drafter(eagle_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="states") as refused,
    ):
        llm.generate("x", decoder=decoder, max_tokens=4)
    assert "\n" not in str(refused.value)
