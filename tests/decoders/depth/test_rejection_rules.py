"""Rejection rules for drafts of a model's own layers: samples follow the target's distribution,
and those of drafts whose distributions are ignored do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, catalogue
from anydecode.certification.checks import Check
from anydecode.certification.chi_square import PROMPT, TARGET_SCRIPT, VOCABULARY, Script
from anydecode.certification.oracles.speculative.rejection_rules import (
    last_token_script,
    rejection_checks,
    small_drafter_llm,
)
from anydecode.certification.tiny import accelerated_model, early_exit_checkpoint
from anydecode.decoders.depth import self_speculation
from anydecode.decoders.framework.draft_candidates import DraftCandidates
from anydecode.decoders.framework.sampled_chains import sampled_chain
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.tree import TokenTree
from certificates import assert_rejected, leave_samplers_unmoved


def layered_llm() -> LLM:
    """A target over five tokens whose first layers, or fewer sublayers, predict with an error."""
    model = ScriptedModel(TARGET_SCRIPT, vocab_size=VOCABULARY, num_layers=6)
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=8192)


def exit_llm(has_mlp: bool) -> LLM:
    """A target over five tokens whose layers add nothing, and a trained exit of it."""
    return small_drafter_llm(partial(early_exit_checkpoint, has_mlp=has_mlp, sharpness=2.0))


accelerated_llm = partial(
    accelerated_model, residual=0.0, vocabulary=VOCABULARY, cache_positions=8192
)
#: The models of each method, the logits of the target, and parameters.
SETTINGS: dict[str, tuple[Callable[[], LLM], Script, dict[str, Any]]] = {
    "layerskip": (layered_llm, TARGET_SCRIPT, {}),
    "del": (layered_llm, TARGET_SCRIPT, {}),
    "specbound": (layered_llm, TARGET_SCRIPT, {"threshold": 0.3}),
    "swift": (layered_llm, TARGET_SCRIPT, {"threshold": 0.2}),
    "kangaroo": (partial(exit_llm, False), last_token_script, {"threshold": 0.0}),
    "eesd": (partial(exit_llm, True), last_token_script, {}),
    "m2r2": (accelerated_llm, last_token_script, {}),
}
KEYS = list(SETTINGS)


def checks(key: str) -> list[Check]:
    """The checks of `key` under the rejection rule."""
    open_llm, script, given = SETTINGS[key]
    return list(rejection_checks(key, open_llm, PROMPT, script=script, **given))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "key",
    [key if key == "layerskip" else pytest.param(key, marks=pytest.mark.slow) for key in KEYS],
)
def test_samples_follow_the_target(key: str) -> None:
    assert not [one for one in checks(key) if not one.passed]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "key", [key if key == "swift" else pytest.param(key, marks=pytest.mark.slow) for key in KEYS]
)
def test_distributions_that_are_ignored_are_noticed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def even(drafts: list[int], rows: list[np.ndarray]) -> TokenTree:
        return sampled_chain(drafts, [np.full(len(row), 1 / len(row)) for row in rows])

    monkeypatch.setattr(self_speculation, "sampled_chain", even)
    monkeypatch.setattr(DraftCandidates, "dense", lambda self, size: np.full(size, 1 / size))
    assert not checks(key)[0].passed


@pytest.mark.parametrize("key", [key for key in KEYS if key != "swift"])
def test_every_draft_has_the_distribution_that_it_was_sampled_from(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it samples follow the target too, but fewer drafts are accepted."""
    chains = list[tuple[list[int], list[np.ndarray] | None]]()

    def recorded(drafts: list[int], rows: list[np.ndarray] | None) -> TokenTree:
        chains.append((list(drafts), rows))
        return sampled_chain(drafts, rows)

    monkeypatch.setattr(self_speculation, "sampled_chain", recorded)
    open_llm, _, given = SETTINGS[key]
    with open_llm() as llm:
        decoder = catalogue.build(key, acceptance="rejection", **given)
        llm.generate(list(PROMPT), decoder=decoder, max_tokens=24, temperature=0.8)
    drafted = [pair for drafts, rows in chains for pair in zip(drafts, rows or (), strict=False)]
    assert len(drafted) == sum(len(drafts) for drafts, _ in chains) > 0
    for token, row in drafted:
        assert row.sum() == pytest.approx(1) and row[token] > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", ["kangaroo", "eesd"])
def test_certificates_reject_distributions_of_the_next_position(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(drafts: list[int], rows: list[np.ndarray] | None) -> TokenTree:
        return sampled_chain(drafts, rows and rows[1:] + rows[:1])

    monkeypatch.setattr(self_speculation, "sampled_chain", shifted)
    assert_rejected(key)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("key", ["layerskip", "del", "specbound", "kangaroo", "eesd", "swift"])
def test_certificates_reject_drafts_without_the_penalties_of_earlier_ones(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's copy of the sampler is not advanced by its drafts."""
    files = ("layerskip", "del_", "specbound", "exit_drafts", "swift")
    leave_samplers_unmoved(monkeypatch, files)
    assert_rejected(key)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("rule", ["typical", "top-m", "rejection"])
def test_other_rules_run(key: str, rule: str) -> None:
    open_llm, _, given = SETTINGS[key]
    with open_llm() as llm:
        decoder = catalogue.build(key, acceptance=rule, **given)
        assert decoder.exactness == ("distribution-exact" if rule == "rejection" else "lossy")
        answer = llm.generate(list(PROMPT), decoder=decoder, max_tokens=12, temperature=0.8)
        assert len(answer.tokens) == 12
        llm.engine.check_integrity()


@pytest.mark.parametrize("key", KEYS)
def test_unknown_rules_are_refused_in_one_line(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown acceptance rule 'none'") as refusal:
        catalogue.build(key, acceptance="none")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", [key for key in KEYS if key != "swift"])
def test_rules_of_hidden_states_are_refused_by_methods_with_a_loop_of_their_own(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="token-exact or rejection or typical or top-m"):
        catalogue.build(key, acceptance="judge")
