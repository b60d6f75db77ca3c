"""Hydra: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from anydecode.certification.oracles.speculative import hydra as oracle
from anydecode.certification.tiny import with_drafter
from anydecode.certification.tiny_heads import (
    hydra_checkpoint,
    medusa_checkpoint,
    mtp_checkpoint,
)
from anydecode.models.hydra import HydraNetwork
from anydecode.models.network import Network
from anydecode.models.step_heads import StepTransformer
from anydecode.scoring.draft_states import DraftStates
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import (
    CONDITIONS,
    LONG,
    PROMPTS,
    assert_constrained_text_of_plain_decoding,
    assert_rule_accepts,
    assert_text_of_plain_decoding,
    generate,
    num_accepted,
    only_drafter,
)

PREFIX = partial(hydra_checkpoint, has_prefix=True)
DRAFTERS = pytest.mark.parametrize("drafter", [hydra_checkpoint, PREFIX], ids=["plain", "++"])
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("hydra")


@pytest.mark.parametrize("defaults", [{"size": 7}, {"depth": 3}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "Hydra, 5 heads of 1 block")
    replace_defaults(monkeypatch, "hydra", **defaults)
    assert_rejected("hydra")


@pytest.mark.parametrize("other", ["speculative-sampling", "eagle"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    only_drafter(monkeypatch, oracle, "Hydra")
    replace_method(monkeypatch, "hydra", other)
    assert_rejected("hydra")


def test_certificate_rejects_heads_that_forget_earlier_tokens(monkeypatch: Patch) -> None:
    """A node's input is that of its parent and the node's embedding."""
    layer = HydraNetwork.step_layer

    def forgetful(self: HydraNetwork, backend: Any, x: Any, step: int, index: int) -> Any:
        y, last = layer(self, backend, x, step, index), step + 1
        if not step:
            return y
        token = backend.columns(y, last * self.size, self.size)
        rest = backend.columns(y, 2 * self.size, self.width - 2 * self.size)
        return backend.join(backend.join(backend.columns(y, 0, self.size), token), rest)

    monkeypatch.setattr(HydraNetwork, "step_layer", forgetful)
    assert_rejected("hydra")


def test_certificate_rejects_one_head_for_all_levels(monkeypatch: Patch) -> None:
    head = HydraNetwork.step_head
    monkeypatch.setattr(
        HydraNetwork, "step_head", lambda self, backend, x, step: head(self, backend, x, 0)
    )
    assert_rejected("hydra")


def test_certificate_rejects_first_blocks_without_residual(monkeypatch: Patch) -> None:
    def head(self: HydraNetwork, backend: Any, x: Any, step: int) -> Any:
        parts = self.heads[step]
        x = backend.columns(x, 0, (step + 2) * self.size)
        x = backend.activate(parts.first.apply(backend, x), "silu")
        for block in parts.blocks:
            x = backend.add(x, backend.activate(block.apply(backend, x), "silu"))
        return parts.output.apply(backend, x)

    monkeypatch.setattr(HydraNetwork, "step_head", head)
    assert_rejected("hydra")


def test_certificate_rejects_a_prefix_without_its_norm(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "Hydra++")
    norm = Network.final_norm
    monkeypatch.setattr(
        Network,
        "final_norm",
        lambda self, backend, x: x if self.spec.num_layers == 1 else norm(self, backend, x),
    )
    assert_rejected("hydra")


def test_certificate_rejects_states_of_the_same_step(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StepTransformer, "own_states", lambda self, hidden: hidden.copy())
    assert_rejected("hydra")


def test_certificate_rejects_states_without_the_final_norm(monkeypatch: Patch) -> None:
    original = DraftStates.__init__

    def without(self: DraftStates, *given: Any) -> None:
        original(self, *given[:3], lambda taps: taps, *given[4:])

    monkeypatch.setattr(DraftStates, "__init__", without)
    assert_rejected("hydra")


@CONDITIONS
@DRAFTERS
def test_the_text_is_that_of_plain_decoding(
    drafter: Any, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        drafter, ("hydra", "hydra"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 20


@DRAFTERS
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Any) -> None:
    """The layer of Hydra++ has keys and values, which the prefix cache keeps."""
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "hydra") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.one_in(3)  # an odd number: both temperatures
@pytest.mark.parametrize("decoder", ["hydra", "medusa", "eagle", "speculative-sampling"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float, decoder: str) -> None:
    """With other methods that draft after each pass, too; none drafts behind the last head."""
    assert_constrained_text_of_plain_decoding(PREFIX, decoder, temperature=temperature)


@pytest.mark.one_in(5)  # each decoder and each drafter once
@pytest.mark.parametrize("decoder", ["auto", "speculative-sampling", "opt-tree", "dyspec"])
@pytest.mark.parametrize("make", [medusa_checkpoint, hydra_checkpoint, PREFIX, mtp_checkpoint])
def test_other_methods_draft_with_heads(decoder: str, make: Any) -> None:
    """Chains that the backend could sample in one pass, too: the head is another at each step."""
    prompts = ["a quick zebra", LONG]
    with with_drafter(make, cache_positions=1024) as llm:
        plain, drafted = (
            generate(llm, prompts, key, temperature=0.8) for key in ("autoregressive", decoder)
        )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert decoder == "auto" or num_accepted(drafted) > 3


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(hydra_checkpoint, "hydra", rule)
