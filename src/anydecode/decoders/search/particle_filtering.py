"""Particle filtering (Puri et al., "A Probabilistic Inference Approach to Inference-Time Scaling of
LLMs using Particle-Based Monte Carlo Methods", arXiv:2502.01618).

Several texts grow step by step. After each step the texts are drawn anew in proportion to weights
that follow from their rewards, so good beginnings multiply and bad ones end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from anydecode.catalogue import Card, Range, Text, Words, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.rollouts import Rollout, Rollouts, StepRule, independent_rollouts
from anydecode.decoders.framework.valuing import Valuing
from anydecode.decoders.search.beam import emit_ranked
from anydecode.errors import InvalidRequestError
from anydecode.rewards import registry
from anydecode.sampling.noise import Noise
from anydecode.scoring.ranked import RankedText
from anydecode.scoring.score import Decoding
from anydecode.scoring.sequence import Sequence
from anydecode.scoring.state import StateKey

#: Rewards nearer to 0 and 1 count as this near, as in the authors' code.
CLIP = 1e-7
#: Maximum number of particles times steps: the number of random streams of a sample.
MAX_STREAMS = 4095


@dataclass
class ParticleState:
    """What a restart needs, beside the particles: the number of finished steps, and the logarithm
    of each particle's potential after the last one."""

    num_steps: int = 0
    potentials: list[float] = field(default_factory=list)


_PARTICLES: StateKey[list[Rollout]] = StateKey("particle-filtering", "particles")
_STATE: StateKey[ParticleState] = StateKey("particle-filtering", "state")


