"""Adaptive weighted rejection sampling and sequential Monte Carlo (Lipkin et al., "Fast Controlled
Generation from Language Models with Adaptive Weighted Rejection Sampling", arXiv:2504.05410)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.constrained.free import is_allowed, token_ids, unconstrained_distribution
from anydecode.decoders.decoder import Decoder
from anydecode.errors import ConstraintError, InvalidRequestError
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.constrained import ConstraintState
from anydecode.sampling.noise import Noise
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Maximum token probability from which on the geometric estimator has less variance.
PEAKED = 2 / 3


@dataclass(frozen=True)
class Draw:
    """A sampled token and the logarithm of its weight.

    The expectation of the weight over draws is the probability of all allowed tokens. If none is
    allowed, the token is None and the logarithm -inf. `tests` is the number of tokens tested.
    """

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
    """Samples an allowed token with its weight, testing few tokens.

    Args:
        probabilities: Token probabilities, float64 `[n]`.
        tokens: Token ids, `[n]`.
        allowed: Whether a token is allowed.
        noise: The noise to sample with.
        position: The position of the token in the sequence.
    """
    if float(probabilities.max()) < PEAKED:
        return _recursive(probabilities, tokens, allowed, noise, position)
    return _geometric(probabilities, tokens, allowed, noise, position)


def _order(
    probabilities: np.ndarray, tokens: np.ndarray, noise: Noise, position: int, attempt: int
) -> np.ndarray:
    """Indices in the order of a draw without replacement."""
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
    remaining = probabilities.copy()
    is_token_allowed: dict[int, bool] = {}
    drawn: int | None = None
    num_accepted = num_rejected = 0
    coin_noise = noise.with_purpose("coin")
    for repetition in range(2):
        for attempt, index in enumerate(_order(remaining, tokens, noise, position, repetition)):
            rejected_mass = 1 - float(remaining.sum() / probabilities.sum())
            if rejected_mass > 1e-12:  # draws of tokens already rejected
                coin = coin_noise.coin(position, repetition, attempt)
                num_rejected += (
                    int(np.log(coin) / np.log(rejected_mass)) if rejected_mass < 1 else 0
                )
            token = int(tokens[index])
            if token not in is_token_allowed:
                is_token_allowed[token] = allowed(token)
            if is_token_allowed[token]:
                num_accepted += 1
                drawn = token if drawn is None else drawn
                break
            num_rejected += 1
            remaining[index] = 0.0
        else:
            return Draw(None, -np.inf, len(is_token_allowed))
    return Draw(drawn, -float(np.log(num_accepted + num_rejected - 1)), len(is_token_allowed))


@dataclass(eq=False)
class _Particle:
    sequence: Sequence
    weight: float  # logarithm
    done: bool
    logprobs: list[Any]


class AwrsState(TypedDict, total=False):
    """The particles (tokens, weight as a logarithm, whether it is complete, requested
    log-probabilities) after `depth` tokens, the number of tests, and at the end the evidence as a
    logarithm."""

    particles: list[tuple[list[int], float, bool, list[Any]]]
    depth: int
    tests: int
    evidence: float


STATE: StateKey[AwrsState] = StateKey("awrs", "state")


@register(
    Card(
        "awrs",
        "constraint",
        paper="Fast Controlled Generation with Adaptive Weighted Rejection Sampling"
        " (arXiv:2504.05410)",
        exactness="lossy",
        summary="Tests only the few tokens that it samples instead of masking all; weighted"
        " particles correct the bias of the constraint.",
        works_with=("constraints", "samplers", "logprobs", "batches", "adapters"),
        deviations=(
            "listed as lossy because it differs from plain masking: it follows the model's"
            " distribution given the constraint, to which it converges as the number of particles"
            " grows; the weights are unbiased for every number",
            "the text is emitted at the end of the search, not streamed",
            "at the token limit, unfinished particles keep their weight",
            "no critic and no proposal model: particles are weighted by the constraint alone",
            "the released code's defaults of two accepted tokens and no limit of rejected ones are"
            " fixed; the vocabulary is not pruned beforehand",
        ),
        remote={"particles": Range(1, 16), "threshold": Range(0, 1)},
    )
)
class Awrs(Decoder):
    """Sequential Monte Carlo: texts with weights, which are resampled if the weights become uneven.
    One text, sampled by weight, is emitted. `sequence.state[STATE]` holds the evidence (as a
    logarithm) and the number of tests.

    Args:
        particles: Number of texts.
        threshold: The texts are resampled if the effective sample size is below this share of
            `particles`.
    """

    def __init__(self, particles: int = 4, threshold: float = 0.5) -> None:
        if not 1 <= particles <= 60 or not 0 <= threshold <= 1:
            raise InvalidRequestError(
                "awrs needs particles from 1 to 60 and a threshold from 0 to 1"
            )
        self.particles = particles
        self.threshold = threshold

    def decode(self, sequence: Sequence) -> Decoding:
        num_particles = 1 if sequence.sampler.is_greedy else self.particles
        start: list[tuple[list[int], float, bool, list[Any]]] = [
            ([], 0.0, False, []) for _ in range(num_particles)
        ]
        state = sequence.state.setdefault(STATE, AwrsState(particles=start, depth=0, tests=0))
        prompt = yield sequence.score()  # first, so that all particles share it
        particles = [_make_particle(sequence, *particle) for particle in state["particles"]]
        limit = sequence.remaining
        while state["depth"] < limit:
            live_particles = [
                index for index, particle in enumerate(particles) if _is_live(particle)
            ]
            if not live_particles:
                break
            all_scores = [prompt] * len(live_particles)
            if state["depth"]:
                all_scores = yield [particles[index].sequence.score() for index in live_particles]
            for index, scores in zip(live_particles, all_scores, strict=True):
                noise = sequence.noise.forked(index + 1)
                state["tests"] += self._step(sequence, particles[index], scores, noise)
            state["depth"] += 1
            particles = self._resampled(sequence, particles, state["depth"])
            num_emitted = len(sequence.tokens)
            state["particles"] = [
                (p.sequence.tokens[num_emitted:], p.weight, p.done, p.logprobs) for p in particles
            ]
        self._emit(sequence, particles, state)

    def _emit(self, sequence: Sequence, particles: list[_Particle], state: AwrsState) -> None:
        weights = np.array([particle.weight for particle in particles])
        if weights.max() == -np.inf:
            raise ConstraintError(
                "no particle satisfies the constraint; try more particles (awrs:particles=...)"
            )
        state["evidence"] = log_sum_exp(weights) - float(np.log(len(weights)))
        noise = sequence.noise.with_purpose("resample")
        weighted = Distribution(None, weights)
        chosen = particles[weighted.sample(noise, sequence.length + state["depth"])]
        tokens = chosen.sequence.tokens[len(sequence.tokens) :]
        for particle in particles:
            particle.sequence.release()
        sequence.emit(tokens, logprobs=chosen.logprobs)

    def _step(self, sequence: Sequence, particle: _Particle, scores: Scores, noise: Noise) -> int:
        """Appends a token to one particle. Returns the number of tests."""
        branch = particle.sequence
        position = int(scores.positions[-1]) + 1
        row, sampler = scores.row(-1), scores.sampler_after(-1)
        distribution, state = unconstrained_distribution(sampler, row)
        if branch.sampler.is_greedy:
            drawn = _likeliest(distribution, state)
        else:
            drawn = draw(
                distribution.probabilities(),
                token_ids(distribution),
                lambda token: is_allowed(state, token),
                noise,
                position,
            )
        particle.weight += drawn.log_weight
        if drawn.token is not None and particle.weight > -np.inf:
            if sequence.compute_logprobs is not None:
                entry = sequence.compute_logprobs(row, drawn.token, sampler)
                particle.logprobs = [*particle.logprobs, entry]
            branch.append(drawn.token)
            particle.done = branch.stops_at(drawn.token)
        return drawn.tests

    def _resampled(
        self, sequence: Sequence, particles: list[_Particle], depth: int
    ) -> list[_Particle]:
        weights = np.array([particle.weight for particle in particles])
        if weights.max() == -np.inf or len(particles) == 1:
            return particles
        shares = np.exp(weights - weights.max())
        shares /= shares.sum()
        if 1 / float((shares**2).sum()) >= self.threshold * len(particles):
            return particles
        mean = log_sum_exp(weights) - float(np.log(len(weights)))
        noise = sequence.noise.with_purpose("resample")
        weighted = Distribution(None, weights)
        position = sequence.length + depth
        parents = [weighted.sample(noise, position, 1 + index) for index in range(len(particles))]
        resampled = []
        for index, parent in enumerate(parents):
            source = particles[parent]
            branch = source.sequence
            if parent in parents[index + 1 :]:
                branch = branch.branch()
            resampled.append(_Particle(branch, mean, source.done, source.logprobs))
        for index, particle in enumerate(particles):
            if index not in parents:
                particle.sequence.release()
        return resampled


def _make_particle(
    sequence: Sequence, tokens: list[int], weight: float, done: bool, logprobs: list[Any]
) -> _Particle:
    branch = sequence.fork()
    for token in tokens:
        branch.append(token)
    return _Particle(branch, weight, done, logprobs)


def _is_live(particle: _Particle) -> bool:
    return not particle.done and particle.weight > -np.inf


def _likeliest(distribution: Distribution, state: ConstraintState | None) -> Draw:
    """The allowed token with the highest probability, found by testing in that order; ties to the
    lowest id."""
    tokens = token_ids(distribution)
    for tests, position in enumerate(np.argsort(-distribution.scores, kind="stable"), 1):
        if is_allowed(state, int(tokens[position])):
            return Draw(int(tokens[position]), 0.0, tests)
    return Draw(None, -np.inf, len(tokens))
