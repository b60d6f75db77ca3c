"""Clover: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anydecode.certification.oracles.speculative import clover as oracle
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_heads import clover_checkpoint
from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.models import clover as files
from anydecode.models.clover import CloverNetwork, RegressiveBlock, load_clover
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import Change, assert_folder_drafts, changed, set_keys, without
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


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("clover")


@pytest.mark.parametrize(
    "defaults",
    [{"size": 7}, {"depth": 4}, {"depth": 6}, {"top_p": 0.7}, {"min_share": 0.0}],
)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "4 heads, 2 layers")
    replace_defaults(monkeypatch, "clover", **defaults)
    assert_rejected("clover")


@pytest.mark.parametrize("other", ["hydra", "eagle"])
def test_certificate_rejects_other_trees(monkeypatch: Patch, other: str) -> None:
    only_drafter(monkeypatch, oracle, "3 heads")
    replace_method(monkeypatch, "clover", other)
    assert_rejected("clover")


def test_certificate_rejects_values_without_a_cosine(monkeypatch: Patch) -> None:
    """As of an attention to the drafted token alone, whose softmax is 1."""
    only_drafter(monkeypatch, oracle, "3 heads")
    monkeypatch.setattr(
        RegressiveBlock,
        "apply",
        lambda self, backend, x, tokens, eps: backend.add(x, self.value.apply(backend, tokens)),
    )
    assert_rejected("clover")


def _twin(monkeypatch: Patch, change: Callable[[CloverNetwork], None]) -> None:
    """Drafters of Clover are opened with a mistake."""
    only_drafter(monkeypatch, oracle, "3 heads")
    own = files._Clover.read

    def read(self: Any) -> CloverNetwork:
        network = own(self)
        change(network)
        return network

    monkeypatch.setattr(files._Clover, "read", read)


def test_certificate_rejects_one_attention_decoder_for_all_heads(monkeypatch: Patch) -> None:
    """As that of Clover-2's later heads."""

    def change(network: CloverNetwork) -> None:
        network.regressive = network.regressive[:1]

    _twin(monkeypatch, change)
    assert_rejected("clover")


def test_certificate_rejects_one_mlp_for_all_heads(monkeypatch: Patch) -> None:
    def change(network: CloverNetwork) -> None:
        network.outputs = network.outputs[:1]

    _twin(monkeypatch, change)
    assert_rejected("clover")


def test_certificate_rejects_layers_that_read_the_token(monkeypatch: Patch) -> None:
    """Clover-2 adds the first token before its layers, Clover behind them."""
    layer = CloverNetwork.step_layer

    def early(self: CloverNetwork, backend: Any, x: Any, step: int, index: int) -> Any:
        if step:
            return layer(self, backend, x, step, index)
        state, rest = backend.columns(x, 0, self.size), backend.columns(x, self.size, self.size)
        tokens = backend.token_rows(self.tokens, self.scale)
        state = self.regressive[0].apply(backend, state, tokens, self.spec.norm_eps)
        return layer(self, backend, backend.join(state, rest), step, index)

    only_drafter(monkeypatch, oracle, "3 heads")
    monkeypatch.setattr(CloverNetwork, "step_layer", early)
    assert_rejected("clover")


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    accepted = assert_text_of_plain_decoding(
        clover_checkpoint, ("clover", "clover"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 20


def test_cached_prefixes_serve_the_drafter() -> None:
    """The augmenting layers have keys and values, which the prefix cache keeps. The position behind
    the prefix is left out: it reads a state that the target does not compute again."""
    with with_drafter(clover_checkpoint, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "clover") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    same = [one == two for one, two in zip(*drafts, strict=False)]
    assert any(drafts[0]) and sum(same) > 0.8 * len(same)


@pytest.mark.parametrize("decoder", ["clover", "clover-2", "hydra"])
def test_constraints_hold_and_the_text_is_exact(decoder: str) -> None:
    assert_constrained_text_of_plain_decoding(clover_checkpoint, decoder, temperature=0.8)


@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(clover_checkpoint, "clover", rule)


@pytest.mark.parametrize("options", ["depth=0", "top_p=0", "top_p=1.5", "min_share=2"])
def test_wrong_options_are_refused(options: str) -> None:
    with (
        with_drafter(clover_checkpoint, cache_positions=256) as llm,
        pytest.raises(InvalidRequestError),
    ):
        generate(llm, "x", f"clover:{options}")


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(tmp_path: Path, dtype: str | None) -> None:
    drafter = partial(clover_checkpoint, heads=4)
    assert_folder_drafts(tmp_path, drafter, "clover", oracle.drafted_by(8, 5), dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(clover={"num_heads": 2, "num_layers": 1}), "contains more heads"),
        (set_keys(clover={"num_heads": 4, "num_layers": 1}), "heads.3.attention"),
        (without("clover_heads.2.mlp.weight"), "clover_heads.2.mlp.weight is missing"),
        (without("clover_heads.1.attention.v.bias"), "attention.v.bias is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files_of_clover_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(clover_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message):
        load_clover(checkpoint, target)
