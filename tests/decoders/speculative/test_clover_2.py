"""Clover-2: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import clover_2 as oracle
from anydecode.certification.oracles.speculative.clover import drafted_by
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_heads import clover_2_checkpoint
from anydecode.errors import CheckpointError
from anydecode.models import clover as files
from anydecode.models.clover import CloverNetwork, RegressiveBlock, load_clover
from anydecode.models.spec import StateSpec
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import Change, assert_folder_drafts, changed, set_keys, tensor, without
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

Patch = pytest.MonkeyPatch
SMALL = partial(clover_2_checkpoint, heads=3, layers=1, own_table=False)


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("clover-2")


@pytest.mark.parametrize(
    "defaults",
    [{"size": 7}, {"depth": 4}, {"depth": 6}, {"top_p": 0.7}, {"min_share": 0.0}],
)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "7 heads")
    replace_defaults(monkeypatch, "clover-2", **defaults)
    assert_rejected("clover-2")


@pytest.mark.parametrize("other", ["hydra", "eagle"])
def test_certificate_rejects_other_trees(monkeypatch: Patch, other: str) -> None:
    only_drafter(monkeypatch, oracle, "5 heads")
    replace_method(monkeypatch, "clover-2", other)
    assert_rejected("clover-2")


def test_certificate_rejects_values_without_a_cosine(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "5 heads")
    monkeypatch.setattr(
        RegressiveBlock,
        "apply",
        lambda self, backend, x, tokens, eps: backend.add(x, self.value.apply(backend, tokens)),
    )
    assert_rejected("clover-2")


def test_certificate_rejects_a_state_that_forgets_tokens(monkeypatch: Patch) -> None:
    """Each head would take in the last token only."""
    only_drafter(monkeypatch, oracle, "5 heads")
    layer = CloverNetwork.step_layer

    def forgetful(self: CloverNetwork, backend: Any, x: Any, step: int, index: int) -> Any:
        y = layer(self, backend, x, step, index)
        if not step or index + 1 < self.spec.num_layers:
            return y
        before, output = backend.columns(x, 0, self.size), backend.columns(y, self.size, self.size)
        return backend.join(before, output)

    monkeypatch.setattr(CloverNetwork, "step_layer", forgetful)
    assert_rejected("clover-2")


def test_certificate_rejects_states_after_the_final_norm(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "5 heads")
    monkeypatch.setattr(
        files, "StateSpec", lambda taps, *given, **keys: StateSpec((), *given, **keys)
    )
    assert_rejected("clover-2")


@CONDITIONS
@pytest.mark.parametrize("drafter", [clover_2_checkpoint, SMALL], ids=["two layers", "one"])
def test_the_text_is_that_of_plain_decoding(
    drafter: Any, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        drafter, ("clover-2", "clover-2"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 20


def test_cached_prefixes_serve_the_drafter() -> None:
    """The augmenting layers have keys and values, which the prefix cache keeps. The position behind
    the prefix is left out: it reads a state that the target does not compute again."""
    with with_drafter(clover_2_checkpoint, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "clover-2") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    same = [one == two for one, two in zip(*drafts, strict=False)]
    assert any(drafts[0]) and sum(same) > 0.8 * len(same)


@pytest.mark.parametrize("decoder", ["clover-2", "hydra", "auto", "speculative-sampling"])
def test_constraints_hold_and_the_text_is_exact(decoder: str) -> None:
    assert_constrained_text_of_plain_decoding(clover_2_checkpoint, decoder, temperature=0.8)


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(clover_2_checkpoint, "clover-2", rule)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(tmp_path: Path, dtype: str | None) -> None:
    drafter = partial(clover_2_checkpoint, heads=4)
    assert_folder_drafts(tmp_path, drafter, "clover-2", drafted_by(8, 5), dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(clover={"num_heads": 40, "num_layers": 2}), "num_heads is 40"),
        (set_keys(clover={"num_heads": 5, "num_layers": 1}), "contains more layers"),
        (set_keys(clover={"num_heads": 5}), "num_layers"),
        (set_keys(num_attention_heads=7), "num_attention_heads|head"),
        (set_keys(vocab_size=9), "vocab_size is 9"),
        (set_keys(model_type="gpt2"), "model_type|gpt2|n_"),
        (tensor("clover_head_mlp2.weight", np.ones((64, 64), np.float32)), "has shape"),
        (without("clover_head_mlp.bias"), "clover_head_mlp.bias is missing"),
        (without("clover_head_mlp_rnn2.k.weight"), "rnn2.k.weight is missing"),
        (without("layers.1.input_layernorm.weight"), "input_layernorm.weight is missing"),
        (without("clover_head_norm.weight"), "clover_head_norm.weight is missing"),
        (tensor("token_map", np.array([1, 999])), "token_map has 2 tokens from 1 to 999"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(clover_2_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_clover(checkpoint, target)
    assert "\n" not in str(raised.value)
