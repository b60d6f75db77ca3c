"""Samplers against enumeration, brute force and their papers' formulas."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling import truncation, typical
from anydecode.sampling.banned_words import BannedWords, BannedWordTable
from anydecode.sampling.bias import LogitBias, MinimumLength, NoRepeatNgram
from anydecode.sampling.candidates import Candidates, Distribution, largest
from anydecode.sampling.constrained import Constrained
from anydecode.sampling.dola import DoLa
from anydecode.sampling.dry import Dry
from anydecode.sampling.eta import Eta
from anydecode.sampling.guidance import Guidance
from anydecode.sampling.logprobs import distribution_logprobs, token_logprobs
from anydecode.sampling.min_p import MinP
from anydecode.sampling.mirostat import Mirostat, MirostatZipf
from anydecode.sampling.momentum import Momentum
from anydecode.sampling.noise import Noise
from anydecode.sampling.params import SamplingParams
from anydecode.sampling.penalties import CountPenalty, RepetitionPenalty
from anydecode.sampling.processor import LogitsProcessor
from anydecode.sampling.sampler import Sampler
from anydecode.sampling.top_n_sigma import TopNSigma
from anydecode.sampling.top_w import Geometry, TopW, best_set
from anydecode.sampling.truncation import Epsilon, TopK, TopP
from anydecode.sampling.typical import Typical
from anydecode.sampling.xtc import ExcludeTopChoices

NOISE = Noise(2024)


def locked(values) -> np.ndarray:
    """A row that raises when it is written to."""
    row = np.array(values, np.float32)
    row.flags.writeable = False
    return row


def random_row(seed: int, size: int, scale: float = 2.0) -> np.ndarray:
    return locked(np.random.default_rng(seed).normal(0, scale, size))


def softmax(scores) -> np.ndarray:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return weights / weights.sum()


def kept_by(rule: LogitsProcessor, row) -> list[int]:
    kept = Sampler(1.0, post_temperature=[rule]).distribution(locked(row)).tokens
    return list(range(len(row))) if kept is None else kept.tolist()


# Rows with many ties: scores are multiples of a half.
tied_rows = st.lists(st.integers(-8, 8), min_size=1, max_size=30).map(
    lambda values: [value / 2 for value in values]
)


def chi_square(counts: Counter[int], p: np.ndarray, draws: int) -> float:
    possible = np.flatnonzero(p > 0)
    assert set(counts) <= set(possible.tolist())
    return sum((counts[t] - draws * p[t]) ** 2 / (draws * p[t]) for t in possible.tolist())


DRAWS = 2000
LIMIT_11 = 31.26  # chi-square, 11 degrees of freedom, exceeded once in 1000


class TestSample:
    row = random_row(1, 12, 1.0)

    def frequencies(self, sampler: Sampler) -> Counter[int]:
        return Counter(sampler.sample(self.row, NOISE, position) for position in range(DRAWS))

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_frequencies_follow_the_probabilities(self, temperature):
        counts = self.frequencies(Sampler(temperature))
        p = softmax(self.row / temperature)
        assert chi_square(counts, p, DRAWS) < LIMIT_11
        assert chi_square(counts, softmax(self.row / (1.5 * temperature)), DRAWS) > LIMIT_11

    def test_truncated_frequencies_follow_the_distribution(self):
        sampler = Sampler(0.9, [LogitBias({3: 1.0})], [TopK(6), ExcludeTopChoices(0.5, 0.2)])
        p = sampler.distribution(self.row).dense(12)
        assert (p > 0).sum() == 6
        assert chi_square(self.frequencies(sampler), p, DRAWS) < 20.52  # 5 degrees

    def test_further_attempts_follow_the_same_distribution(self):
        sampler = Sampler(1.0)
        counts = Counter(sampler.sample(self.row, NOISE, 3, attempt) for attempt in range(DRAWS))
        assert chi_square(counts, softmax(self.row), DRAWS) < LIMIT_11

    @pytest.mark.parametrize("size", [5, 256, 257, 3000])
    def test_sample_is_the_argmax_of_score_plus_noise(self, size):
        sampler, differs = Sampler(0.8), 0
        for seed in range(60):
            row = random_row(seed, size, 1 + seed / 20)
            noise = NOISE.gumbel(range(size), seed)
            token = sampler.sample(row, NOISE, seed)
            assert token == (row.astype(np.float64) / 0.8 + noise).argmax()
            drawn = sampler.distribution(row)
            assert drawn.sample(NOISE, seed) == (drawn.scores + noise).argmax()
            differs += token != (row / 0.8 + NOISE.gumbel(range(size), seed + 1)).argmax()
        assert differs > 10

    def test_a_mask_does_not_shift_the_noise_of_other_tokens(self):
        row = random_row(3, 400, 0.5)
        allowed = np.arange(0, 400, 3)
        masked = Sampler(1.0, [Constrained(Allow(allowed))])
        same, shifted = 0, 0
        for position in range(200):
            keys = row + NOISE.gumbel(range(400), position)
            token = masked.sample(row, NOISE, position)
            assert token == allowed[keys[allowed].argmax()]
            free = Sampler(1.0).sample(row, NOISE, position)
            same += free in allowed and free == token
            by_place = row[allowed] + NOISE.gumbel(range(len(allowed)), position)
            shifted += allowed[by_place.argmax()] != token
        assert same > 30 and shifted > 100

    def test_ties_go_to_the_lowest_id(self):
        row = locked([0, 2, 1, 2, 2])
        assert Sampler(0).sample(row, NOISE, 0) == 1
        banned = Sampler(0, [LogitBias({1: -math.inf})])
        assert banned.sample(row, NOISE, 0) == 3
        flat = Distribution(np.array([4, 7, 9], np.int32), np.zeros(3, np.float32))

        class Silent(Noise):
            def uniform(self, tokens, position, attempt=0):
                return np.full(len(tokens), 0.5)

        assert flat.sample(Silent(0), 0) == 4
        assert Distribution(None, np.zeros(600)).sample(Silent(0), 0) == 0

    def test_greedy_needs_no_noise_and_equals_a_low_temperature(self):
        for seed in range(20):
            row = random_row(seed, 50)
            assert Sampler(0).sample(row, NOISE, seed) == Sampler(1e-4).sample(row, NOISE, seed)
        assert Sampler(0).distribution(row).dense(50).max() == 1

    def test_forbidding_all_tokens_is_an_error(self):
        for temperature in (0, 1):
            sampler = Sampler(temperature, [LogitBias(dict.fromkeys(range(4), -math.inf))])
            with pytest.raises(ConstraintError, match="no token is allowed"):
                sampler.sample(locked([1, 2, 3, 4]), NOISE, 0)


class Allow:
    """A constraint that always allows the same tokens."""

    def __init__(self, ids) -> None:
        self.ids = np.asarray(ids)
        self.generated: list[int] = []

    def mask(self) -> np.ndarray:
        return self.ids

    def advance(self, token: int) -> None:
        self.generated.append(token)

    def fork(self) -> Allow:
        branch = Allow(self.ids)
        branch.generated = list(self.generated)
        return branch


def by_falling_score(scores) -> list[int]:
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def shortest_run(order: list[int], p: np.ndarray, mass: float) -> list[int]:
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += p[token]
        if total >= mass - 1e-9:
            break
    return sorted(kept)


class TestTruncation:
    @given(tied_rows, st.integers(1, 31))
    def test_top_k(self, row, k):
        assert kept_by(TopK(k), row) == sorted(by_falling_score(row)[:k])

    @given(tied_rows, st.sampled_from([0.01, 0.31, 0.5, 0.77, 0.9, 0.999]))
    def test_top_p(self, row, mass):
        p = softmax(row)
        kept = kept_by(TopP(mass), row)
        expected = shortest_run(by_falling_score(row), p, mass)
        # If the mass is reached up to rounding, one more token may be kept.
        assert kept == expected or (
            p[expected].sum() - mass < 1e-6 and len(kept) == len(expected) + 1
        )

    def test_top_p_takes_the_lowest_ids_of_a_tie(self):
        assert kept_by(TopP(0.5), [1, 1, 1, 1]) == [0, 1]
        assert kept_by(TopP(0.51), [1, 1, 1, 1]) == [0, 1, 2]
        assert kept_by(TopP(0.6), [0, 5, 5, 0, 5]) == [1, 2]
        assert kept_by(TopP(0.6), [0, 5, 5, 0, 5]) != [2, 4]

    @pytest.mark.parametrize("scale", [0.05, 0.5, 3.0, 40.0])
    @pytest.mark.parametrize("mass", [0.1, 0.9, 0.9999])
    def test_top_p_on_large_rows(self, scale, mass):
        row = random_row(5, 20_000, scale)
        p = softmax(row)
        order = np.lexsort((np.arange(len(row)), -row))
        count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
        kept = kept_by(TopP(mass), row)
        assert abs(len(kept) - count) <= 1 + 1e-3 * count
        assert kept == sorted(order[: len(kept)].tolist())

    @given(tied_rows, st.sampled_from([0.05, 0.3, 0.7, 1.0]))
    def test_min_p(self, row, min_p):
        p = softmax(row)
        assert kept_by(MinP(min_p), row) == np.flatnonzero(p >= min_p * p.max() - 1e-9).tolist()

    @given(tied_rows, st.sampled_from([0.2, 0.55, 0.9]))
    def test_typical(self, row, mass):
        p = softmax(row)
        entropy = -(p * np.log(p)).sum()
        off = np.round(np.abs(-np.log(p) - entropy), 5)
        kept = kept_by(Typical(mass), row)
        assert p[kept].sum() >= mass - 1e-5
        assert p[kept].sum() - p[kept][off[kept] == off[kept].max()].max() < mass + 1e-5
        others = np.delete(off, kept)
        assert not len(others) or off[kept].max() <= others.min() + 1e-5

    @pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
    @pytest.mark.parametrize("rule", [TopP, Typical])
    def test_considering_a_part_first_does_not_change_the_result(self, rule, scale, monkeypatch):
        row = random_row(6, 5000, scale)
        quick = [kept_by(rule(mass), row) for mass in (0.2, 0.7, 0.95, 0.999)]
        monkeypatch.setattr(truncation, "_NEAR", 0.0)
        monkeypatch.setattr(typical, "_CLOSE", math.inf)
        assert quick == [kept_by(rule(mass), row) for mass in (0.2, 0.7, 0.95, 0.999)]

    @given(tied_rows, st.sampled_from([1e-3, 0.041, 0.3]))
    def test_epsilon_and_eta(self, row, epsilon):
        p = softmax(row)
        best = p.max() - 1e-7
        bound = min(epsilon, best)
        assert kept_by(Epsilon(epsilon), row) == np.flatnonzero(p >= bound - 1e-7).tolist()
        entropy = -(p * np.log(p)).sum()
        bound = min(epsilon, math.sqrt(epsilon) * math.exp(-entropy), best)
        assert kept_by(Eta(epsilon), row) == np.flatnonzero(p >= bound - 1e-7).tolist()

    def test_top_n_sigma(self):
        row = [0.0, 1, 2, 3, 10]
        bound = 10 - 1.0 * np.std(row)
        assert kept_by(TopNSigma(1.0), row) == [4] and bound > 3
        assert kept_by(TopNSigma(2.1), row) == [3, 4]
        hot = Sampler(5.0, post_temperature=[TopNSigma(2.1)]).distribution(locked(row))
        assert hot.tokens.tolist() == [3, 4]  # the temperature has no effect
        masked = Sampler(1.0, [LogitBias({4: -math.inf})], [TopNSigma(1.0)])
        assert masked.distribution(locked(row)).tokens.tolist() == [2, 3]  # nor have banned tokens

    @pytest.mark.parametrize(
        "rule",
        [TopK(1), TopP(1e-9), MinP(1.0), Typical(1e-9), Epsilon(0.99), Eta(0.99), TopNSigma(1e-9)],
    )
    @pytest.mark.parametrize("row", [[3.0], [0, 0, 0], [-50, 50], [-1e30, -1e30]])
    def test_one_token_is_always_kept(self, rule, row):
        assert len(kept_by(rule, row)) >= 1

    @given(tied_rows, st.integers(1, 30))
    def test_largest(self, row, count):
        assert largest(np.array(row), count).tolist() == sorted(by_falling_score(row)[:count])

    @pytest.mark.parametrize("probability", [0.3, 1.0])
    def test_xtc_is_the_mixture_of_both_outcomes(self, probability):
        row = np.log([0.4, 0.05, 0.25, 0.2, 0.1])
        sampler = Sampler(1.0, post_temperature=[ExcludeTopChoices(probability, 0.15)])
        p = softmax(row)
        without = p.copy()
        without[[0, 2]] = 0  # 0.2 is the least likely of the top choices and is kept
        mixture = (1 - probability) * p + probability * without / without.sum()
        np.testing.assert_allclose(sampler.distribution(locked(row)).dense(5), mixture, atol=1e-6)
        without[3] = 0
        wrong = (1 - probability) * p + probability * without / without.sum()
        assert np.abs(sampler.distribution(locked(row)).dense(5) - wrong).max() > 0.05

    def test_xtc_keeps_a_single_top_choice(self):
        row = np.log([0.8, 0.1, 0.1])
        assert kept_by(ExcludeTopChoices(1.0, 0.5), row) == [0, 1, 2]


texts = st.lists(st.integers(0, 5), max_size=14)


class TestPenalties:
    @given(texts, texts)
    def test_repetition_presence_and_frequency(self, prompt, generated):
        row = random_row(len(generated), 6)
        sampler = Sampler(1.0, [RepetitionPenalty(1.5, prompt), CountPenalty(0.25, 0.5)])
        for token in generated:
            sampler.advance(token)
        expected = row.astype(np.float64)
        for token in set(prompt + generated):
            expected[token] *= 1.5 if expected[token] <= 0 else 1 / 1.5
        for token, count in Counter(generated).items():
            expected[token] -= 0.25 + 0.5 * count
        p = sampler.distribution(row).dense(6)
        np.testing.assert_allclose(p, softmax(expected), atol=1e-6)

    def test_the_prompt_counts_for_repetition_only(self):
        row = locked([1, 1])
        both = Sampler(1.0, [CountPenalty(1, 1)]).distribution(row).dense(2)
        assert both[0] == both[1]
        first = Sampler(1.0, [RepetitionPenalty(2, [0])]).distribution(row).dense(2)
        assert first[0] < first[1]

    @given(texts, st.integers(1, 3), st.integers(1, 4))
    @settings(max_examples=150)
    def test_dry_equals_a_quadratic_search(self, text, allowed, breaker):
        rule = Dry(0.5, 1.5, allowed, [breaker], text)
        row = rule.apply(Candidates(None, locked(np.zeros(6)))).scores
        for token in range(6):
            longest = 0
            for end in range(len(text) - 1):
                if text[end + 1] != token:
                    continue
                length = 0
                while (
                    length <= end and text[end - length] == text[len(text) - 1 - length] != breaker
                ):
                    length += 1
                longest = max(longest, length)
            penalised = longest >= allowed and token != breaker
            expected = -0.5 * 1.5 ** (longest - allowed) if penalised else 0
            assert row[token] == np.float32(expected)

    def test_dry_stays_finite_on_long_repeats(self):
        rule = Dry(5.0, 3.0, 1, (), [1] * 3000)
        assert np.isfinite(rule.apply(Candidates(None, locked(np.zeros(3)))).scores).all()

    @given(texts, st.integers(1, 4))
    def test_no_repeat_ngram(self, text, size):
        rule = NoRepeatNgram(size, text[:3])
        for token in text[3:]:
            rule.advance(token)
        scores = rule.apply(Candidates(None, locked(np.zeros(6)))).scores
        ngrams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
        start = tuple(text[len(text) - size + 1 :]) if size > 1 else ()
        for token in range(6):
            seen = len(text) >= size - 1 and (*start, token) in ngrams
            assert (scores[token] == -math.inf) == seen

    def test_banned_words(self):
        sampler = Sampler(0, [BannedWords([(3,), (1, 2), (0, 1, 0)], prompt=[5, 1])])
        row = locked([1, 0, 2, 3, 0, 0])
        assert sampler.sample(row, NOISE, 0) == 0  # 3 is banned, 2 would complete (1, 2)
        sampler.advance(0)
        assert sampler.sample(row, NOISE, 0) == 2
        sampler.advance(1)
        assert sampler.sample(row, NOISE, 0) == 4 or sampler.sample(row, NOISE, 0) == 1
        assert Sampler(0, [BannedWords([(3,)])]).sample(row, NOISE, 0) == 2

    @given(texts, st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    def test_a_word_is_banned_exactly_where_it_would_end(self, text, words):
        rule = BannedWords(words, text[:3])
        for token in text[3:]:
            rule.fork().advance(5 - token)
            rule.advance(token)
        scores = rule.apply(Candidates(None, locked(np.zeros(6)))).scores
        for token in range(6):
            longer = [*text, token]
            ends = any(longer[len(longer) - len(word) :] == word for word in words)
            assert (scores[token] == -math.inf) == ends

    @given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4)))
    def test_a_table_of_words_has_each_once(self, words):
        table = BannedWordTable(words)
        assert sorted(table) == sorted(map(list, {tuple(word) for word in words}))
        assert table[1:] == list(table)[1:] and pickle.loads(pickle.dumps(table)) == table
        assert table == BannedWordTable(words[::-1]) and table != BannedWordTable([*words, [999]])
        everything = [token for word in words for token in word]
        assert table.ids == ((min(everything), max(everything)) if words else ())

    def test_words_that_end_within_each_other(self):
        words = [[1] * length + [length] for length in range(1, 400)]
        table = BannedWordTable([*words, *([2, token, 3] for token in range(500))])
        assert table.next_banned(np.array([2, 77])).tolist() == [3]
        assert table.next_banned(np.ones(100, np.int32)).tolist() == list(range(1, 101))
        assert table.next_banned(np.array([0])).tolist() == []

    def test_the_samples_of_a_request_share_the_words(self):
        params = SamplingParams(banned_words=[(3,), (1, 2)])
        assert replace(params, n=2).banned_words is params.banned_words
        assert SamplingParams(banned_words=[[1, 2], [3]]) == params != SamplingParams()
        with pytest.raises(InvalidRequestError, match="32 bits"):
            SamplingParams(banned_words=[[1 << 40]])

    def test_minimum_length(self):
        sampler = Sampler(0, [MinimumLength(2, {1})])
        row, sampled = locked([0, 5, 1]), []
        for position in range(3):
            sampled.append(sampler.sample(row, NOISE, position))
            sampler.advance(sampled[-1])
        assert sampled == [2, 2, 1]

    def test_bias(self):
        row = locked([0, 1, 2])
        p = Sampler(1.0, [LogitBias({0: 2.5, 2: -1})]).distribution(row).dense(3)
        np.testing.assert_allclose(p, softmax([2.5, 1, 1]), atol=1e-6)


class TestConstraint:
    @pytest.mark.parametrize("boolean", [False, True])
    def test_masking_renormalises(self, boolean):
        row, ids = random_row(2, 9), np.array([1, 4, 8])
        mask = np.isin(np.arange(9), ids) if boolean else ids
        p = softmax(row)
        expected = np.where(np.isin(np.arange(9), ids), p, 0) / p[ids].sum()
        found = Sampler(1.0, [Constrained(Allow(mask))]).distribution(row).dense(9)
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_truncation_comes_after_the_mask(self):
        row = locked([9, 8, 1, 0])
        sampler = Sampler(1.0, [Constrained(Allow([2, 3]))], [TopK(1)])
        assert sampler.distribution(row).tokens.tolist() == [2]

    def test_an_empty_mask_is_an_error(self):
        for ids in (np.zeros(3, bool), np.array([], np.int32)):
            with pytest.raises(ConstraintError, match="allows none"):
                Sampler(0, [Constrained(Allow(ids))]).sample(locked([1, 2, 3]), NOISE, 0)

    def test_it_is_advanced_and_forked(self):
        sampler = Sampler(0, [Constrained(Allow([0, 1]))])
        sampler.advance(1)
        branch = sampler.fork()
        branch.advance(0)
        assert sampler.pre_temperature[0].state.generated == [1]
        assert branch.pre_temperature[0].state.generated == [1, 0]


EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=12,
    top_p=0.95,
    min_p=0.01,
    typical_p=0.98,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
    dry_multiplier=0.5,
    logit_bias={2: 1.5, 3: -math.inf},
    banned_words=[(4,), (1, 2)],
    no_repeat_ngram=3,
    min_tokens=3,
    top_n_sigma=3.0,
    xtc_probability=0.4,
)
STATEFUL = {
    "everything": EVERYTHING,
    "mirostat 2": SamplingParams(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5),
    "mirostat 1": SamplingParams(mirostat=1, mirostat_tau=2.0, mirostat_eta=0.5),
    "momentum": SamplingParams(temperature=0, momentum_alpha=0.2),
}


class TestForks:
    @pytest.mark.parametrize("name", STATEFUL)
    @given(st.data())
    @settings(max_examples=25, deadline=None)
    def test_a_branch_equals_a_sampler_advanced_by_its_tokens(self, name, data):
        prompt = [1, 2, 3, 1]
        branches = [(STATEFUL[name].sampler(prompt, 16, [0]), [])]
        for _ in range(data.draw(st.integers(1, 14))):
            sampler, generated = data.draw(st.sampled_from(branches))
            sampler.distribution(random_row(len(generated), 16))
            if data.draw(st.booleans()):
                sampler, generated = sampler.fork(), list(generated)
                branches.append((sampler, generated))
            token = data.draw(st.integers(5, 15))
            sampler.advance(token)
            generated.append(token)
        for sampler, generated in branches:
            fresh = STATEFUL[name].sampler(prompt, 16, [0])
            for at, token in enumerate(generated):
                fresh.distribution(random_row(at, 16))
                fresh.advance(token)
            row = random_row(99, 16)
            np.testing.assert_array_equal(
                sampler.distribution(row).dense(16), fresh.distribution(row).dense(16)
            )

    @pytest.mark.parametrize("name", STATEFUL)
    def test_state_survives_pickling(self, name):
        sampler = STATEFUL[name].sampler([1, 2, 1], 16, [0])
        for position in range(4):
            sampler.distribution(random_row(position, 16))
            sampler.advance(5 + position % 2)
        copy = pickle.loads(pickle.dumps(sampler))
        for subject in (sampler, copy):
            subject.distribution(random_row(4, 16))
            subject.advance(6)
        row = random_row(5, 16)
        np.testing.assert_array_equal(
            copy.distribution(row).dense(16), sampler.distribution(row).dense(16)
        )

    def test_shared_state_is_detected(self):
        sampler = STATEFUL["everything"].sampler([1], 16, [0])
        branch = sampler.fork()
        before = sampler.distribution(random_row(1, 16)).dense(16)
        branch.advance(9)
        branch.advance(9)
        np.testing.assert_array_equal(sampler.distribution(random_row(1, 16)).dense(16), before)
        assert not np.array_equal(branch.distribution(random_row(1, 16)).dense(16), before)

    def test_a_fork_of_a_stateless_sampler_is_itself(self):
        sampler = SamplingParams(top_p=0.9, logit_bias={1: 1.0}).sampler([], 4)
        assert not sampler.is_stateful and sampler.fork() is sampler
        assert EVERYTHING.sampler([], 16).is_stateful


def surprises(sampler: Sampler, seed: int, length: int) -> np.ndarray:
    """Bits per token of a text sampled by `sampler` from Zipf rows that flatten along the text."""
    rng = np.random.default_rng(seed)
    bits = np.empty(length)
    ranks = np.log(np.arange(1, 201))
    for position in range(length):
        row = locked(-rng.permutation(ranks) * (1.4 - 0.35 * position / length))
        token = sampler.sample(row, NOISE, position)
        sampler.advance(token)
        bits[position] = -math.log2(softmax(row)[token])
    return bits


class TestMirostat:
    @pytest.mark.parametrize("kind", [Mirostat, MirostatZipf])
    def test_surprise_stays_at_the_target(self, kind):
        surprise = surprises(Sampler(1.0, post_temperature=[kind(3.0, 0.1)]), 0, 2000)
        assert abs(surprise.mean() - 3.0) < 0.05 * 3.0
        assert abs(surprise[1500:].mean() - surprise[:500].mean()) < 0.2

    def test_top_p_drifts_on_the_same_rows(self):
        free = surprises(Sampler(1.0, post_temperature=[TopP(0.6)]), 0, 2000)
        assert free[1500:].mean() - free[:500].mean() > 1

    def test_version_2_by_hand(self):
        rule = Mirostat(target=1.0, rate=0.5)
        sampler = Sampler(1.0, post_temperature=[rule])
        row = locked(np.log([0.5, 0.25, 0.15, 0.1]))  # 1, 2, 2.7 and 3.3 bits; mu is 2
        assert sampler.distribution(row).tokens.tolist() == [0, 1]
        sampler.advance(0)
        assert rule.mu == pytest.approx(2.0)
        sampler.distribution(row)
        sampler.advance(1)
        assert rule.mu == pytest.approx(1.5)
        assert sampler.distribution(row).tokens.tolist() == [0]
        sampler.advance(3)  # a dropped token still counts with its own surprise
        assert rule.mu == pytest.approx(1.5 - 0.5 * (math.log2(10) - 1))

    def test_version_1_by_hand(self):
        p = np.arange(1, 51) ** -1.3
        row = locked(np.log(p / p.sum()))
        rule = MirostatZipf(target=2.0)
        expected = (0.3 * 2**4 / (1 - 50**-0.3)) ** (1 / 1.3)
        kept = Sampler(1.0, post_temperature=[rule]).distribution(row).tokens
        assert len(kept) == round(expected)
        flat = Sampler(1.0, post_temperature=[MirostatZipf(2.0)]).distribution(locked(np.zeros(50)))
        assert len(flat) == 50

    def test_it_does_not_learn_from_tokens_without_a_distribution(self):
        rule = Mirostat(3.0)
        rule.advance(1)
        assert rule.mu == 6.0

    def test_an_unreachable_target_does_not_wind_up(self):
        rule = Mirostat(3.0, rate=1.0)
        sampler = Sampler(1.0, post_temperature=[rule])
        for _ in range(30):
            sampler.distribution(locked([30, 0, 0]))
            sampler.advance(0)
        assert rule.mu == 12.0


class TestOthers:
    def test_momentum_by_hand(self):
        rule = Momentum(0.2, k=3, prompt=[7, 1, 2, 7, 1])
        assert [rule.depth(token) for token in (0, 1, 2, 7)] == [0, 1, 3, 1]
        row = locked(np.log([0.2, 0.05, 0.5, 0.01, 0.01, 0.01, 0.01, 0.21]))
        # 2: .5 - .2 * 3; 7: .21 - .2; 0: .2
        assert Sampler(0, [rule]).sample(row, NOISE, 0) == 0
        assert Sampler(1.0, [rule]).distribution(row).tokens.tolist() == [0]
        assert Sampler(0, [Momentum(0.0, prompt=[7, 1, 2, 7, 1])]).sample(row, NOISE, 0) == 2

    def test_momentum_breaks_a_loop(self):
        table = [random_row(seed, 20) for seed in range(20)]

        def generate(sampler: Sampler) -> list[int]:
            text = [0]
            for position in range(60):
                text.append(sampler.sample(table[text[-1]], NOISE, position))
                sampler.advance(text[-1])
            return text

        greedy = generate(Sampler(0))
        assert any(greedy[30:40] == greedy[30 + n : 40 + n] for n in range(1, 20))
        resisted = generate(Sampler(0, [Momentum(prompt=[0])]))
        assert not any(resisted[30:40] == resisted[30 + n : 40 + n] for n in range(1, 20))

    @pytest.mark.parametrize("mass_weight", [-0.5, 0.0, 0.6, 1.2])
    def test_top_w_scan_equals_all_subsets(self, mass_weight):
        rng, worse = np.random.default_rng(5), 0
        for _ in range(30):
            p = rng.dirichlet(np.ones(7))
            potential = rng.normal(size=7)

            def value(chosen, p=p, potential=potential):
                mass = p[chosen].sum()
                return (p * potential)[chosen].sum() / mass + mass_weight * math.log(mass)

            subsets = [[i for i in range(7) if bits >> i & 1] for bits in range(1, 128)]
            best = max(map(value, subsets))
            assert value(best_set(p, potential, mass_weight)) == pytest.approx(best)
            by_probability = [value(by_falling_score(p)[:n]) for n in range(1, 8)]
            worse += max(by_probability) < best - 1e-9
        assert worse > 5

    def test_top_w_keeps_neighbours_and_everything_without_weights(self):
        rng = np.random.default_rng(0)
        geometry = Geometry.of(rng.normal(size=(40, 6)).astype(np.float32))
        row = random_row(3, 40)
        assert len(kept_by(TopW(geometry, 0.0, 0.0, 0.0, start_mass=1.0), row)) == 40
        kept = kept_by(TopW(geometry), row)
        assert 1 <= len(kept) < 40 and int(row.argmax()) in kept
        assert len(kept_by(TopW(geometry, 2.2, 1.0), row)) == 1
        assert len(kept_by(TopW(geometry, 0.0, 5.0), row)) == 40

    def test_guidance(self):
        sampler = SamplingParams(guidance_scale=2.0).sampler([], 3)
        assert sampler.companions == 1 and not sampler.is_temperature_only
        combined = sampler.combine(locked([1, 2, 3]), [locked([1, 1, 1])], {})
        assert combined.tolist() == [1, 3, 5]
        same = Guidance(1.0).combine(locked([1, 2, 3]), [locked([9, 1, 1])], {})
        assert same.tolist() == [1, 2, 3]

    def test_dola_contrasts_the_layer_that_differs_most(self):
        last = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
        near = np.log(np.array([0.5, 0.28, 0.17, 0.05]))
        far = np.log(np.array([0.7, 0.1, 0.1, 0.1]))
        sampler = SamplingParams(temperature=0, dola_layers=(2, 5)).sampler([], 4)
        assert sampler.capture_layers == (2, 5)
        row = sampler.combine(locked(last), [], {2: locked(far), 5: locked(near)})
        np.testing.assert_allclose(row[:3], (last - far)[:3], atol=1e-6)
        assert row[3] == np.float32(last[3] - far[3])
        strict = DoLa((2, 5), relative_top=0.5)
        row = strict.combine(locked(last), [], {2: locked(far), 5: locked(near)})
        assert row[2:].max() < row[:2].min() - 1000
        assert sampler.sample(row, NOISE, 0) == 1
        sampled = SamplingParams(dola_layers=(2, 5)).sampler([], 4).distribution(row)
        assert sampled.tokens.tolist() == [0, 1]

    def test_a_constraint_comes_after_dola(self):
        last, early = locked(np.log([0.8, 0.15, 0.03, 0.02])), locked(np.log([0.25] * 4))
        for allowed, expected in (([1, 2], [1.0, 0.0]), ([2, 3], [0.6, 0.4])):
            sampler = SamplingParams(dola_layers=(2,)).sampler([], 4, constraint=Allow(allowed))
            row = sampler.combine(last, [], {2: early})
            found = sampler.distribution(row).dense(4)[allowed]
            np.testing.assert_allclose(found, expected, atol=2e-3)


class TestLogprobs:
    def test_against_a_float64_softmax(self):
        row = random_row(8, 1000)
        expected = np.log(softmax(row))
        found = token_logprobs(row, 17, 5)
        assert found.logprob == pytest.approx(expected[17], abs=1e-6)
        best = by_falling_score(row)[:5]
        assert [token for token, _ in found.top] == best
        np.testing.assert_allclose([lp for _, lp in found.top], expected[best], atol=1e-6)
        assert token_logprobs(row, 17).top == ()

    def test_ties_are_listed_by_id(self):
        assert [t for t, _ in token_logprobs(locked([1, 2, 2, 1, 2]), 0, 4).top] == [1, 2, 4, 0]

    def test_under_the_distribution_of_the_sampler(self):
        row = locked([0, 1, 2, 3])
        distribution = Sampler(0.5, post_temperature=[TopK(2)]).distribution(row)
        found = distribution_logprobs(distribution, 2, 3)
        expected = np.log(softmax([4, 6]))
        assert found.logprob == pytest.approx(expected[0], abs=1e-6)
        assert [token for token, _ in found.top] == [3, 2]
        assert distribution_logprobs(distribution, 0).logprob == -math.inf
        assert distribution.log_probability(3) == pytest.approx(expected[1], abs=1e-6)

    @pytest.mark.parametrize("count", [1, 5, 40])
    def test_the_most_probable_tokens_of_a_distribution(self, count):
        row = np.random.default_rng(2).integers(-4, 5, 60).astype(np.float32)  # with ties
        row[::2] = -math.inf
        for tokens in (None, np.arange(60, dtype=np.int32) + 7):
            ids, logprobs = Distribution(tokens, row).most_probable(count)
            best = by_falling_score(row)[: min(count, 30)]
            assert (ids - (0 if tokens is None else 7)).tolist() == list(best)
            np.testing.assert_allclose(logprobs, np.log(softmax(row)[best]), atol=1e-6)

    def test_a_row_of_a_batch_gives_the_same_bits(self):
        batch = np.random.default_rng(0).normal(size=(7, 3001)).astype(np.float32)
        for row in batch:
            assert token_logprobs(row, 5, 3) == token_logprobs(row.copy(), 5, 3)
        strided = np.asfortranarray(batch)
        assert token_logprobs(strided[3], 5) == token_logprobs(batch[3], 5)

    def test_probabilities_sum_to_one(self):
        for size in (1, 10, 5000):
            assert Distribution(None, random_row(1, size)).probabilities().sum() == pytest.approx(1)


class TestParams:
    @pytest.mark.parametrize(
        "values, words",
        [
            ({"seed": 10**400}, "seed must be an integer of 64 bits"),
            ({"temperature": 10**400}, "temperature must be between 0 and 100"),
            ({"top_n_sigma": 1e40}, "top_n_sigma must be between 0"),
            ({"top_w_mass": 1e40}, "top_w_mass must be between 0"),
            ({"logit_bias": {5: 1e39}}, "logit_bias of token 5 must be between"),
            ({"logit_bias": {5: True}}, "logit_bias of token 5 is True"),
            ({"temperature": -0.1}, "temperature must be between 0 and 100, not -0.1"),
            ({"temperature": math.nan}, "temperature"),
            ({"temperature": math.inf}, "temperature"),
            ({"temperature": 1e-9}, "0 or at least 0.0001"),
            ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
            ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
            ({"top_p": 1.01}, "top_p"),
            ({"top_k": -1}, "top_k"),
            ({"top_k": 2.5}, "top_k must be an integer, not 2.5"),
            ({"min_p": 1.5}, "min_p"),
            ({"n": 0}, "n must be between 1 and"),
            ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
            ({"max_tokens": -1}, "max_tokens must be 0 or more, not -1"),
            ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"seed": 1 << 64}, "seed"),
            ({"min_tokens": 9, "max_tokens": 8}, "more than max_tokens"),
            ({"n": 2, "momentum_alpha": 0.2}, "momentum always generates the same text"),
            ({"mirostat": 2, "top_p": 0.9}, "mirostat and top_p exclude each other"),
            ({"mirostat": 2, "temperature": 0}, "mirostat needs a temperature above 0"),
            ({"xtc_probability": 0.5, "temperature": 0}, "xtc_probability needs"),
            ({"guidance_scale": 2, "dola_layers": (3,)}, "cannot be combined"),
            ({"stop": "END"}, "stop must be a list"),
            ({"stop": [""]}, "stop must be a list"),
            ({"banned_words": [[]]}, "empty word"),
            ({"logit_bias": {1: math.nan}}, "logit_bias of token 1"),
            ({"logit_bias": {"5": 1.0}}, "logit_bias has the key '5'; its keys must be token ids"),
            ({"logit_bias": {True: 1.0}}, "logit_bias has the key True"),
            ({"logit_bias": {5: "1"}}, "logit_bias of token 5 is '1'; it must be a number"),
            ({"logit_bias": [5]}, "logit_bias must map token ids to numbers, not [5]"),
            ({"processed_logprobs": True}, "logprobs is not"),
        ],
    )
    def test_bad_values_are_named_in_one_line(self, values, words):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**values)
        assert words in str(caught.value) and "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "values",
        [
            {"logit_bias": {10: 1.0}},
            {"banned_words": [[1, -2]]},
            {"stop_tokens": [10]},
            {"dry_breakers": [99]},
        ],
    )
    def test_ids_outside_the_vocabulary(self, values):
        with pytest.raises(InvalidRequestError, match="the vocabulary has 10"):
            SamplingParams(**values).sampler([], 10)

    def test_the_defaults_do_not_change_the_logits(self):
        sampler = SamplingParams().sampler([1, 2], 5, [0])
        assert sampler.is_temperature_only and not sampler.is_stateful and not sampler.is_greedy
        row = random_row(0, 5)
        np.testing.assert_allclose(sampler.distribution(row).dense(5), softmax(row), atol=1e-6)
        greedy = SamplingParams(temperature=0, top_k=3, top_p=0.5).sampler([], 5)
        assert greedy.is_greedy and greedy.is_temperature_only

    def test_order_of_the_processors(self):
        sampler = SamplingParams(
            momentum_alpha=0.1,
            min_tokens=2,
            repetition_penalty=1.3,
            logit_bias={1: 1.0},
            top_p=0.9,
            top_k=5,
            xtc_probability=0.1,
        ).sampler([], 8, [0], constraint=Allow([1, 2]))
        names = [type(part).__name__ for part in sampler.pre_temperature]
        assert names == [
            "RepetitionPenalty", "LogitBias", "MinimumLength", "Constrained", "Momentum",
        ]  # fmt: skip
        after = [type(part).__name__ for part in sampler.post_temperature]
        assert after == ["TopK", "TopP", "ExcludeTopChoices"]

    def test_top_w_needs_embeddings(self):
        assert SamplingParams(top_w=True).needs_geometry
        with pytest.raises(InvalidRequestError, match="embeddings"):
            SamplingParams(top_w=True).sampler([], 4)

    def test_rows_are_never_written_to(self):
        sampler = EVERYTHING.sampler([1, 5], 16, [0])
        row = random_row(4, 16)
        before = row.copy()
        sampler.advance(7)
        sampler.sample(row, NOISE, 0)
        np.testing.assert_array_equal(row, before)
        with pytest.raises(ValueError, match="read-only"):
            row[0] = 1
