"""SpecDiff-2: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from anydecode import Regex, catalogue
from anydecode.certification.oracles.speculative import specdiff_2 as oracle
from anydecode.certification.oracles.speculative.masked_drafts import PROMPTS, open_llm
from anydecode.decoders.framework.rejection import rejection_steps
from anydecode.decoders.speculative import specdiff_2
from anydecode.decoders.speculative.specdiff_2 import BestStreak
from anydecode.errors import InvalidRequestError
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.tree import TokenTree
from certificates import assert_certified, assert_rejected, replace_defaults


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("specdiff-2")


@pytest.mark.parametrize("defaults", [{"size": 15}, {"paths": 3}, {"temperature": 1.4}], ids=str)
def test_certificate_rejects_other_defaults(
    monkeypatch: pytest.MonkeyPatch, defaults: dict[str, Any]
) -> None:
    replace_defaults(monkeypatch, "specdiff-2", **defaults)
    assert_rejected("specdiff-2")


def test_certificate_rejects_another_temperature_of_the_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(specdiff_2, "Sampler", lambda temperature: Sampler(1.0))
    assert_rejected("specdiff-2")


def fails(name: str) -> bool:
    """Whether the checks of the selection notice a mistake."""
    return any(check.name == name and not check.passed for check in oracle._selection())


def test_a_selection_of_the_first_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(tree: TokenTree, scores: Any) -> list[int]:
        return tree.path(next(node for node in range(len(tree)) if not tree.children(node)))

    monkeypatch.setattr(BestStreak, "select", staticmethod(first))
    assert fails("tokens are accepted along the selected path")


@pytest.mark.slow
def test_selected_tokens_that_are_compared_with_the_draft_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a selection, a draft is no longer a sample of the draft's distribution."""

    def steps(self: Any, p: Any, q: Any, kind: str, tokens: list[int]) -> Any:
        return rejection_steps(p, np.full(len(p), 1 / len(p)), "wor", tokens)

    monkeypatch.setattr(BestStreak, "steps", steps)
    assert fails("with selection samples follow the target")


def test_selection_and_another_rule_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="selection or acceptance"):
        catalogue.build("specdiff-2", selection=True, acceptance="rejection")


def test_paths_that_a_constraint_forbids_are_not_selected() -> None:
    with open_llm() as llm:
        texts = [
            llm.generate(
                prompt,
                decoder="specdiff-2:selection=true",
                constraint=Regex("[a-c]{4,12}x?"),
                max_tokens=20,
                temperature=0.8,
            ).text
            for prompt in PROMPTS
        ]
    assert all(re.fullmatch("[a-c]{4,12}x?", text) for text in texts)
