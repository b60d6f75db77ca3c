"""Chimera: its certificate, mistakes that the certificate rejects, its files, and exactness in
company, with a small cache, in chunks, from cached prefixes and under constraints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode import catalogue
from anydecode.certification.oracles.speculative import chimera as oracle
from anydecode.certification.tiny import eagle_checkpoint, tiny_network, with_drafter
from anydecode.certification.tiny_heads import chimera_checkpoint
from anydecode.errors import CheckpointError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.chimera import ChimeraTransformer, load_chimera
from anydecode.scoring.draft_states import DraftStates
from anydecode.scoring.sequence import Sequence
from certificates import assert_certified, assert_rejected, replace_defaults
from draft_folders import (
    Change,
    assert_folder_drafts,
    changed,
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
    assert_certified("chimera")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults", [{"size": 7}, {"depth": 3}, {"width": 3}, {"width": 5}], ids=str
)
def test_certificate_rejects_other_defaults(monkeypatch: Patch, defaults: dict[str, Any]) -> None:
    only_drafter(monkeypatch, oracle, "4 resolvers")
    replace_defaults(monkeypatch, "chimera", **defaults)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_bigrams(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 resolvers")
    own = ChimeraTransformer.trigram_states

    def of_two(self: ChimeraTransformer, tokens: np.ndarray) -> np.ndarray:
        return own(self, tokens[:, [1, 1, 2]])

    monkeypatch.setattr(ChimeraTransformer, "trigram_states", of_two)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_a_draft_that_sees_the_text_alone(monkeypatch: Patch) -> None:
    """Without the outputs before it."""
    only_drafter(monkeypatch, oracle, "4 resolvers")
    extend = Sequence.extend

    def blind(self: Sequence, tokens: Any, parents: Any, **options: Any) -> Any:
        return extend(self, tokens, [-1] * len(parents), **options)

    monkeypatch.setattr(Sequence, "extend", blind)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_trigrams_that_later_rows_see(monkeypatch: Patch) -> None:
    """As in place of the outputs."""
    only_drafter(monkeypatch, oracle, "4 resolvers")
    extend = Sequence.extend

    def swapped(self: Sequence, tokens: Any, parents: Any, *, inputs: Any, **options: Any) -> Any:
        return extend(self, tokens, parents, inputs=inputs[::-1].copy(), **options)

    monkeypatch.setattr(Sequence, "extend", swapped)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_one_resolver_for_all(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 resolvers")
    own = ChimeraTransformer.resolve
    monkeypatch.setattr(
        ChimeraTransformer,
        "resolve",
        lambda self, state, outputs, step: own(self, state, outputs, 0),
    )
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_a_resolver_of_the_output_alone(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 resolvers")
    own = DraftStates.known
    monkeypatch.setattr(DraftStates, "known", lambda self, position: 0 * own(self, position))
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_an_output_before_in_place_of_the_targets_state(
    monkeypatch: Patch,
) -> None:
    """As in a resolver that reads the two last rows of the encoder."""
    only_drafter(monkeypatch, oracle, "4 resolvers")
    own, before = ChimeraTransformer.resolve, list[np.ndarray]()

    def shifted(
        self: ChimeraTransformer, state: np.ndarray, outputs: np.ndarray, step: int
    ) -> np.ndarray:
        read = before[0] if step else state
        before[:] = [outputs[0]]
        return own(self, read, outputs, step)

    monkeypatch.setattr(ChimeraTransformer, "resolve", shifted)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_rows_of_the_head_as_tokens(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "2 resolvers, some tokens")
    own = ChimeraTransformer.resolve

    def unmapped(self: ChimeraTransformer, *given: Any) -> np.ndarray:
        logits = own(self, *given)
        rows = np.full_like(logits, -np.inf)
        found = logits[:, self.head_tokens]
        rows[:, : found.shape[1]] = found
        return rows

    monkeypatch.setattr(ChimeraTransformer, "resolve", unmapped)
    assert_rejected("chimera")


@pytest.mark.slow
def test_certificate_rejects_one_tree_for_all_sizes(monkeypatch: Patch) -> None:
    only_drafter(monkeypatch, oracle, "4 resolvers")
    entry = catalogue.entries()["chimera"]
    build = replace(entry, build=lambda **_: entry.build())
    monkeypatch.setitem(catalogue.entries(), "chimera", build)
    assert_rejected("chimera")


@pytest.mark.slow
@CONDITIONS
@pytest.mark.parametrize("modulus", [0, 9], ids=["all tokens", "some"])
def test_the_text_is_that_of_plain_decoding(
    modulus: int, options: dict[str, Any], temperature: float
) -> None:
    prompts = PROMPTS[2:4] if "backend" in options else PROMPTS
    make = partial(chimera_checkpoint, modulus=modulus)
    accepted = assert_text_of_plain_decoding(
        make, ("chimera", "chimera"), options, prompts, temperature=temperature
    )
    assert min(accepted) > 10


def test_the_text_is_exact_and_levels_take_one_pass_each() -> None:
    with with_drafter(chimera_checkpoint, cache_positions=1024) as llm:
        plain, text = (
            generate(llm, PROMPTS[0], key, max_tokens=16) for key in ("autoregressive", "chimera")
        )
        passes = llm.engine.runners["draft"].num_passes
    assert text.tokens == plain.tokens
    assert passes == 4 * sum(bool(one["drafted"]) for one in text.trace)


@pytest.mark.slow
def test_drafts_in_company_are_those_alone() -> None:
    """Trigrams and logits are computed while passes of other requests run."""
    prompts = [f"{number} {LONG[number : 3 * number]}" for number in range(2, 18)]
    with with_drafter(chimera_checkpoint, cache_positions=8192, prefix_cache=False) as llm:
        together = generate(llm, prompts, "chimera", temperature=0.8)
        alone = [generate(llm, prompt, "chimera", temperature=0.8) for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [event["drafted"] for event in one.trace] == [
            event["drafted"] for event in other.trace
        ]


@pytest.mark.slow
def test_cached_prefixes_serve_the_drafter() -> None:
    with with_drafter(chimera_checkpoint, cache_positions=2048) as llm:
        first, second = (generate(llm, LONG + "one", "chimera") for _ in range(2))
        assert second.stats.num_cached_tokens > len(LONG) // 2
    drafts = [[event["drafted"] for event in one.trace[1:]] for one in (first, second)]
    same = [one == two for one, two in zip(*drafts, strict=False)]
    assert any(drafts[0]) and sum(same) > 0.8 * len(same)


def test_a_short_text_repeats_its_first_token(monkeypatch: Patch) -> None:
    found: list[Any] = []
    own = ChimeraTransformer.trigram_states

    def recorded(self: ChimeraTransformer, tokens: np.ndarray) -> np.ndarray:
        found.append(tokens)
        return own(self, tokens)

    monkeypatch.setattr(ChimeraTransformer, "trigram_states", recorded)
    with with_drafter(chimera_checkpoint, cache_positions=256) as llm:
        text = generate(llm, [5], "chimera:depth=1", max_tokens=4)
    assert found[0].tolist() == [[5, 5, text.tokens[0]]]


@pytest.mark.parametrize("decoder", ["eagle", "hydra", "speculative-sampling", "dflash"])
def test_methods_of_other_drafters_refuse_it(decoder: str) -> None:
    with (
        with_drafter(chimera_checkpoint, cache_positions=256) as llm,
        pytest.raises(UnsupportedCombinationError),
    ):
        generate(llm, "x", decoder)


def test_auto_leaves_it_out() -> None:
    with with_drafter(chimera_checkpoint, cache_positions=256) as llm:
        plain, text = (generate(llm, "x", key) for key in ("autoregressive", "auto"))
    assert text.tokens == plain.tokens


def test_another_drafter_drafts_the_tree_of_eagle() -> None:
    with with_drafter(eagle_checkpoint, cache_positions=512) as llm:
        own, eagle = (generate(llm, "zq", key) for key in ("chimera", "eagle"))
    assert [one["drafted"] for one in own.trace] == [one["drafted"] for one in eagle.trace]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    assert_constrained_text_of_plain_decoding(
        chimera_checkpoint, "chimera", temperature=temperature
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["typical", "rejection", "top-m"])
def test_other_acceptance_rules_run(rule: str) -> None:
    assert_rule_accepts(chimera_checkpoint, "chimera", rule, more_than=10)


def test_wrong_options_are_refused() -> None:
    with (
        with_drafter(chimera_checkpoint, cache_positions=256) as llm,
        pytest.raises(InvalidRequestError),
    ):
        generate(llm, "x", "chimera:depth=0")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_a_folder_drafts_for_its_target(tmp_path: Path, dtype: str | None) -> None:
    paths = oracle.drafted_by(8, 4, 4)
    assert_folder_drafts(tmp_path, chimera_checkpoint, "chimera", paths, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys(chimera_num_heads=40), "chimera_num_heads is 40"),
        (set_keys(chimera_num_heads=3), "contains more resolvers"),
        (set_keys(chimera_num_heads=5), "resolvers.4.weight is missing"),
        (set_keys(vocab_size=9), "vocab_size is 9"),
        (tensor("trimlp.0.linear.weight", np.ones((64, 64), np.float32)), "has shape"),
        (without("trimlp.0.linear.bias"), "trimlp.0.linear.bias is missing"),
        (without("fast_layer1.0.input_layernorm.weight"), "input_layernorm.weight is missing"),
        (tensor("token_map", np.array([1, 999])), "token_map has 2 tokens from 1 to 999"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files_are_refused(change: Change, message: str) -> None:
    target = tiny_network()
    checkpoint = changed(chimera_checkpoint(target), change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_chimera(checkpoint, target)
    assert "\n" not in str(raised.value)
