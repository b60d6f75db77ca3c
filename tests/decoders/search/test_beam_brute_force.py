"""Beam search against all texts of a model that is small enough to enumerate them.

Token 3 ends a text, so many texts end before the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from anydecode.api.generation import Generation
from anydecode.api.llm import LLM
from anydecode.decoders.search.beam import Beam
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

VOCABULARY, END, LIMIT = 4, 3, 6
PROMPT = (0, 1)
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
SEEDS = range(12)

Text = tuple[int, ...]
Logits = Callable[[Text], np.ndarray]


class Tokenizer(ByteTokenizer):
    vocab_size = VOCABULARY
    eos_ids = frozenset({END})


def random_logits(seed: int) -> Logits:
    """Logits that depend on the whole text."""

    def logits(path: Text) -> np.ndarray:
        return 1.5 * np.random.default_rng([seed, *path]).normal(size=VOCABULARY)

    return logits


def logprobs(logits: Logits, text: Text) -> np.ndarray:
    values = logits((*PROMPT, *text))
    result: np.ndarray = values - np.log(np.exp(values).sum())
    return result


@dataclass(frozen=True)
class Hypothesis:
    text: Text
    total: float

    @property
    def is_whole(self) -> bool:
        """Whether nothing may follow."""
        return self.text[-1:] == (END,) or len(self.text) == LIMIT

    def score(self, penalty: float) -> float:
        return self.total / len(self.text) ** penalty


def continuations(logits: Logits, one: Hypothesis) -> Iterator[Hypothesis]:
    for token, logprob in enumerate(logprobs(logits, one.text)):
        yield Hypothesis((*one.text, token), one.total + float(logprob))


def all_texts(logits: Logits, start: Hypothesis = Hypothesis((), 0.0)) -> Iterator[Hypothesis]:
    for one in continuations(logits, start):
        if one.is_whole:
            yield one
        else:
            yield from all_texts(logits, one)


def best_text(texts: list[Hypothesis], penalty: float) -> Text:
    return max(texts, key=lambda one: one.score(penalty)).text


def pruned_texts(logits: Logits, width: int) -> list[Hypothesis]:
    """The whole texts that a beam of `width` meets if it goes on up to the limit. A text that ends
    counts only if it is among the `width` best continuations of its length."""
    live, found = [Hypothesis((), 0.0)], []
    while live:
        following = [one for parent in live for one in continuations(logits, parent)]
        following.sort(key=lambda one: -one.total)
        found += [one for one in following[:width] if one.is_whole]
        live = [one for one in following if not one.is_whole][:width]
    return found


def searched(logits: Logits, decoder: Beam, limit: int = LIMIT) -> Generation:
    model = ScriptedModel(logits, vocab_size=VOCABULARY)
    with LLM(model, tokenizer=Tokenizer(), cache_positions=8192) as llm:
        return llm.generate(list(PROMPT), decoder=decoder, max_tokens=limit)


@pytest.mark.slow
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_beam_that_drops_nothing_finds_the_best_of_all_texts(penalty: float) -> None:
    ended = 0
    for seed in SEEDS:
        logits = random_logits(seed)
        best = best_text(list(all_texts(logits)), penalty)
        answer = searched(logits, Beam((VOCABULARY - 1) ** LIMIT, penalty))
        assert answer.tokens == list(best)
        assert answer.finish_reason == ("stop" if best[-1] == END else "length")
        ended += len(best) < LIMIT
    assert ended


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_narrow_beam_stops_only_when_nothing_better_can_follow(penalty: float) -> None:
    stopped = 0
    for seed in SEEDS:
        logits = random_logits(seed)
        for width in (1, 2, 3):
            expected = best_text(pruned_texts(logits, width), penalty)
            answer = searched(logits, Beam(width, penalty))
            assert answer.tokens == list(expected), (seed, width)
            stopped += answer.stats.passes < LIMIT
    assert stopped or penalty > 1  # a long text may be better than any that has ended


@pytest.mark.parametrize("penalty", PENALTIES)
def test_an_early_stop_returns_a_text_that_has_ended(penalty: float) -> None:
    """The search stops at the first length at which `width` texts have ended. The live hypotheses
    are not texts yet."""
    for seed in SEEDS:
        logits = random_logits(seed)
        for width in (1, 2, 3):
            texts = pruned_texts(logits, width)
            lengths = sorted(len(one.text) for one in texts if one.text[-1] == END)
            last = lengths[width - 1] if len(lengths) >= width else LIMIT
            expected = best_text([one for one in texts if len(one.text) <= last], penalty)
            answer = searched(logits, Beam(width, penalty, early=True))
            assert answer.tokens == list(expected), (seed, width)
            assert answer.stats.passes == last


def test_a_negative_penalty_bounds_a_score_by_the_present_length() -> None:
    """The best text has three tokens: 3 * log(0.7 * 0.97 * 0.98) is above log(0.29). Two others
    have ended before, and its score would be below both if it went on up to the limit."""
    chances = {0: {0: 0.7, END: 0.29}, 1: {0: 0.97, END: 0.02}, 2: {END: 0.98, 0: 0.01}}

    def logits(path: Text) -> np.ndarray:
        values = np.full(VOCABULARY, 0.005)
        for token, chance in chances.get(len(path) - len(PROMPT), {0: 0.99}).items():
            values[token] = chance
        return np.log(values)

    assert searched(logits, Beam(2, -1.0), limit=40).tokens == [0, 0, END]
