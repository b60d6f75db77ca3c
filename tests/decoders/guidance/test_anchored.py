"""Anchored decoding: its certificate, mistakes that the certificate rejects, and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anydecode import LLM, Regex, catalogue
from anydecode.certification.checks import Restarts
from anydecode.certification.oracles.guidance.anchored import (
    byte_checks,
    copying_llm,
    mixture,
    piece_llm,
)
from anydecode.certification.oracles.scripted_rows import log_softmax
from anydecode.decoders.framework import byte_reader
from anydecode.decoders.guidance import anchored
from anydecode.decoders.guidance.anchored import (
    TOLERANCE,
    Account,
    divergence_from,
    shared,
    tilted,
)
from anydecode.errors import AnydecodeError, InvalidRequestError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer, PieceTokenizer, ScriptedModel
from anydecode.sampling.sampler import Sampler
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm, toy_llm


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("anchored")


def reverse_divergence(risky: np.ndarray, safe: np.ndarray, weight: float) -> tuple[float, float]:
    q = np.exp(log_softmax((1 - weight) * safe + weight * risky))
    s = log_softmax(safe)
    return float((np.exp(s) * (s - np.log(q))).sum()), 0.0


TILTED = tilted
MISTAKES: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "a cap per token": lambda r, s, budget: TILTED(r, s, min(budget, 0.3)),
    "half of the budget": lambda r, s, budget: TILTED(r, s, budget / 2),
    "the safe model alone": lambda r, s, budget: s,
}
CHARGES: dict[str, Callable[[Account, float], Account]] = {
    "nothing is spent": lambda account, divergence: account,
    "twice is spent": lambda account, divergence: Account(
        account.debt, account.spent + 2 * divergence
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_certificate_rejects_another_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(anchored, "tilted", MISTAKES[name])
    assert_rejected("anchored")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHARGES)
def test_certificate_rejects_another_account(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Account, "charged", CHARGES[name])
    assert_rejected("anchored")


@pytest.mark.parametrize("name", ["unwritten tokens", "a debt in bytes"])
def test_certificate_rejects_other_bytes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "unwritten tokens":
        monkeypatch.setattr(byte_reader, "is_written", lambda *given: True)
    else:
        monkeypatch.setattr(anchored, "BYTES_PER_TOKEN", 1)
    assert not all(check.passed for check in byte_checks())


def test_a_mixture_beyond_its_budget_is_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the divergence in the other direction, the solver returns such mixtures."""
    monkeypatch.setattr(anchored, "_divergence", reverse_divergence)
    with copying_llm() as llm, pytest.raises(AnydecodeError, match="of its budget of"):
        llm.generate([1, 2], decoder="anchored", temperature=1.0, max_tokens=40, seed=1)


@pytest.mark.slow
def test_certificate_rejects_a_prompt_without_debt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchored, "NUM_DEBTS", 1)
    assert_rejected("anchored")


@pytest.mark.slow
def test_certificate_rejects_another_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "anchored", budget=0.2)
    assert_rejected("anchored")


def test_mixtures_meet_the_budget_for_random_models() -> None:
    random = np.random.default_rng(2)
    for _ in range(300):
        risky, safe = random.normal(scale=random.uniform(0.1, 8), size=(2, 40))
        budget = float(random.exponential(0.5))
        scores = tilted(risky, safe, budget)
        divergence = divergence_from(safe, scores)
        expected, most = mixture(log_softmax(risky), log_softmax(safe), budget)
        q, s = log_softmax(scores), log_softmax(safe)
        measured = float(np.exp(q) @ (q - s))
        assert divergence <= budget + TOLERANCE and measured == pytest.approx(divergence, abs=1e-9)
        assert measured == pytest.approx(most, abs=2e-4)
        assert np.abs(np.exp(q) - expected).max() < 1e-3


