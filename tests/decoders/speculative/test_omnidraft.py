"""OmniDraft: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.certification.oracles.speculative import omnidraft as oracle
from anydecode.decoders.speculative import omnidraft
from anydecode.decoders.speculative.acceptance_head import OnlineHead
from anydecode.decoders.speculative.omnidraft import Lesson, OmniDrafter, Translation, hybrid_loss
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_defaults


def test_certificate() -> None:
    assert_certified("omnidraft")


def test_certificate_rejects_a_translation_that_learns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Translation, "learn", lambda *_: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_a_drafter_that_is_never_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OmniDrafter, "train", lambda self: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_the_forward_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(lessons: list[Lesson], direct: np.ndarray) -> Any:
        def loss(logits: np.ndarray) -> tuple[float, np.ndarray]:
            total, errors = rest(logits)
            for row, error, lesson in zip(logits, errors, lessons, strict=True):
                if lesson.target is not None:
                    q = np.exp(row[direct]) / np.exp(row[direct]).sum()
                    error[direct] = (q - lesson.target) / len(lessons)
            return total, errors

        rest = hybrid_loss(lessons, direct)
        return loss

    monkeypatch.setattr(oracle, "hybrid_loss", forward)
    assert_rejected("omnidraft")


def test_certificate_rejects_lessons_behind_the_first_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lessons = omnidraft._Session._lessons

    def all_of_them(self: Any, round: Any) -> list[Lesson]:
        whole = replace(round, result=replace(round.result, path=[*range(len(round.tree))]))
        return lessons(self, whole)

    monkeypatch.setattr(omnidraft._Session, "_lessons", all_of_them)
    assert_rejected("omnidraft")


def test_translation_prefers_the_longest_run() -> None:
    translation = Translation()
    translation.direct = {b"a": 1, b"b": 2, b"c": 3}
    letters = [b"a", b"b", b"c"]
    assert translation.translate([10, 11, 12], letters) == [(1, 1), (2, 1), (3, 1)]
    translation.learn([10, 11], 4)
    translation.learn([10, 11, 12], 5)
    assert translation.translate([10, 11, 12], letters) == [(5, 3)]
    assert translation.translate([10, 11], letters[:2]) == [(4, 2)]
    assert translation.translate([10, 13], [b"a", b"?"]) == [(1, 1)]


def test_certificate_rejects_a_head_that_is_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineHead, "train", lambda self: None)
    assert_rejected("omnidraft")


def test_certificate_rejects_a_length_that_ignores_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_defaults(monkeypatch, "omnidraft", bound=1.0)
    assert_rejected("omnidraft")


def test_certificate_rejects_acceptances_behind_the_first_rejection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = omnidraft._Session._add_acceptances

    def all_of_them(self: Any, round: Any) -> None:
        add(self, replace(round, result=replace(round.result, path=[*range(len(round.tree))])))

    monkeypatch.setattr(omnidraft._Session, "_add_acceptances", all_of_them)
    assert_rejected("omnidraft")


@pytest.mark.parametrize("bound", [0, 1.5])
def test_a_bound_out_of_range_is_refused(bound: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"bound is {bound}"):
        OmniDrafter(0.01, bound)
