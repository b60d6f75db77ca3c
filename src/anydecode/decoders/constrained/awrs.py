"""Adaptive weighted rejection sampling and sequential Monte Carlo (Lipkin et al., "Fast Controlled
Generation from Language Models with Adaptive Weighted Rejection Sampling", arXiv:2504.05410)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.constrained.free import allows, spoken, unmasked
from anydecode.decoders.decoder import Decoder
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.constrained import ConstraintState
from anydecode.scoring.noise import Noise
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence

#: From this probability of the likeliest token on, the geometric estimator has less variance.
PEAKED = 2 / 3


@dataclass(frozen=True)
class Draw:
    """A token and the logarithm of its weight, whose expectation over draws is the probability of
    what is allowed; no token and -inf where nothing is. `tests` were asked of the constraint."""

    token: int | None
    log_weight: float
    tests: int


def draw(
    probabilities: np.ndarray,
    tokens: np.ndarray,
    allowed: Callable[[int], bool],
    noise: Noise,
    position: int,
) -> Draw:
    """A token with weight, by testing few. `probabilities` float64 and `tokens` of one length."""
    if float(probabilities.max()) < PEAKED:
        return _recursive(probabilities, tokens, allowed, noise, position)
    return _geometric(probabilities, tokens, allowed, noise, position)


def _order(
    probabilities: np.ndarray, tokens: np.ndarray, noise: Noise, position: int, attempt: int
) -> np.ndarray:
    """Places in the order of a draw without replacement."""
    with np.errstate(divide="ignore"):
        keys = np.log(probabilities) + noise.gumbel(tokens, position, attempt)
    order = np.argsort(-keys, kind="stable")
    return order[probabilities[order] > 0]


def _recursive(
    probabilities: np.ndarray,
    tokens: np.ndarray,
    allowed: Callable[[int], bool],
    noise: Noise,
    position: int,
) -> Draw:
    rejected, mass = 0.0, 1.0
    order = _order(probabilities, tokens, noise, position, 0)
    for rank, index in enumerate(order):
        share = min(1.0, float(probabilities[index]) / max(1 - rejected, 1e-300))
        if not allowed(int(tokens[index])):
            mass *= 1 - share
            rejected += float(probabilities[index])
            continue
        tests = rank + 1
        if tests < len(order):
            tests += 1
            if not allowed(int(tokens[order[rank + 1]])):
                mass *= share
        return Draw(int(tokens[index]), float(np.log(mass)) if mass > 0 else -np.inf, tests)
    return Draw(None, -np.inf, len(order))


def _geometric(
    probabilities: np.ndarray,
    tokens: np.ndarray,
    allowed: Callable[[int], bool],
    noise: Noise,
    position: int,
) -> Draw:
    left = probabilities.copy()
    known: dict[int, bool] = {}
    found: int | None = None
    accepted = refused = 0
    coins = noise.with_purpose("coin")
    for turn in range(2):
        for number, index in enumerate(_order(left, tokens, noise, position, turn)):
            gone = 1 - float(left.sum() / probabilities.sum())
            if gone > 1e-12:  # draws of what is known to be refused
                coin = coins.coin(position, turn, number)
                refused += int(np.log(coin) / np.log(gone)) if gone < 1 else 0
            token = int(tokens[index])
            if token not in known:
                known[token] = allowed(token)
            if known[token]:
                accepted += 1
                found = token if found is None else found
                break
            refused += 1
            left[index] = 0.0
        else:
            return Draw(None, -np.inf, len(known))
    return Draw(found, -float(np.log(accepted + refused - 1)), len(known))


@dataclass(eq=False)
class _Particle:
    sequence: Sequence
    weight: float  # logarithm
    done: bool


@register(
    Card(
        "awrs",
        "constraint",
        paper="Fast Controlled Generation with Adaptive Weighted Rejection Sampling"
        " (arXiv:2504.05410)",
        exactness="lossy",
        summary="Tests the few tokens it draws instead of masking all; weighted particles undo the"
        " bias of the constraint.",
        works_with=("constraints", "samplers", "batches", "adapters"),
        deviations=(
            "called lossy because plain masking is what it departs from: it follows the model's"
            " distribution given the constraint, which is reached as particles grow in number; the"
            " weights are unbiased for every number",
            "the text is emitted when the search ends, not while it runs",
            "at the token limit unfinished particles keep their weight",
        ),
    )
)
class Awrs(Decoder):
    """`particles` texts side by side; where their weights become uneven (effective number below
    `threshold` times `particles`) the heavy ones are copied over the light ones. One is said, drawn
    by weight. `sequence.state["awrs"]` holds the evidence and the number of tests."""

    def __init__(self, particles: int = 4, threshold: float = 0.5) -> None:
        if not 1 <= particles <= 60 or not 0 <= threshold <= 1:
            raise InvalidRequestError("awrs needs 1 to 60 particles and a threshold of 0 to 1")
        self.particles = particles
        self.threshold = threshold

    def decode(self, sequence: Sequence) -> Decoding:
        count = 1 if sequence.sampler.is_greedy else self.particles
        fresh = {"particles": [([], 0.0, False)] * count, "depth": 0, "tests": 0}
        state: dict[str, Any] = sequence.state.setdefault("awrs", fresh)
        sequence.context()
        particles = [_grown(sequence, *one) for one in state["particles"]]
        limit = sequence.remaining
        while state["depth"] < limit:
            live = [number for number, one in enumerate(particles) if _is_live(one)]
            if not live:
                break
            answers = yield [particles[number].sequence.score() for number in live]
            for number, scores in zip(live, answers, strict=True):
                noise = sequence.noise.forked(number + 1)
                state["tests"] += self._step(particles[number], scores, noise)
            state["depth"] += 1
            particles = self._resampled(sequence, particles, state["depth"])
            said = len(sequence.tokens)
            state["particles"] = [(p.sequence.tokens[said:], p.weight, p.done) for p in particles]
        self._say(sequence, particles, state)

    def _say(self, sequence: Sequence, particles: list[_Particle], state: dict[str, Any]) -> None:
        weights = np.array([one.weight for one in particles])
        if weights.max() == -np.inf:
            raise ConstraintError("no particle met the constraint; more particles may")
        state["evidence"] = log_sum_exp(weights) - float(np.log(len(weights)))
        noise = sequence.noise.with_purpose("resample")
        held = Distribution(None, weights)
        chosen = particles[held.sample(noise, sequence.length + state["depth"])]
        tokens = chosen.sequence.tokens[len(sequence.tokens) :]
        for one in particles:
            one.sequence.release()
        sequence.emit(tokens)

    def _step(self, particle: _Particle, scores: Any, noise: Noise) -> int:
        """Lengthen one particle; how many tests it took."""
        branch = particle.sequence
        position = int(scores.positions[-1]) + 1
        distribution, state = unmasked(scores.sampler_after(-1), scores.row(-1))
        if branch.sampler.is_greedy:
            found = _likeliest(distribution, state)
        else:
            found = draw(
                distribution.probabilities(),
                spoken(distribution),
                lambda token: allows(state, token),
                noise,
                position,
            )
        particle.weight += found.log_weight
        if found.token is not None and particle.weight > -np.inf:
            branch.append(found.token)
            particle.done = branch.stops_at(found.token)
        return found.tests

    def _resampled(
        self, sequence: Sequence, particles: list[_Particle], depth: int
    ) -> list[_Particle]:
        weights = np.array([one.weight for one in particles])
        if weights.max() == -np.inf or len(particles) == 1:
            return particles
        shares = np.exp(weights - weights.max())
        shares /= shares.sum()
        if 1 / float((shares**2).sum()) >= self.threshold * len(particles):
            return particles
        mean = log_sum_exp(weights) - float(np.log(len(weights)))
        noise = sequence.noise.with_purpose("resample")
        held = Distribution(None, weights)
        position = sequence.length + depth
        parents = [held.sample(noise, position, 1 + number) for number in range(len(particles))]
        fresh = []
        for number, parent in enumerate(parents):
            source = particles[parent]
            branch = source.sequence
            if parent in parents[number + 1 :]:
                branch = branch.branch()
            fresh.append(_Particle(branch, mean, source.done))
        for number, one in enumerate(particles):
            if number not in parents:
                one.sequence.release()
        return fresh


def _grown(sequence: Sequence, tokens: list[int], weight: float, done: bool) -> _Particle:
    branch = sequence.fork()
    for token in tokens:
        branch.append(token)
    return _Particle(branch, weight, done)


def _is_live(particle: _Particle) -> bool:
    return not particle.done and particle.weight > -np.inf


def _likeliest(distribution: Distribution, state: ConstraintState | None) -> Draw:
    """The likeliest token that is allowed, by testing in order; ties to the lowest id."""
    tokens = spoken(distribution)
    for tests, position in enumerate(np.argsort(-distribution.scores, kind="stable"), 1):
        if allows(state, int(tokens[position])):
            return Draw(int(tokens[position]), 0.0, tests)
    return Draw(None, -np.inf, len(tokens))
