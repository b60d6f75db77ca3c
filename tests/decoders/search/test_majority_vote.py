"""Majority vote: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

import pytest

from anydecode.catalogue import check_remote
from anydecode.decoders.search import majority_vote
from anydecode.decoders.search.majority_vote import MajorityVote
from anydecode.errors import InvalidRequestError
from anydecode.rewards import answers
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("majority-vote")


def test_certificate_rejects_more_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "majority-vote", n=12)
    assert_rejected("majority-vote")


def test_certificate_rejects_numbers_compared_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answers.ANSWERS, "last-number", lambda text: text.strip() or None)
    assert_rejected("majority-vote")


def test_certificate_rejects_votes_of_texts_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    winners = majority_vote.winners
    monkeypatch.setattr(
        majority_vote,
        "winners",
        lambda found, weights: winners([one or "" for one in found], weights),
    )
    assert_rejected("majority-vote")


def test_certificate_rejects_votes_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    winners = majority_vote.winners
    monkeypatch.setattr(
        majority_vote, "winners", lambda found, weights: winners(found, [1.0] * len(found))
    )
    assert_rejected("majority-vote")


def test_an_answer_may_be_found_by_a_function() -> None:
    with letters_llm() as llm:
        decoder = MajorityVote(9, answer=lambda text: text[:1])
        out = llm.generate("a", decoder=decoder, temperature=1.0, seed=2, max_tokens=4, n=9)
    firsts = [one.text[:1] for one in out.samples]
    assert len(set(firsts)) == len(firsts)
    assert sum(one.score or 0 for one in out.samples) == pytest.approx(1)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="answer is 'x'; it may be last-number"):
        MajorityVote(answer="x")
    with pytest.raises(InvalidRequestError, match="majority-vote: n is 0"):
        MajorityVote(0)
    with pytest.raises(InvalidRequestError, match="only the server's own options"):
        check_remote("majority-vote:weights=unit-test:file=x")
