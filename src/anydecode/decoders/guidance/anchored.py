"""Anchored decoding (He et al., "Anchored Decoding: Provably Reducing Copyright Risk for Any
Language Model", arXiv:2602.07120).

Tokens are sampled from a mixture of a risky model and a safe one that is as near to the risky model
as a budget of divergence from the safe one permits.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.decoders.framework.two_models import DRAFT, refuse_guidance
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.candidates import Distribution, log_sum_exp
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import ActionResult, DecoderAction, Decoding
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.teacher_forcing import score_tokens

#: How many of the prompt's tokens count for its debt: those that the risky model prefers most.
NUM_DEBTS = 5
#: The solver ends when it knows the weight to this.
_WIDTH = 1e-6
_NEWTON_STEPS, _BISECTIONS = 20, 12


@dataclass(frozen=True)
class Account:
    """The budget of a text, in nats: what the prompt has used, and what the tokens have."""

    debt: float
    spent: float = 0.0


_STATE: StateKey[Account] = StateKey("anchored", "account")


@register(
    Card(
        "anchored",
        "alignment",
        paper="Anchored Decoding: Provably Reducing Copyright Risk for Any Language Model"
        " (arXiv:2602.07120)",
        exactness="lossy",
        summary="Samples from a model as far as a budget of divergence from a safe model permits.",
        needs=("draft model",),
        works_with=("constraints", "penalties", "logprobs", "batches", "adapters"),
        deviations=(
            "tokens that one of the models excludes are excluded; the divergence is from the safe"
            " model under the same penalties and constraint, and at the same temperature",
            "at temperature 0 the most probable token of the mixture at temperature 1 is taken, for"
            " which there is no guarantee",
        ),
        missing=("the variant over bytes, for models with different tokens",),
        remote={"budget": Range(0, 100)},
    )
)
class Anchored(Decoder):
    """Samples each token from `q`, proportional to `safe ** (1 - w) * risky ** w`, where the
    weight w from 0 to 1 is the largest for which the divergence KL(q, safe) is within the budget.

    The target is the risky model, the draft model the safe one. Token t, from 1, has the budget
    `t * budget - debt - spent`: what earlier tokens have left is kept. The debt is the mean of the
    five largest log-ratios of the prompt's tokens, negative ones as 0. So the divergence of all
    texts of T tokens from those of the safe model is at most `T * budget`, in expectation over the
    texts and for each text as the sum of its tokens' divergences.

    With budget 0 the text is sampled from the safe model, and with a large one from the risky one.

    Args:
        budget: In nats per token (the paper's k).
    """

    requirements = Requirements(runners=(DRAFT,))

    def __init__(self, budget: float = 0.15) -> None:
        if budget < 0:
            raise InvalidRequestError(f"anchored needs a budget of at least 0, not {budget}")
        self.budget = budget

    def prepare(self, sequence: Sequence) -> None:
        refuse_guidance(sequence, "anchored")
        if sequence.sampler.post_temperature:
            raise UnsupportedCombinationError(
                "anchored does not work with truncations such as top_p, which would exceed its"
                " budget: leave them out"
            )

    def decode(self, sequence: Sequence) -> Decoding:
        if _STATE not in sequence.state:
            sequence.state[_STATE] = Account((yield from debt(sequence)))
        while not sequence.finished:
            target, other = yield [sequence.score(), sequence.score(runner=DRAFT)]
            tokens, risky, safe = shared(sequence.sampler, target.row(-1), other.row(-1))
            account = sequence.state[_STATE]
            granted = (len(sequence.tokens) + 1) * self.budget - account.debt - account.spent
            scores, divergence = tilted(risky, safe, max(0.0, granted))
            token = self._sample(sequence, tokens, scores)
            sequence.record_logprobs(target.row(-1), sequence.length, token, sequence.sampler)
            sequence.state[_STATE] = replace(account, spent=account.spent + divergence)
            sequence.emit([token])

    @staticmethod
    def _sample(sequence: Sequence, tokens: np.ndarray, scores: np.ndarray) -> int:
        if sequence.sampler.is_greedy:
            return int(tokens[scores.argmax()])
        return Distribution(tokens, scores).sample(sequence.noise, sequence.length)


def debt(sequence: Sequence) -> Generator[DecoderAction, ActionResult, float]:
    """The mean of the `NUM_DEBTS` largest log-ratios of the prompt's tokens but the first and the
    special ones, of which negative ones count as 0, in nats."""
    logs: dict[str, list[float]] = {}
    for runner in (TARGET, DRAFT):
        found = logs[runner] = []

        def on_row(row: np.ndarray, token: int, found: list[float] = found) -> None:
            found.append(float(row[token]) - log_sum_exp(row) if token < len(row) else -math.inf)

        yield from score_tokens(sequence, sequence.prompt, 1, on_row, runner)
    tokenizer = sequence.tokenizers[TARGET]
    ratios = [
        max(0.0, risky - safe)
        for token, risky, safe in zip(sequence.prompt[1:], logs[TARGET], logs[DRAFT], strict=True)
        if tokenizer.token_bytes(token)
    ]
    largest = sorted(ratios)[-NUM_DEBTS:]
    return sum(largest) / len(largest) if largest else 0.0


def shared(
    sampler: Sampler, risky: np.ndarray, safe: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that both models allow, and their scores under each after penalties, constraint
    and temperature.

    Returns:
        Ids int32, ascending, and the logits of the risky and the safe model divided by the
        temperature, float64, all `[tokens]`.
    """
    size = min(len(risky), len(safe))
    plain = Sampler(1.0, sampler.pre_temperature, combiner=sampler.combiner)
    temperature = 1.0 if sampler.is_greedy else sampler.temperature
    dense = []
    for row in (risky[:size], safe[:size]):
        distribution = plain.distribution(row)
        scores = np.full(size, -np.inf)
        scores[slice(None) if distribution.tokens is None else distribution.tokens] = (
            distribution.scores
        )
        dense.append(scores / temperature)
    tokens = np.flatnonzero((dense[0] > -np.inf) & (dense[1] > -np.inf)).astype(np.int32)
    if not len(tokens):
        raise UnsupportedCombinationError("anchored: the models have no possible token in common")
    return tokens, dense[0][tokens], dense[1][tokens]


def tilted(risky: np.ndarray, safe: np.ndarray, budget: float) -> tuple[np.ndarray, float]:
    """The mixture with the largest weight of the risky model whose divergence from the safe one is
    at most `budget`.

    Args:
        risky: Scores of tokens under the risky model, float64 `[tokens]`.
        safe: Scores under the safe one.
        budget: In nats.

    Returns:
        The scores of the mixture, and its divergence, which never exceeds the budget.
    """
    if budget == 0:
        return safe, 0.0
    divergence, _ = _divergence(risky, safe, 1.0)
    if divergence <= budget:
        return risky, max(0.0, divergence)
    low, high, weight = 0.0, 1.0, min(max(budget / (budget + 1), 1e-4), 1 - 1e-4)
    kept = 0.0
    for step in range(_NEWTON_STEPS + _BISECTIONS):
        divergence, slope = _divergence(risky, safe, weight)
        if divergence <= budget:
            low, kept = weight, divergence
        else:
            high = weight
        if high - low < _WIDTH:
            break
        weight = weight + (budget - divergence) / slope if slope > 0 else low
        if step >= _NEWTON_STEPS or not low < weight < high:
            weight = (low + high) / 2
    return safe + low * (risky - safe), max(0.0, kept)


def _divergence(risky: np.ndarray, safe: np.ndarray, weight: float) -> tuple[float, float]:
    """KL(q, safe) of the mixture q with this weight, and its derivative by the weight."""
    ratio = (risky - risky.max()) - (safe - safe.max())
    tilted_logs = _normalized(safe) + weight * ratio
    largest = float(tilted_logs.max())
    q = np.exp(tilted_logs - largest)
    total = float(q.sum())
    q /= total
    mean = float(q @ ratio)
    divergence = weight * mean - largest - math.log(total)
    return divergence, weight * float(q @ np.square(ratio - mean))


def _normalized(scores: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 `[tokens]`."""
    shifted = scores - scores.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result
