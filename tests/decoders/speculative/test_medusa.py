"""Medusa: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from anydecode.certification.oracles.speculative import medusa as oracle
from anydecode.certification.tiny import with_drafter
from anydecode.certification.tiny_heads import medusa_checkpoint
from anydecode.decoders.speculative.best_tree import BestTreeDrafter
from anydecode.models.medusa import MedusaNetwork
from anydecode.models.step_heads import StepTransformer
from anydecode.scoring.draft_states import DraftStates
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import drafted_paths
from drafted_texts import (
    CONDITIONS,
    LONG,
    PROMPTS,
    assert_constrained_text_of_plain_decoding,
    assert_rule_accepts,
    assert_text_of_plain_decoding,
    generate,
    only_drafter,
)

SHARED = partial(medusa_checkpoint, own_heads=False)
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("medusa")


@pytest.mark.parametrize("defaults", [{"size": 7}, {"depth": 3}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "5 heads of 2 blocks")
    replace_defaults(monkeypatch, "medusa", **defaults)
    assert_rejected("medusa")


@pytest.mark.parametrize("other", ["speculative-sampling", "eagle"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    only_drafter(monkeypatch, oracle, "3 heads")
    replace_method(monkeypatch, "medusa", other)
    assert_rejected("medusa")


def test_certificate_rejects_heads_that_are_one_off(monkeypatch: Patch) -> None:
    """The first head predicts the token behind the one that the target has sampled."""
    layer = MedusaNetwork.step_layer
    last = lambda self, step: min(step + 1, self.num_steps - 1)  # noqa: E731
    monkeypatch.setattr(
        MedusaNetwork,
        "step_layer",
        lambda self, backend, x, step, at: layer(self, backend, x, last(self, step), at),
    )
    assert_rejected("medusa")


def test_certificate_rejects_blocks_without_residual(monkeypatch: Patch) -> None:
    def plain(self: MedusaNetwork, backend: Any, x: Any, step: int, index: int) -> Any:
        for block in self.heads[step].blocks:
            x = backend.activate(block.apply(backend, x), "silu")
        return x

    monkeypatch.setattr(MedusaNetwork, "step_layer", plain)
    assert_rejected("medusa")


def test_certificate_rejects_one_step_for_all_levels(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StepTransformer, "own_states", lambda self, hidden: hidden.copy())
    assert_rejected("medusa")


def test_certificate_rejects_states_without_the_final_norm(monkeypatch: Patch) -> None:
    original = DraftStates.__init__

    def without(self: DraftStates, *given: Any) -> None:
        original(self, *given[:3], lambda taps: taps, *given[4:])

    monkeypatch.setattr(DraftStates, "__init__", without)
    assert_rejected("medusa")


def test_certificate_rejects_a_tree_of_equal_levels(monkeypatch: Patch) -> None:
    """Best-first: the levels have as many nodes as their probabilities deserve."""

    def grow(self: BestTreeDrafter, growing: Any, size: int) -> Any:
        level = [-1]
        for _ in range(2):
            yield from growing.expand([node for node in level if node >= 0])
            level = [
                growing.add(int(token), parent)
                for parent in level[:1]
                for token in growing.candidates[parent].tokens[: size // 2]
            ]
        return list(range(len(growing.tree)))

    monkeypatch.setattr(BestTreeDrafter, "grow", grow)
    assert_rejected("medusa")


@CONDITIONS
@pytest.mark.parametrize("drafter", [medusa_checkpoint, SHARED], ids=["own", "shared"])
def test_the_text_is_that_of_plain_decoding(
    drafter: Any, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        drafter, ("medusa", "medusa"), options, prompts, temperature=temperature
    )
    if drafter is medusa_checkpoint:
        assert min(accepted) > 5


def test_a_draft_takes_one_pass() -> None:
    with with_drafter(medusa_checkpoint, cache_positions=1024) as llm:
        rounds = generate(llm, LONG, "medusa").trace
        runner = llm.engine.runners["draft"]
        assert runner.num_passes == sum(bool(one["drafted"]) for one in rounds)


def test_other_methods_draft_the_same_with_heads() -> None:
    """Level by level, in a pass each, heads give what they give in one pass."""
    with with_drafter(medusa_checkpoint, cache_positions=1024, prefix_cache=False) as llm:
        plain, best, other = (
            generate(llm, "a quick zebra", key, temperature=0.8)
            for key in ("autoregressive", "medusa:depth=3", "opt-tree:size=8,delta=0,depth=3")
        )
    assert plain.tokens == best.tokens == other.tokens
    trees = [[set(drafted_paths(event)) for event in one.trace] for one in (best, other)]
    assert trees[0] == trees[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    assert_constrained_text_of_plain_decoding(medusa_checkpoint, "medusa", temperature=temperature)


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    drafted = assert_rule_accepts(medusa_checkpoint, "medusa", rule)
    assert all(event["drafted"] for one in drafted for event in (one.trace or ())[1:-1])
