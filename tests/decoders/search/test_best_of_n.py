"""Best-of-n: its certificate, mistakes that the certificate rejects, and failing rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from anydecode import JsonSchema, Regex
from anydecode.catalogue import check_remote
from anydecode.decoders.framework import rollouts
from anydecode.decoders.search import best_of_n
from anydecode.decoders.search.best_of_n import BestOfN
from anydecode.errors import (
    InvalidRequestError,
    OutOfMemoryError,
    RewardError,
    UnsupportedCombinationError,
)
from anydecode.rewards.programmatic import Likelihood
from anydecode.rewards.reward import FunctionReward
from certificates import assert_certified, assert_rejected, replace_defaults
from toy_models import letters_llm

OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 10}


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("best-of-n")


def test_certificate_rejects_more_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_defaults(monkeypatch, "best-of-n", n=16)
    assert_rejected("best-of-n")


def test_certificate_rejects_the_likelihood_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the division, short texts win."""
    monkeypatch.setattr(
        Likelihood, "values", lambda self, prompt, found: [one.logprob for one in found]
    )
    assert_rejected("best-of-n")


def test_certificate_rejects_texts_with_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "stream_id", lambda sample, fork, purpose: 0)
    assert_rejected("best-of-n")


@pytest.mark.slow
def test_certificate_rejects_the_last_of_equal_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(order: Any, key: Callable[[int], float]) -> list[int]:
        return sorted(reversed(list(order)), key=key)

    monkeypatch.setattr(best_of_n, "sorted", last, raising=False)
    assert_rejected("best-of-n")


def test_certificate_rejects_probabilities_at_the_temperature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = rollouts.log_probability
    monkeypatch.setattr(rollouts, "log_probability", lambda row, token: plain(row / 1.3, token))
    assert_rejected("best-of-n")


def _fill_memory(prompt: str, texts: list[str]) -> list[float]:
    raise MemoryError


def _divide(prompt: str, texts: list[str]) -> list[float]:
    return [1 / len("") for _ in texts]


@pytest.mark.parametrize(
    "reward, message",
    [
        (_divide, "the reward _divide failed: ZeroDivisionError"),
        (_fill_memory, "the reward _fill_memory failed: MemoryError$"),
        (lambda prompt, texts: [float("nan")] * len(texts), "returned nan; its values must be"),
        (lambda prompt, texts: [1.0], "returned 1 values for 4 texts"),
        (lambda prompt, texts: None, "returned None; it must return one number per text"),
        (lambda prompt, texts: ["x"] * 4, "it must return one number per text"),
        (
            FunctionReward(lambda prompt, texts: threading.Event().wait(60) and [], 0.05),
            "took longer than 0.2 seconds for 4 texts",
        ),
        (
            FunctionReward(lambda prompt, texts: [2.0] * 4, bounds=(0, 1)),
            "returned 2; its values must be from 0 to 1",
        ),
    ],
)
def test_a_failing_reward_is_one_line_and_frees_the_branches(reward: Any, message: str) -> None:
    with letters_llm() as llm:
        with pytest.raises(RewardError, match=message) as error:
            llm.generate("ab", decoder=BestOfN(4, reward), **OPTIONS)
        assert "\n" not in str(error.value)
        llm.engine.check_integrity()
        assert not llm.engine.has_work
        assert llm.generate("ab", decoder=BestOfN(4), **OPTIONS).text


def test_other_requests_run_while_a_reward_computes() -> None:
    others_done = threading.Event()
    reward = FunctionReward(
        lambda prompt, texts: [float(others_done.wait(30))] * len(texts), seconds=60
    )
    with letters_llm() as llm:
        slow = llm.request("ab", decoder=BestOfN(2, reward), **OPTIONS)
        llm.start(slow)
        fast = llm.generate("ab", decoder="autoregressive", **OPTIONS)
        assert len(fast.tokens) == 10 and not slow.done
        others_done.set()
        llm.driver.advance(lambda: slow.done)
        assert slow.generation().score == 1.0


