"""The noise generator against published vectors and a plain implementation, and its addressing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anydecode.sampling.noise import PURPOSES, Noise, fresh_seed, philox4x32, stream_id

# Counter, key and output from the known-answer file of Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def plain_philox(
    counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 10
) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            high >> 32 ^ c1 ^ k0,
            high & 0xFFFFFFFF,
            low >> 32 ^ c3 ^ k1,
            low & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS)
def test_philox_matches_the_known_answers(counter, key, answer):
    words = philox4x32(np.array(counter[:1], np.uint64), *counter[1:], key[0] | key[1] << 32)
    assert tuple(words[:, 0].tolist()) == answer
    assert plain_philox(counter, key) == answer
    assert plain_philox(counter, key, rounds=9) != answer


word = st.integers(0, 2**32 - 1)


@given(st.integers(0, 2**64 - 1), word, word, word, st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_words_have_the_documented_counters(seed, stream, position, attempt, tokens):
    words = Noise(seed, stream).words(np.array(tokens, np.int32), position, attempt)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = [
        plain_philox((token >> 2, position, stream, attempt), key)[token & 3] for token in tokens
    ]
    assert words.tolist() == expected


@given(st.integers(0, 40), st.integers(0, 40))
def test_ranges_and_arrays_give_the_same_words(start, length):
    noise = Noise(3, 7)
    tokens = range(start, start + length)
    assert noise.words(tokens, 5).tolist() == noise.words(np.array(tokens, np.int64), 5).tolist()


@pytest.mark.parametrize("size", [1, 7, 255, 300, 900])
def test_the_noise_of_a_token_does_not_depend_on_other_tokens(size):
    noise = Noise(12345, stream_id(2, 1, "target"))
    whole = noise.gumbel(range(1000), 9, 1)
    tokens = np.sort(np.random.default_rng(size).choice(1000, size, replace=False))
    part = noise.gumbel(tokens, 9, 1)
    assert part.tobytes() == whole[tokens].tobytes()
    assert noise.gumbel(np.arange(size), 9, 1).tobytes() == whole[:size].tobytes()
    assert not np.array_equal(part, noise.gumbel(tokens, 9, 2))


def test_every_part_of_the_key_and_counter_changes_the_noise():
    noise = Noise(1, 0)
    draws = [
        noise.gumbel(range(8), 0),
        noise.gumbel(range(8), 1),
        noise.gumbel(range(8), 0, 1),
        noise.with_purpose("coin").gumbel(range(8), 0),
        noise.forked(1).gumbel(range(8), 0),
        Noise(1 << 32, 0).gumbel(range(8), 0),
        Noise(2, 0).gumbel(range(8), 0),
    ]
    values = np.concatenate(draws)
    assert len(np.unique(values)) == len(values)


def test_uniform_and_gumbel_have_their_distributions():
    noise = Noise(99)
    uniform = noise.uniform(range(100_000), 0)
    assert 0 < uniform.min() and uniform.max() < 1
    histogram = np.histogram(uniform, 100, (0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 149  # chi-square, 99 degrees, p = 0.001
    gumbel = noise.gumbel(range(100_000), 0)
    assert abs(gumbel.mean() - 0.5772) < 4 * 1.2825 / 100_000**0.5
    assert abs(gumbel.std() - 1.2825) < 0.015


def test_extreme_words_give_finite_noise(monkeypatch):
    extremes = np.array([0, 2**32 - 1], np.uint32)
    monkeypatch.setattr(Noise, "words", lambda *_: extremes)
    values = Noise(0).gumbel(range(2), 0)
    assert np.isfinite(values).all() and values[0] < values[1]


def test_stream_ids_pack_sample_fork_and_purpose():
    assert stream_id(0, 0, "target") == 0
    assert stream_id(65535, 4095, 15) == 2**32 - 1
    noise = Noise(0, stream_id(7, 5, "residual"))
    assert (noise.sample, noise.fork, PURPOSES[noise.purpose]) == (7, 5, "residual")
    assert noise.with_purpose("draft").fork == 5
    assert noise.forked(1).sample == 7 and noise.forked(1).fork != 5
    for bad in ((65536, 0, 0), (0, 4096, 0), (0, 0, 16), (-1, 0, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            stream_id(*bad)


def test_branches_of_branches_have_noise_of_their_own():
    """A search forks at most 60 branches at a time; both numbers fit into the 12 bits."""
    noise = Noise(0, stream_id(7))
    first = {noise.forked(i).fork for i in range(1, 61)}
    second = {noise.forked(i).forked(j).fork for i in range(1, 61) for j in range(1, 61)}
    assert first == {*range(1, 61)} and len(second) == 60 * 60 and not first & second


def test_coins_differ_by_position_attempt_and_index():
    noise = Noise(4).with_purpose("coin")
    coins = {noise.coin(position, attempt, i) for position, attempt, i in np.ndindex(5, 3, 6)}
    assert len(coins) == 90
    assert noise.coin(2, 1, 3) == noise.uniform(range(8), 2, 1)[3]


def test_fresh_seeds_differ():
    seeds = {fresh_seed() for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed == int(float(seed)) for seed in seeds)
