"""ParallelSpec: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import parallelspec as oracle
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_blocks import parallelspec_checkpoint
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.transformer import Transformer
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import (
    Change,
    assert_folder_drafts,
    changed,
    drafted_paths,
    tensor,
)
from drafted_texts import (
    CONDITIONS,
    PROMPTS,
    assert_constrained_text_of_plain_decoding,
    assert_rule_accepts,
    assert_text_of_plain_decoding,
    generate,
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
    assert_constrained_text_of_plain_decoding(
        parallelspec_checkpoint, "parallelspec", temperature=temperature
    )


def test_methods_with_one_token_per_pass_refuse_it() -> None:
    with (
        with_drafter(parallelspec_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="use decoder 'parallelspec'"),
    ):
        generate(llm, "x", "eagle")


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(parallelspec_checkpoint, "parallelspec", rule, more_than=10)


def test_a_folder_drafts_for_its_target(tmp_path: Path) -> None:
    make = partial(parallelspec_checkpoint, masks=2)
    decoder = "parallelspec:threshold=0"
    assert_folder_drafts(tmp_path, make, decoder, oracle.drafted_by(8, 0.0))


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
