"""Hydra: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from anydecode import Generation, JsonSchema
from anydecode.api.llm import LLM
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

LONG = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat. " * 3
PROMPTS = [LONG + "one", LONG + "two", "zq", LONG + "one more", LONG[:50]]
PREFIX = partial(hydra_checkpoint, has_prefix=True)
DRAFTERS = pytest.mark.parametrize("drafter", [hydra_checkpoint, PREFIX], ids=["plain", "++"])
Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("hydra")


def _only(monkeypatch: Patch, name: str) -> None:
    """Restricts the oracle test to one drafter."""
    monkeypatch.setattr(oracle, "DRAFTERS", {name: oracle.DRAFTERS[name]})


@pytest.mark.parametrize("defaults", [{"size": 7}, {"depth": 3}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    _only(monkeypatch, "Hydra, 5 heads of 1 block")
    replace_defaults(monkeypatch, "hydra", **defaults)
    assert_rejected("hydra")


@pytest.mark.parametrize("other", ["speculative-sampling", "eagle"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    _only(monkeypatch, "Hydra")
    replace_method(monkeypatch, "hydra", other)
    assert_rejected("hydra")


def test_certificate_rejects_heads_that_forget_earlier_tokens(monkeypatch: Patch) -> None:
    """A node's input is that of its parent and the node's embedding."""
    layer = HydraNetwork.step_layer

    def forgetful(self: HydraNetwork, backend: Any, x: Any, step: int) -> Any:
        y, last = layer(self, backend, x, step), step + 1
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
    _only(monkeypatch, "Hydra++")
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
        original(self, *given[:-1], lambda taps: taps)

    monkeypatch.setattr(DraftStates, "__init__", without)
    assert_rejected("hydra")


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
@DRAFTERS
def test_the_text_is_that_of_plain_decoding(
    drafter: Any, options: dict[str, Any], temperature: float
) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    with with_drafter(drafter, **{"cache_positions": 2048, **options}) as llm:
        plain = _generate(llm, prompts, "autoregressive", temperature=temperature)
        alone = [_generate(llm, one, "hydra", temperature=temperature) for one in prompts]
        together = _generate(llm, prompts, "hydra", temperature=temperature)
        llm.engine.check_integrity()
    expected = [one.tokens for one in plain]
    assert [one.tokens for one in alone] == expected
    assert [one.tokens for one in together] == expected
    assert _accepted(alone) > 20 and _accepted(together) > 20


@DRAFTERS
def test_cached_prefixes_leave_the_drafts_as_they_are(drafter: Any) -> None:
    """The layer of Hydra++ has keys and values, which the prefix cache keeps."""
    with with_drafter(drafter, cache_positions=2048) as llm:
        first, second = (_generate(llm, LONG + "one", "hydra") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    assert drafts[1] == drafts[0] and any(drafts[0])


@pytest.mark.parametrize("decoder", ["hydra", "medusa", "eagle", "speculative-sampling"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float, decoder: str) -> None:
    """With other methods that draft after each pass, too; none drafts behind the last head."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4}
    options = {"temperature": temperature, "max_tokens": 60, "ignore_eos": False}
    with with_drafter(PREFIX, cache_positions=1024) as llm:
        plain, drafted = (
            _generate(llm, "x", key, constraint=JsonSchema(schema), **options)
            for key in ("autoregressive", decoder)
        )
        llm.engine.check_integrity()
    assert drafted.text == plain.text


@pytest.mark.parametrize("decoder", ["auto", "speculative-sampling", "opt-tree", "dyspec"])
@pytest.mark.parametrize("make", [medusa_checkpoint, hydra_checkpoint, PREFIX, mtp_checkpoint])
def test_other_methods_draft_with_heads(decoder: str, make: Any) -> None:
    """Chains that the backend could sample in one pass, too: the head is another at each step."""
    prompts = ["a quick zebra", LONG]
    with with_drafter(make, cache_positions=1024) as llm:
        plain, drafted = (
            _generate(llm, prompts, key, temperature=0.8) for key in ("autoregressive", decoder)
        )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert decoder == "auto" or _accepted(drafted) > 3


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    with with_drafter(hydra_checkpoint, cache_positions=1024) as llm:
        drafted = _generate(llm, PROMPTS, f"hydra:acceptance={rule}", temperature=0.8)
    assert all(len(one.tokens) == 40 for one in drafted)
    assert _accepted(drafted) > 20