def test_a_text_is_valued_once() -> None:
    seen: list[str] = []

    def length(prompt: str, texts: list[str]) -> list[float]:
        seen.extend(texts)
        return [float(len(text)) for text in texts]

    decoder = BestOfN(8, length)
    with letters_llm("ab") as llm:
        for _ in range(2):
            llm.generate("ab", decoder=decoder, temperature=1.0, seed=1, max_tokens=1)
    assert sorted(seen) == ["a", "b"]


def test_stop_strings_end_each_text() -> None:
    with letters_llm("ab ") as llm:
        options = {**OPTIONS, "n": 4, "stop": "a", "max_tokens": 20}
        texts = [
            {one.text for one in llm.generate("x", decoder=decoder, **options).samples}
            for decoder in ("autoregressive", "best-of-n:n=4")
        ]
    assert texts[0] == texts[1] and not any("a" in text for text in texts[1])


def test_log_probabilities_are_those_of_the_samples() -> None:
    with letters_llm() as llm:
        options = {**OPTIONS, "n": 3, "logprobs": 1}
        plain = llm.generate("ab", decoder="autoregressive", **options).samples
        found = llm.generate("ab", decoder="best-of-n:n=3", **options).samples
    by_tokens = {tuple(one.tokens): one.logprobs for one in plain}
    assert all(one.logprobs == by_tokens[tuple(one.tokens)] for one in found)


def test_the_prompt_and_equal_beginnings_are_computed_once() -> None:
    with letters_llm() as llm:
        prompt = "abcd " * 20
        stats = llm.generate(prompt, decoder="best-of-n:n=8", **OPTIONS).stats
        samples = llm.generate(prompt, n=8, decoder="autoregressive", **OPTIONS).samples
    beginnings = {tuple(one.tokens[:i]) for one in samples for i in range(1, 10)}
    assert (stats.rows, stats.passes) == (100 + len(beginnings), 10)
    assert len(beginnings) < 8 * 9


def test_a_constraint_bounds_every_text() -> None:
    with letters_llm() as llm:
        decoder = "best-of-n:reward=length"
        answer = llm.generate("a", decoder=decoder, constraint=Regex("cat|dog"), **OPTIONS)
        assert answer.text in ("cat", "dog")
        schema = JsonSchema({"type": "array", "uniqueItems": True})  # checked as values close
        with pytest.raises(UnsupportedCombinationError, match="samples several texts"):
            llm.generate("a", decoder=decoder, constraint=schema, **OPTIONS)


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_invalid_counts_are_refused(n: int) -> None:
    with pytest.raises(InvalidRequestError, match="best-of-n: n is"):
        BestOfN(n)


def test_memory_that_is_too_small_is_one_line() -> None:
    with letters_llm(cache_positions=64) as llm:
        with pytest.raises(OutOfMemoryError, match="and its 16 branches; increase cache_positions"):
            llm.generate("a", decoder="best-of-n:n=16", temperature=1.0, seed=1, max_tokens=32)
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    "choice, message",
    [
        ("best-of-n:n=99", "n is 99"),
        ("best-of-n:reward=unit-test:file=x", "only the server's own options"),
        ("best-of-n:reward=keywords:word=x", "may set words, not 'word'"),
        ("best-of-n:reward=length:max_words=0", "max_words is 0.0"),
        ("best-of-n:reward=nonsense", "no reward is called 'nonsense'"),
        ("best-of-n:reward=" + "x" * 300, "reward is"),
    ],
)
def test_requests_to_a_server_may_not_name_every_reward(choice: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_remote(choice)


@pytest.mark.parametrize("reward", ["likelihood", "length:max_words=9", "keywords:words=cat dog"])
def test_requests_to_a_server_may_name_cheap_rewards(reward: str) -> None:
    check_remote(f"best-of-n:n=4,reward={reward}")
