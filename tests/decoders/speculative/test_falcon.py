"""Falcon: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import falcon as oracle
from anydecode.certification.tiny import tiny_network, with_drafter
from anydecode.certification.tiny_blocks import dflash_checkpoint
from anydecode.certification.tiny_heads import falcon_checkpoint
from anydecode.decoders.speculative.draft_blocks import BlockTree
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Rows
from anydecode.models.draft_heads import load_draft_head
from anydecode.models.states import StateWeights
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.span import ChainSpan, JointSpan
from anydecode.scoring.tree import ROOT
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from draft_folders import (
    Change,
    assert_folder_drafts,
    changed,
    drafted_paths,
    set_keys,
    tensor,
    without,
)
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
    assert_certified("falcon")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults",
    [{"size": 7}, {"blocks": 1}, {"blocks": 3}, {"threshold": 0.2}, {"tree": False}],
    ids=str,
)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    replace_defaults(monkeypatch, "falcon", **defaults)
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_one_block(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    replace_method(monkeypatch, "falcon", "parallelspec")
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_rows_of_the_text_that_see_those_before_alone(
    monkeypatch: Patch,
) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    monkeypatch.setattr(JointSpan, "write_rows", ChainSpan.write_rows)
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_drafts_that_see_those_before_alone(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    extend = Sequence.extend
    monkeypatch.setattr(
        Sequence,
        "extend",
        lambda self, tokens, parents, *, runner, block: extend(
            self, tokens, parents, runner=runner
        ),
    )
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_states_of_other_rows(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    own = DraftStates.for_nodes
    monkeypatch.setattr(
        DraftStates, "for_nodes", lambda self, cache, parents: own(self, cache, parents)[::-1]
    )
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_one_cell(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    run = StateWeights._run_cells

    def run_first(self: StateWeights, *given: Any) -> Any:
        return run(StateWeights(cells=self.cells[:1]), *given)

    monkeypatch.setattr(StateWeights, "_run_cells", run_first)
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_blocks_that_follow_the_text(monkeypatch: Patch) -> None:
    """Further blocks stand behind the block before, not behind the text."""
    only_drafter(monkeypatch, oracle, "blocks of 2")
    monkeypatch.setattr(BlockTree, "add", lambda self, scores: None)
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_third_blocks_that_follow_the_first(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 2")
    extend = Sequence.extend

    def shallow(self: Sequence, tokens: Any, parents: Any, *, runner: str, block: int) -> Any:
        own = [ROOT if not row % block else parent for row, parent in enumerate(parents)]
        return extend(self, tokens, own, runner=runner, block=block)

    monkeypatch.setattr(Sequence, "extend", shallow)
    assert_rejected("falcon")


@pytest.mark.slow
def test_certificate_rejects_blocks_whose_last_two_rows_alone_see_each_other(
    monkeypatch: Patch,
) -> None:
    only_drafter(monkeypatch, oracle, "blocks of 3")
    own = JointSpan.write_rows

    def fewer(self: JointSpan, rows: Rows, at: int, count: int) -> None:
        own(self, rows, at, count)
        rows.prefix[at : at + count - 2] -= np.arange(count - 1, 1, -1)

    monkeypatch.setattr(JointSpan, "write_rows", fewer)
    assert_rejected("falcon")


@pytest.mark.slow
@CONDITIONS
@pytest.mark.parametrize(
    ("size", "decoder"), [(2, "falcon"), (3, "falcon:blocks=3,threshold=0")], ids=["2", "3"]
)
def test_the_text_is_that_of_plain_decoding(
    size: int, decoder: str, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    make = partial(falcon_checkpoint, size=size)
    accepted = assert_text_of_plain_decoding(
        make, (decoder, decoder), options, prompts, temperature=temperature
    )
    assert min(accepted) > (1 if "backend" in options else 2)


def test_blocks_follow_blocks() -> None:
    with with_drafter(falcon_checkpoint, cache_positions=1024) as llm:
        plain, text = (
            generate(llm, PROMPTS[0], key, temperature=0.0)
            for key in ("autoregressive", "falcon:size=12,blocks=3")
        )
        passes = llm.engine.runners["draft"].num_passes
    assert text.tokens == plain.tokens
    lengths = [max(map(len, drafted_paths(one)), default=0) for one in text.trace]
    assert max(lengths) == 6 and max(len(one["accepted"]) for one in text.trace) > 2
    assert passes <= 3 * sum(length > 0 for length in lengths)


def test_cached_prefixes_serve_the_drafter() -> None:
    with with_drafter(falcon_checkpoint, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "falcon") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
        assert first.tokens == second.tokens
    drafts = [[event["drafted"] for event in one.trace[2:]] for one in (first, second)]
    same = [one == two for one, two in zip(*drafts, strict=False)]
    assert any(drafts[0]) and sum(same) > 0.8 * len(same)


@pytest.mark.parametrize("decoder", ["dflash", "parallelspec"])
def test_other_block_methods_draft_one_block(decoder: str) -> None:
    with with_drafter(falcon_checkpoint, cache_positions=1024) as llm:
        plain, drafted = (generate(llm, "zq", key) for key in ("autoregressive", decoder))
    assert drafted.tokens == plain.tokens
    assert {len(path) for one in drafted.trace for path in drafted_paths(one)} == {1, 2}


def test_a_drafter_of_masks_drafts_one_block() -> None:
    with with_drafter(dflash_checkpoint, cache_positions=1024) as llm:
        plain, drafted, other = (
            generate(llm, "zq", key) for key in ("autoregressive", "falcon", "parallelspec")
        )
    assert drafted.tokens == plain.tokens
    assert [one["drafted"] for one in drafted.trace] == [one["drafted"] for one in other.trace]


def test_methods_with_one_token_per_pass_refuse_it() -> None:
    with (
        with_drafter(falcon_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError, match="use decoder 'falcon'"),
    ):
        generate(llm, "x", "eagle")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    assert_constrained_text_of_plain_decoding(falcon_checkpoint, "falcon", temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(falcon_checkpoint, "falcon", rule, more_than=5)


@pytest.mark.parametrize("options", ["blocks=0", "threshold=1.5", "threshold=-1"])
def test_wrong_options_are_refused(options: str) -> None:
    with (
        with_drafter(falcon_checkpoint, cache_positions=256) as llm,
        pytest.raises(InvalidRequestError),
    ):
        generate(llm, "x", f"falcon:{options}")


@pytest.mark.parametrize("dtype", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_folder_drafts_for_its_target(tmp_path: Path, dtype: str | None) -> None:
    assert_folder_drafts(
        tmp_path, falcon_checkpoint, "falcon", oracle.drafted_by(8, 2, 0.1), dtype=dtype
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(k_mask=0), "k_mask is 0"),
        (lambda config, tensors: config.pop("k_mask"), "k_mask"),
        (set_keys(num_hidden_layers=2), "num_hidden_layers is 2"),
        (set_keys(vocab_size=9), "vocab_size is 9"),
        (tensor("lstm.weight_ih_l1", np.ones((64, 64), np.float32)), "weight_ih_l1 has shape"),
        (without("lstm.weight_ih_l1"), "lstm.weight_ih_l1 is missing"),
        (without("lstm.bias_hh_l0"), "lstm.bias_hh_l0 is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(falcon_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_draft_head(checkpoint, target)
    assert "\n" not in str(raised.value)
