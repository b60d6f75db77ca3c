"""Contrastive search (Su et al., "A Contrastive Framework for Neural Text Generation",
arXiv:2202.06417): likely tokens whose states do not repeat those before them."""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.decoder import Decoder
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.candidates import descending, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import ROOT

_KEY = "contrastive-search"


@register(
    Card(
        "contrastive-search",
        "sampling",
        paper="A Contrastive Framework for Neural Text Generation (arXiv:2202.06417)",
        exactness="lossy",
        summary="Of the k likeliest tokens the one whose state is least like any before it.",
        needs=("a model whose last states can be read",),
        works_with=("constraints", "penalties", "logprobs", "batches", "adapters"),
        deviations=(
            "candidates and their probabilities are what penalties and constraint leave",
            "ties go to the likelier candidate, then to the lower id",
        ),
    )
)
class ContrastiveSearch(Decoder):
    """Says argmax over the `k` likeliest tokens v of (1 - alpha) p(v) - alpha max_j cos(h_v, h_j),
    where h are states after the last layer and its norm, and j runs over prompt and text.

    The candidates are scored side by side as a token tree, one pass per token; the row of the one
    that is said brings the next candidates, so nothing is computed twice. Temperature and
    truncations play no part. With `alpha` 0 or `k` 1 it says what greedy decoding says.
    """

    can_sample = False

    def __init__(self, k: int = 4, alpha: float = 0.6) -> None:
        if k < 1 or not 0 <= alpha <= 1:
            raise InvalidRequestError("contrastive-search needs k >= 1 and alpha between 0 and 1")
        self.k = k
        self.alpha = alpha

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if sequence.companion_prompts:
            raise UnsupportedCombinationError(
                "contrastive-search does not work with guidance by a second prompt"
            )
        sequence.sampler = Sampler(1.0, sampler.pre_temperature, (), sampler.combiner)

    def decode(self, sequence: Sequence) -> Decoding:
        context = sequence.context()
        depth = context.pool.model.spec.num_layers
        states = _States(sequence.state.setdefault(_KEY, np.empty((0, 0), np.float32)))
        if context.length > len(states):  # a shared prefix has keys and values, but no states
            context.truncate(len(states))
        unscored = sequence.unscored()
        known = context.length
        if len(unscored) > 1:
            score = sequence.score(unscored[:-1], rows="all", hidden=(depth,))
            score.groups[0][-1].logits = False
            scores = yield score
            states.extend(scores, known)
        scores = yield sequence.score(unscored[-1:], hidden=(depth,))
        states.extend(scores, context.length - 1)
        row = 0
        while not sequence.finished:
            sequence.state[_KEY] = states.rows
            logits, sampler = scores.row(row), sequence.sampler
            tokens, chances = self._candidates(sampler, logits)
            position = sequence.length
            logits = logits.copy() if sequence.annotate is not None else logits
            scores = yield sequence.extend(
                tokens, [ROOT] * len(tokens), runner=TARGET, hidden=(depth,)
            )
            found = [_unit(scores.last_state(node)) for node in range(len(tokens))]
            likest = np.array([states.likest(state) for state in found])
            row = int(((1 - self.alpha) * chances - self.alpha * likest).argmax())
            context.retain([row])
            states.append(found[row])
            sequence.record_logprobs(logits, position, tokens[row], sampler)
            sequence.emit([tokens[row]])

    def _candidates(self, sampler: Sampler, logits: np.ndarray) -> tuple[list[int], np.ndarray]:
        """Tokens by falling probability, and their probabilities."""
        distribution = sampler.distribution(logits)
        positions = largest(distribution.scores, self.k)
        positions = positions[descending(distribution.scores[positions])]
        tokens = positions if distribution.tokens is None else distribution.tokens[positions]
        return [int(token) for token in tokens], distribution.probabilities()[positions]


class _States:
    """States of length 1, one per position."""

    def __init__(self, rows: np.ndarray) -> None:
        self._held = rows
        self._count = len(rows)

    @property
    def rows(self) -> np.ndarray:
        """float32 `[positions, hidden_size]`, a view."""
        return self._held[: self._count]

    def __len__(self) -> int:
        return self._count

    def extend(self, scores: Scores, first: int) -> None:
        """The rows of `scores` stand from position `first` on; those already here are passed."""
        for row in range(len(self) - first, len(scores)):
            self.append(_unit(scores.last_state(row)))

    def append(self, state: np.ndarray) -> None:
        if self._count == len(self._held):
            grown = np.empty((max(64, 2 * self._count), len(state)), np.float32)
            grown[: self._count] = self._held[: self._count].reshape(self._count, len(state))
            self._held = grown
        self._held[self._count] = state
        self._count += 1

    def likest(self, state: np.ndarray) -> float:
        """The largest cosine with a state before."""
        return float((self.rows @ state).max())


def _unit(state: np.ndarray) -> np.ndarray:
    unit: np.ndarray = state / max(float(np.linalg.norm(state)), 1e-12)
    return unit
