"""SPACE: its certificate, mistakes that the certificate rejects, and exactness in company, with a
small cache, in chunks, in number formats and under constraints."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from anydecode import Regex
from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative import mask_groups as scripts
from anydecode.certification.oracles.speculative import space as oracle
from anydecode.certification.oracles.speculative.rejection_rules import (
    rejection_checks,
    small_masked_llm,
)
from anydecode.certification.rounds import rounds, scripted
from anydecode.decoders.framework.acceptance import TokenExact
from anydecode.decoders.framework.speculation import SpeculationRound, Speculative
from anydecode.decoders.speculative import mask_groups, space
from anydecode.errors import InvalidRequestError
from anydecode.models.scripted import MASK, ByteTokenizer, ScriptedModel
from anydecode.scoring.tree import ROOT, TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults, replace_method
from drafted_texts import CONDITIONS, NUMBERS, PROMPTS, generate, num_accepted
from masked_models import tiny_masked_llm

Patch = pytest.MonkeyPatch


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("space")


def test_certificate_rejects_another_default(monkeypatch: Patch) -> None:
    replace_defaults(monkeypatch, "space", masks=4)
    assert_rejected("space")


@pytest.mark.parametrize("other", ["prompt-lookup", "lookahead"])
def test_certificate_rejects_other_methods(monkeypatch: Patch, other: str) -> None:
    replace_method(monkeypatch, "space", other)
    assert_rejected("space")


def test_certificate_rejects_the_group_behind_the_text(monkeypatch: Patch) -> None:
    """As with linear decoding, whose masks do not know the accepted candidates."""
    own = mask_groups._Session.observe

    def observe(self: Any, round: SpeculationRound) -> None:
        self._groups = dict.fromkeys(self._groups, self._groups[ROOT]) if self._groups else {}
        own(self, round)

    monkeypatch.setattr(mask_groups._Session, "observe", observe)
    assert_rejected("space")


def test_certificate_rejects_groups_that_see_each_other(monkeypatch: Patch) -> None:
    own = TokenTree.add

    def add(self: TokenTree, token: int, parent: int = ROOT) -> int:
        is_first = token == MASK and len(self) and MASK in self.tokens
        return own(self, token, len(self) - 1 if is_first else parent)

    monkeypatch.setattr(TokenTree, "add", add)
    assert_rejected("space")


def test_certificate_rejects_masks_in_reversed_order(monkeypatch: Patch) -> None:
    own = space.SpaceDrafter.candidates
    monkeypatch.setattr(
        space.SpaceDrafter,
        "candidates",
        lambda self, sequence, masks: own(self, sequence, masks[::-1]),
    )
    assert_rejected("space")


def test_certificate_rejects_the_mask_as_a_candidate(monkeypatch: Patch) -> None:
    """The scripted target gives it the largest logit."""
    own = space.draft_candidates

    def found(sequence: Any, sampler: Any, row: np.ndarray, *given: Any) -> Any:
        return own(sequence, sampler, np.where(np.isneginf(row), np.float32(30), row), *given)

    monkeypatch.setattr(space, "draft_candidates", found)
    assert_rejected("space")


def test_certificate_rejects_noise_of_another_position(monkeypatch: Patch) -> None:
    own = space.draft_candidates

    def found(sequence: Any, sampler: Any, row: Any, position: int, draw: Any) -> Any:
        return own(sequence, sampler, row, position - 1, draw)

    monkeypatch.setattr(space, "draft_candidates", found)
    assert_rejected("space")


def test_certificate_rejects_best_candidates_compared_as_drawn(monkeypatch: Patch) -> None:
    monkeypatch.setattr(space, "draft_candidates", partial(space.draft_candidates, has_noise=False))
    failed = [one.name for one in oracle.space() if not one.passed]
    assert "space: with the rejection rule samples follow the target" in failed


def test_samples_that_are_tested_as_chosen_tokens_are_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(space, "TokenTree", lambda **_: TokenTree(kind="point"))
    *_, last = rejection_checks("space", small_masked_llm, samples=20, kind="iid")
    assert not last.passed


@pytest.mark.parametrize("rule", ["typical", "top-m"])
def test_lossy_rules_accept_drafts(rule: str) -> None:
    with scripts.open_llm() as llm:
        trace = rounds(llm, f"space:acceptance={rule}", scripts.PROMPTS[0], temperature=0.8)
    assert sum(len(one.accepted) for one in trace) > 5


@CONDITIONS
def test_the_text_is_that_of_plain_decoding(options: dict[str, Any], temperature: float) -> None:
    if "backend" in options:
        pytest.importorskip("torch")
    with tiny_masked_llm(**options) as llm:
        plain = generate(llm, PROMPTS, "autoregressive", temperature=temperature)
        alone = [generate(llm, one, "space", temperature=temperature) for one in PROMPTS]
        together = generate(llm, PROMPTS, "space:masks=3", temperature=temperature)
        llm.engine.check_integrity()
    expected = [one.tokens for one in plain]
    assert [one.tokens for one in alone] == expected
    assert [one.tokens for one in together] == expected
    assert min(num_accepted(alone), num_accepted(together)) > 15


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_exact_in_other_formats_of_the_cache(format: str, temperature: float) -> None:
    with tiny_masked_llm(cache=format) as llm:
        texts = [
            generate(llm, PROMPTS, key, temperature=temperature)
            for key in ("autoregressive", "space")
        ]
    assert [one.tokens for one in texts[1]] == [one.tokens for one in texts[0]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constraints_hold_and_the_text_is_exact(temperature: float) -> None:
    with tiny_masked_llm() as llm:
        for constraint in (NUMBERS, Regex("[ae]{20}")):
            plain, drafted = (
                generate(
                    llm, "x", key, constraint=constraint, max_tokens=60, ignore_eos=False,
                    temperature=temperature,
                )
                for key in ("autoregressive", "space")
            )  # fmt: skip
            assert drafted.text == plain.text
        llm.engine.check_integrity()


def test_a_candidate_counts_for_the_penalties_of_those_after_it() -> None:
    """So that candidates that penalties allow are drafted, and accepted."""
    row = np.zeros(MASK + 1, np.float32)
    row[[97, 98, 99]] = 3, 2, 1
    with scripted(lambda seen: row) as llm:
        options = {"logit_bias": {MASK: -100}, "presence_penalty": 1.5}
        trace = rounds(llm, "space", "x", 4, **options)
    assert trace[1].text[1:] == [97] and trace[1].paths[:2] == [(98,), (98, 97)]


def test_a_pass_has_the_square_of_rows() -> None:
    with scripts.open_llm() as llm:
        trace = rounds(llm, "space:masks=3", scripts.PROMPTS[0])
    assert [len(one.tokens) + 1 for one in trace[:3]] == [4, 16, 16]


def test_a_smaller_budget_has_fewer_candidates() -> None:
    with scripts.open_llm() as llm:
        for size, expected in ((1, 0), (2, 2), (4, 2), (5, 5), (7, 5), (8, 8), (99, 8)):
            drafter = space.SpaceDrafter(2, TokenExact())
            trace = rounds(llm, Speculative(drafter, size), scripts.PROMPTS[0], 12)
            assert {len(one.tokens) for one in trace[1:]} == {expected}


def test_models_without_a_mask_token_are_refused_in_one_line() -> None:
    """Also where the tokenizer has one for which the model has no embedding."""
    without = ByteTokenizer()
    without.mask_id = None
    for tokenizer, size in ((without, MASK + 1), (ByteTokenizer(), MASK)):
        with (
            LLM(ScriptedModel(vocab_size=size), tokenizer=tokenizer) as llm,
            pytest.raises(InvalidRequestError, match="no mask token") as refusal,
        ):
            llm.generate("abc", decoder="space")
        assert "\n" not in str(refusal.value)
