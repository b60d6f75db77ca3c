"""DiffuSpec passes its certificate; wrong paths and lengths do not. Its draft lengths."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from anydecode.decoders.framework.acceptance import AcceptanceResult
from anydecode.decoders.framework.speculation import SpeculationRound
from anydecode.decoders.speculative import diffuspec
from anydecode.decoders.speculative.diffuspec import AdaptiveLength, Trigrams
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("diffuspec")


def test_a_trigram_model_with_reversed_contexts_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reversed_context(self: Trigrams, token: int, context: Seq[int], vocab_size: int) -> float:
        return log_probability(self, token, context[::-1], vocab_size)

    log_probability = Trigrams.log_probability
    monkeypatch.setattr(Trigrams, "log_probability", reversed_context)
    assert_rejected("diffuspec")


def test_paths_by_the_diffusion_model_alone_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trigrams, "log_probability", lambda *given: 0.0)
    assert_rejected("diffuspec")


def test_a_length_that_never_grows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveLength, "size", lambda self, sequence: self.min_length)
    assert_rejected("diffuspec")


def test_a_search_that_passes_a_likely_end_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = diffuspec.candidates
    monkeypatch.setattr(
        diffuspec, "candidates", lambda row, mass, count, ends: candidates(row, mass, count, [])
    )
    assert_rejected("diffuspec")


def test_rounds_without_a_draft_do_not_change_the_length() -> None:
    budget = AdaptiveLength(4, 16, 4, 0.5)
    sequence: Any = None

    def observe(num_drafts: int) -> None:
        tree, path = TokenTree.chain([7] * num_drafts), list(range(num_drafts))
        result = AcceptanceResult(path, [7] * (num_drafts + 1))
        budget.observe(SpeculationRound(sequence, tree, sequence, result, 0.0, 0.0))

    observe(0)
    assert budget.size(sequence) == 4
    observe(6)
    assert budget.size(sequence) == 10
    observe(0)
    assert budget.size(sequence) == 10
