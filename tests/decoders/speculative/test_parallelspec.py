"""ParallelSpec: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import JsonSchema
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import parallelspec as oracle
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_blocks import parallelspec_checkpoint
from anydecode.errors import CheckpointError
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.transformer import Transformer
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import (
    Change,
    changed,
    drafted_paths,
    drafter_folder,
    target_folder,
    tensor,
)
from drafted_texts import (
    CONDITIONS,
    PROMPTS,
    assert_text_of_plain_decoding,
    generate,
    num_accepted,
    only_drafter,
)

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("parallelspec")


@pytest.mark.parametrize("defaults", [{"size": 7}, {"threshold": 0.3}], ids=str)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "4 masks")
    replace_defaults(monkeypatch, "parallelspec", **defaults)
    assert_rejected("parallelspec")


def test_certificate_rejects_a_chain(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 masks")
    replace_method(monkeypatch, "parallelspec", "dflash")
    assert_rejected("parallelspec")


def test_certificate_rejects_one_state_for_all_masks(monkeypatch: Patch) -> None:
    """As of P-EAGLE."""
    only_drafter(monkeypatch, oracle, "4 masks")
    own = Transformer.mask_states
    monkeypatch.setattr(
        Transformer, "mask_states", lambda self, count: np.repeat(own(self, 1), count, 0)
    )
    assert_rejected("parallelspec")


def test_certificate_rejects_masks_in_reversed_order(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 masks")
    own = Transformer.mask_states
    monkeypatch.setattr(Transformer, "mask_states", lambda self, count: own(self, count)[::-1])
    assert_rejected("parallelspec")


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        parallelspec_checkpoint,
        ("parallelspec", "parallelspec"),
        options,
        prompts,
        temperature=temperature,
    )
    assert min(accepted) > 15


def test_a_tree_takes_one_pass_of_each_model() -> None:
    with with_drafter(parallelspec_checkpoint, cache_positions=1024) as llm:
        text = generate(llm, PROMPTS[0], "parallelspec:threshold=0")
        runner = llm.engine.runners["draft"]
        assert runner.num_passes == sum(bool(one["drafted"]) for one in text.trace)
        depths = {len(path) for one in text.trace for path in drafted_paths(one)}
    assert max(depths) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 4}
    options = {"temperature": temperature, "max_tokens": 60, "ignore_eos": False}
    with with_drafter(parallelspec_checkpoint, cache_positions=1024) as llm:
        plain, drafted = (
            generate(llm, "x", key, constraint=JsonSchema(schema), **options)
            for key in ("autoregressive", "parallelspec")
        )
        llm.engine.check_integrity()
    assert drafted.text == plain.text


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    with with_drafter(parallelspec_checkpoint, cache_positions=1024) as llm:
        drafted = generate(llm, PROMPTS, f"parallelspec:acceptance={rule}", temperature=0.8)
    assert all(len(one.tokens) == 40 for one in drafted)
    assert num_accepted(drafted) > 10


def test_a_folder_drafts_for_its_target(tmp_path: Path) -> None:
    """The drafts are those of an independent forward pass."""
    model = target_folder(tmp_path / "model")
    network = load_network(load_checkpoint(model))
    drafter = partial(parallelspec_checkpoint, masks=2)(network)
    folder = drafter_folder(tmp_path / "drafter", drafter, "model.safetensors")
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "trace": True}
    prompt = [5, 6, 7]
    with LLM(model, draft=folder) as llm:
        plain, drafted = (
            llm.generate(prompt, decoder=key, temperature=0.7, **options)
            for key in ("autoregressive", "parallelspec:threshold=0")
        )
    assert drafted.tokens == plain.tokens
    checkpoint, text = load_checkpoint(folder), prompt + plain.tokens
    for event in drafted.trace[1:4]:
        expected = oracle.drafted_by(8, 0.0)(checkpoint, network, text[: event["position"]], 0.7)
        assert set(drafted_paths(event)) == set(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tensor("mask_states", np.ones((2, 9), np.float32)), "mask_states has shape"),
        (tensor("mask_states", np.ones(64, np.float32)), "mask_states has shape"),
        (lambda config, tensors: config.pop("mask_token_id"), "mask_token_id"),
    ],
)
def test_malformed_files_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(parallelspec_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_draft_head(checkpoint, target)
    assert "\n" not in str(raised.value)