def test_both_ends_are_the_models() -> None:
    """With the random numbers of plain decoding."""
    models = ScriptedModel(seed=3), ScriptedModel(seed=4)
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.8, "seed": 2}
    with LLM(models[0], tokenizer=ByteTokenizer(), draft=models[1]) as llm:
        found = [
            llm.generate("abc", decoder=f"anchored:budget={budget}", **options).tokens
            for budget in (1000, 0)
        ]
    for model, tokens in zip(models, found, strict=True):
        with LLM(model, tokenizer=ByteTokenizer()) as llm:
            assert llm.generate("abc", **options).tokens == tokens


def test_tokens_that_one_model_excludes_are_excluded() -> None:
    risky = np.array([0.0, 1.0, -np.inf, 2.0, 5.0], np.float32)
    safe = np.array([0.0, -np.inf, 1.0, 2.0], np.float32)
    tokens, first, second = shared(Sampler(0.5), risky, safe)
    assert tokens.tolist() == [0, 3] and first.tolist() == second.tolist() == [0.0, 4.0]


def test_the_prompt_is_scored_once() -> None:
    with copying_llm() as llm:
        stats = llm.generate([1, 2, 3, 4, 5], decoder="anchored", max_tokens=6).stats
    assert stats.rows == 5 + 5


def test_constraints_and_log_probabilities() -> None:
    with letters_llm() as llm:
        answer = llm.generate(
            "a", decoder="anchored", constraint=Regex("(cat|dog)+"), logprobs=0, max_tokens=12,
            temperature=1.0, seed=2,
        )  # fmt: skip
    assert set(answer.text) <= set("catdog")
    assert len(answer.logprobs or ()) == len(answer.tokens) and None not in (answer.logprobs or ())


def test_truncations_and_guidance_are_refused() -> None:
    with toy_llm() as llm:
        for options, message in (
            ({"top_p": 0.9, "temperature": 1.0}, "would exceed its budget"),
            ({"guidance_scale": 2.0}, "guidance"),
        ):
            with pytest.raises(UnsupportedCombinationError, match=message):
                llm.generate("a", decoder="anchored", **options)  # type: ignore[arg-type]


def test_bytes_of_models_with_the_same_tokens_are_their_tokens() -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    models = ScriptedModel(seed=3), ScriptedModel(seed=4)
    with LLM(models[0], tokenizer=ByteTokenizer(), draft=models[1]) as llm:
        for budget in (0, 1000):
            first, second = (
                llm.generate(
                    "ab", decoder=f"anchored:unit={unit},budget={budget}",
                    constraint=Regex("[a-e]+"), **options,
                ).tokens
                for unit in ("token", "byte")
            )  # fmt: skip
            assert first == second


def test_bytes_after_a_restart() -> None:
    def texts(share: float) -> list[list[int]]:
        with piece_llm() as llm, Restarts(llm.engine, 3, share):
            found = llm.generate(
                ["b aab", "ab a"] * 3, decoder="anchored:unit=byte,budget=2", temperature=1.0,
                max_tokens=20, seed=4,
            )  # fmt: skip
        return [one.tokens for one in found]

    assert texts(0.3) == texts(0.0)


def test_models_with_other_tokens_need_bytes() -> None:
    with piece_llm() as llm, pytest.raises(UnsupportedCombinationError, match="vocabulary"):
        llm.generate("ab", decoder="anchored")
    draft = ScriptedModel(vocab_size=3, seed=2)
    draft.tokenizer = PieceTokenizer("a", "b")  # type: ignore[attr-defined]
    target = ScriptedModel(vocab_size=3, seed=1)
    with (
        LLM(target, tokenizer=PieceTokenizer("ab", "a"), draft=draft) as llm,
        pytest.raises(UnsupportedCombinationError, match="a token for each single byte"),
    ):
        llm.generate("ab", decoder="anchored:unit=byte")


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="budget of at least 0"):
        catalogue.build("anchored", budget=-1.0)
    with pytest.raises(InvalidRequestError, match="the unit token or byte"):
        catalogue.build("anchored", unit="word")
