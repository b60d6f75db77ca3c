"""Counter-based random numbers for sampling.

The number for (seed, stream, position, attempt, token) is a pure function of these five values, so
it does not depend on masks, truncation, batching or speculation. The generator is Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.library import gumbel

#: Purposes of a stream. Their order determines the text that a seed gives, so it must not change.
PURPOSES = ("target", "coin", "residual", "draft", "unmask", "search", "resample", "other")

_MULTIPLIERS = np.array([[0xD2511F53, 0xCD9E8D57], [0xCD9E8D57, 0xD2511F53]], np.uint64)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_LOW_MASK = np.array(0xFFFFFFFF, np.uint64)
_SHIFT = np.array(32, np.uint64)
_LOW_BITS = 0xFFFFFFFF
_SAMPLE_BITS, _FORK_BITS, _PURPOSE_BITS = 16, 12, 4


def fresh_seed() -> int:
    """A random seed from the operating system, below 2^53: JavaScript and jq, which read the JSON
    of answers, round larger integers."""
    return secrets.randbits(53)


def stream_id(sample: int = 0, fork: int = 0, purpose: str | int = "target") -> int:
    """Pack the sample index (16 bits), the fork index (12) and the purpose (4) into 32 bits."""
    code = PURPOSES.index(purpose) if isinstance(purpose, str) else purpose
    for value, bits, name in (
        (sample, _SAMPLE_BITS, "sample"),
        (fork, _FORK_BITS, "fork"),
        (code, _PURPOSE_BITS, "purpose"),
    ):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} {value} does not fit into {bits} bits")
    return sample << (_FORK_BITS + _PURPOSE_BITS) | fork << _PURPOSE_BITS | code


@dataclass(frozen=True)
class Noise:
    """The random numbers of one stream. `seed` is taken modulo 2^64, `stream` is a `stream_id`."""

    seed: int
    stream: int = 0

    def words(self, tokens: np.ndarray | range, position: int, attempt: int = 0) -> np.ndarray:
        """uint32 `[len(tokens)]`: word `token & 3` of the block with counter
        (token >> 2, position, stream, attempt) under the key (seed low, seed high)."""
        if isinstance(tokens, range) and tokens.step == 1:
            first = tokens.start >> 2
            blocks = np.arange(first, (tokens.stop + 3) >> 2, dtype=np.uint64)
            flat: np.ndarray = self._blocks(blocks, position, attempt).T.reshape(-1)
            return flat[tokens.start - 4 * first : tokens.stop - 4 * first]
        ids = np.asarray(tokens, np.int64)
        if len(ids) > 256 and 4 * len(ids) > ids.max():  # blocks would be computed several times
            return self.words(range(int(ids.max()) + 1), position, attempt)[ids]
        blocks = self._blocks((ids >> 2).astype(np.uint64), position, attempt)
        words: np.ndarray = blocks[ids & 3, np.arange(len(ids))]
        return words

    def uniform(self, tokens: np.ndarray | range, position: int, attempt: int = 0) -> np.ndarray:
        """float64 `[len(tokens)]`, strictly between 0 and 1: (word + 1/2) / 2^32."""
        numbers: np.ndarray = (self.words(tokens, position, attempt) + 0.5) * 2.0**-32
        return numbers

    def gumbel(self, tokens: np.ndarray | range, position: int, attempt: int = 0) -> np.ndarray:
        """float64 `[len(tokens)]`: -log(-log(uniform)), standard Gumbel noise."""
        return gumbel(self.uniform(tokens, position, attempt))

    def normal(self, count: int, position: int, attempt: int = 0) -> np.ndarray:
        """float64 `[count]`, standard normal (Box and Muller's transform of uniform numbers)."""
        first, second = self.uniform(range(2 * count), position, attempt).reshape(2, count)
        cosines = portable.sine_and_cosine(2 * np.pi * second)[1]
        numbers: np.ndarray = np.sqrt(-2 * portable.log(first)) * cosines
        return numbers

    def coin(self, position: int, attempt: int = 0, index: int = 0) -> float:
        """One uniform number; `index` distinguishes several coins at the same position."""
        return float(self.uniform(range(index, index + 1), position, attempt)[0])

    def with_stream(self, stream: int) -> Noise:
        """The same seed, another stream."""
        return replace(self, stream=stream)

    def with_purpose(self, purpose: str | int) -> Noise:
        """The same seed, sample and fork with another purpose."""
        return self.with_stream(stream_id(self.sample, self.fork, purpose))

    def forked(self, number: int) -> Noise:
        """The noise of branch `number` (1 or more). For a branch of a branch, both numbers are
        mixed into the 12 bits of the fork index."""
        fork = (self.fork * 61 + number) % (1 << _FORK_BITS)
        return self.with_stream(stream_id(self.sample, fork, self.purpose))

    @property
    def sample(self) -> int:
        return self.stream >> (_FORK_BITS + _PURPOSE_BITS)

    @property
    def fork(self) -> int:
        return self.stream >> _PURPOSE_BITS & ((1 << _FORK_BITS) - 1)

    @property
    def purpose(self) -> int:
        return self.stream & ((1 << _PURPOSE_BITS) - 1)

    def _blocks(self, blocks: np.ndarray, position: int, attempt: int) -> np.ndarray:
        seed = self.seed & (1 << 64) - 1
        return philox4x32(blocks, position, self.stream, attempt, seed)


@lru_cache(maxsize=256)
def _round_keys(seed: int) -> np.ndarray:
    """uint64 `[rounds, 2]`: the two key words of each round, swapped in odd rounds."""
    keys = np.empty((_NUM_ROUNDS, 2), np.uint64)
    for number in range(_NUM_ROUNDS):
        low = (seed + number * _KEY_INCREMENTS[0]) & _LOW_BITS
        high = ((seed >> 32) + number * _KEY_INCREMENTS[1]) & _LOW_BITS
        keys[number] = (low, high) if number % 2 else (high, low)
    return keys


def philox4x32(first: np.ndarray, second: int, third: int, fourth: int, key: int) -> np.ndarray:
    """Philox4x32-10 over counters (first[i], second, third, fourth): uint32 `[4, len(first)]`.

    `first` is uint64 holding 32-bit values; `key` has 64 bits, the low word is the first key word.
    """
    # Both multiplications of a round are one numpy call over two halves. Instead of swapping the
    # halves after every round, the multipliers and keys are swapped.
    count = len(first)
    even, odd = np.empty(2 * count, np.uint64), np.empty(2 * count, np.uint64)
    even[:count], even[count:] = first, third
    odd[:count], odd[count:] = fourth, second
    keys = np.repeat(_round_keys(key), count, axis=1)
    multipliers = np.repeat(_MULTIPLIERS, count, axis=1)
    product = np.empty(2 * count, np.uint64)
    for number in range(_NUM_ROUNDS):
        np.multiply(even, multipliers[number % 2], out=product)
        np.right_shift(product, _SHIFT, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, keys[number], out=even)
        np.bitwise_and(product[count:], _LOW_MASK, out=odd[:count])
        np.bitwise_and(product[:count], _LOW_MASK, out=odd[count:])
    result = np.empty((4, count), np.uint32)
    result[0], result[2] = even[:count], even[count:]
    result[1], result[3] = odd[count:], odd[:count]
    return result