@register(
    Card(
        "particle-filtering",
        "search",
        paper="A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using"
        " Particle-Based Monte Carlo Methods (arXiv:2502.01618)",
        exactness="lossy",
        summary="Grows several texts step by step, and draws them anew by the rewards of their"
        " beginnings.",
        works_with=("constraints", "samplers", "guidance", "logprobs", "batches", "adapters"),
        deviations=(
            "the text is emitted when all texts have ended, not while they grow",
            "the default reward is the geometric mean of the probabilities of the text's tokens"
            " under the model itself; the paper's is a trained process reward model, which is given"
            " as a function",
            "the texts are not drawn anew after the last step: the answer is chosen among all",
            "steps beyond the last allowed one are one step, which goes on to the end; the authors'"
            " code cuts the text off",
            "no particle Gibbs, and no annealing of the temperature of the weights",
        ),
        remote={
            "n": Range(1, 16),
            "reward": registry.RewardName(),
            "step": Text(16),
            "step_tokens": Range(1, 4096),
            "max_steps": Range(1, 64),
            "temperature": Range(0.05, 20),
            "weights": Words(("replace", "increment")),
            "answer": Words(("best", "draw")),
        },
    )
)
class ParticleFiltering(Decoder):
    """Particle filtering with `n` texts.

    The potential of a text is `(r / (1 - r)) ** (1 / temperature)`, where r is the reward of the
    text so far. After every step the `n` texts are drawn with replacement, in proportion to their
    weights. With `weights` "replace", as published, the weight of a text is its potential, also
    that of a text that has ended: the texts follow the model's distribution times the product of
    the potentials of all beginnings. With "increment" it is the quotient of its potential and the
    one before the step: for large `n` the texts follow the model's distribution times the potential
    of the whole text. With one particle that is plain decoding. At temperature 0 of the request
    there is one particle.

    A request with `n` above 1 receives the texts of all particles that differ, the answer first and
    the others by their rewards.

    Args:
        n: The number of particles, and the largest `n` of a request.
        reward: The name of a reward, a function `(prompt, texts) -> values`, or a `Reward`, with
            values from 0 to 1, also of texts that go on.
        step: The text that ends a step. Default: a blank line.
        step_tokens: Maximum number of tokens of a step.
        max_steps: Maximum number of steps.
        temperature: The temperature of the weights.
        weights: "replace" or "increment".
        answer: "best" for the text with the highest reward, "draw" for one drawn by the weights.
    """

    def __init__(
        self,
        n: int = 8,
        reward: registry.RewardChoice = "confidence",
        step: str = "\n\n",
        step_tokens: int = 1024,
        max_steps: int = 40,
        temperature: float = 1.0,
        weights: str = "replace",
        answer: str = "best",
    ) -> None:
        if n < 1 or max_steps < 1 or n * max_steps > MAX_STREAMS:
            raise InvalidRequestError(
                f"particle-filtering: n is {n} and max_steps is {max_steps}; both must be at least"
                f" 1, and their product at most {MAX_STREAMS}"
            )
        if step_tokens < 1 or temperature <= 0 or not step:
            raise InvalidRequestError(
                "particle-filtering needs a step, step_tokens of at least 1 and a temperature above"
                f" 0, not {step!r}, {step_tokens} and {temperature}"
            )
        if weights not in ("replace", "increment") or answer not in ("best", "draw"):
            raise InvalidRequestError(
                "particle-filtering: weights may be replace or increment, and answer best or draw,"
                f" not {weights!r} and {answer!r}"
            )
        self.n = n
        self.valuing = Valuing(registry.build(reward), (0.0, 1.0))
        self.step = StepRule(step, step_tokens)
        self.max_steps = max_steps
        self.temperature = temperature
        self.replaces = weights == "replace"
        self.draws = answer == "draw"
        self.requirements = Requirements(max_texts=n, forks_text=True)

    @property
    def num_bytes(self) -> int:
        return self.valuing.num_bytes

    def decode(self, sequence: Sequence) -> Decoding:
        particles = independent_rollouts(sequence, _PARTICLES, self.n)
        state = sequence.state.setdefault(_STATE, ParticleState())
        group = Rollouts(sequence, particles, sums_logprobs=self.valuing.reward.reads_logprobs)
        while True:
            yield from group.extend(lambda number: self._is_step_done(group, state, number))
            values = yield from self.valuing.values(sequence, group.texts())
            potentials = [self._potential(value) for value in values]
            weights = self._weights(potentials, state.potentials)
            if all(particle.finished for particle in particles):
                break
            ancestors = drawn(weights, sequence.noise, state.num_steps)
            self._resample(group, state, ancestors)
            state.potentials = [potentials[ancestor] for ancestor in ancestors]
            state.num_steps += 1
        group.release()
        first = int(np.argmax(values))
        if self.draws:
            first = drawn(weights, sequence.noise, state.num_steps)[0]
        emit_ranked(sequence, ranked(particles, values, first))

    def _is_step_done(self, group: Rollouts, state: ParticleState, number: int) -> bool:
        """Whether particle `number` has reached the end of its step. The last step has no end."""
        if state.num_steps == self.max_steps - 1:
            return False
        return self.step.is_done(group, number)

    def _potential(self, value: float) -> float:
        """The logarithm of the potential of a text with this reward."""
        clipped = min(max(value, CLIP), 1 - CLIP)
        return (math.log(clipped) - math.log1p(-clipped)) / self.temperature

    def _weights(self, potentials: list[float], before: list[float]) -> np.ndarray:
        """The probabilities with which the particles are drawn, float64 `[particles]`."""
        logs = np.array(potentials)
        if not self.replaces and before:
            logs = logs - np.array(before)
        weights: np.ndarray = np.exp(logs - logs.max())
        return weights / weights.sum()

    def _resample(self, group: Rollouts, state: ParticleState, ancestors: Seq[int]) -> None:
        """Replace the particles by copies of their ancestors, which begin a new step. A particle
        that takes the place of another one has new random numbers, since those of its place may
        have been used at its next positions."""
        base, count = group.sequence.noise, len(ancestors)
        noises = [
            group.rollouts[number].noise
            if ancestor == number
            else base.forked(1 + state.num_steps * count + number)
            for number, ancestor in enumerate(ancestors)
        ]
        group.resample(ancestors, noises)
        for number in range(count):
            group.begin_step(number)


def drawn(weights: np.ndarray, noise: Noise, step: int) -> list[int]:
    """As many independent draws as there are weights, which sum to 1."""
    uniform = noise.with_purpose("resample").uniform(range(len(weights)), step)
    found = np.searchsorted(np.cumsum(weights), uniform, side="right")
    return [min(int(number), len(weights) - 1) for number in found]


def ranked(particles: list[Rollout], values: list[float], first: int) -> list[RankedText]:
    """The texts that differ: particle `first`, then the others, the best first."""
    order = sorted(range(len(values)), key=lambda number: (number != first, -values[number]))
    texts: dict[tuple[int, ...], RankedText] = {}
    for number in order:
        one = particles[number]
        text = RankedText(values[number], one.tokens, one.logprobs)
        texts.setdefault(tuple(one.tokens), text)
    return list(texts.values())
