"""Contrastive search (Su et al., "A Contrastive Framework for Neural Text Generation",
arXiv:2202.06417).

Each step takes the `k` most likely tokens and emits the one with the best balance of a high
probability and a hidden state that is dissimilar to all hidden states before it.
"""

from __future__ import annotations

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.decoder import Decoder, Requirements
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.sampling.candidates import descending, largest
from anydecode.sampling.sampler import Sampler
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.state import StateKey
from anydecode.scoring.tree import ROOT

#: float32 `[length, hidden_size]`, the hidden states of all scored tokens.
_KEY: StateKey[np.ndarray] = StateKey("contrastive-search", "states")


@register(
    Card(
        "contrastive-search",
        "sampling",
        paper="A Contrastive Framework for Neural Text Generation (arXiv:2202.06417)",
        exactness="lossy",
        summary="Of the k likeliest tokens, prefers one whose hidden state is unlike earlier ones.",
        needs=("a model whose last states can be read",),
        works_with=("constraints", "penalties", "logprobs", "batches", "adapters"),
        deviations=(
            "candidates and their probabilities are those after penalties and constraints",
            "of candidates with equal scores the likelier one wins, then the lower token id",
        ),
        remote={"k": Range(1, 32), "alpha": Range(0, 1)},
    )
)
class ContrastiveSearch(Decoder):
    """Emits the argmax of `(1 - alpha) * p(v) - alpha * max_j cos(h_v, h_j)` over the `k` likeliest
    tokens v, where h are hidden states after the last layer and its norm, and j runs over the
    prompt and the generated text.

    All candidates of a step are scored in one forward pass, as a token tree. The row of the emitted
    candidate gives the next candidates, so nothing is computed twice. Temperature and truncations
    are ignored. With `alpha` 0 or `k` 1 the output is that of greedy decoding.

    Args:
        k: The number of candidates.
        alpha: The weight of the similarity penalty, between 0 and 1.
    """

    requirements = Requirements(can_sample=False, max_texts=1)

    def __init__(self, k: int = 4, alpha: float = 0.6) -> None:
        if k < 1 or not 0 <= alpha <= 1:
            raise InvalidRequestError(
                f"contrastive-search needs k >= 1 and 0 <= alpha <= 1, not k={k}, alpha={alpha}"
            )
        self.k = k
        self.alpha = alpha

    def prepare(self, sequence: Sequence) -> None:
        sampler = sequence.sampler
        if sequence.companion_prompts:
            raise UnsupportedCombinationError(
                "contrastive-search does not work with guidance, which needs a second prompt"
            )
        pool, num_left = sequence.pool(), sequence.remaining
        count = min(self.k, pool.model.spec.vocab_size)
        num_needed = len(sequence.prompt) + len(sequence.tokens) + num_left - 1 + count
        if num_left and num_needed > pool.num_slots:
            raise InvalidRequestError(
                f"contrastive-search scores {count} candidates for each of up to {num_left} tokens:"
                f" it needs {num_needed} positions of the cache, which has {pool.num_slots}; lower"
                " max_tokens or k, or increase cache_positions"
            )
        sequence.sampler = Sampler(1.0, sampler.pre_temperature, (), sampler.combiner)

    def decode(self, sequence: Sequence) -> Decoding:
        kv_cache = sequence.kv_cache()
        depth = kv_cache.pool.model.spec.num_layers
        states = States(sequence.state.setdefault(_KEY, np.empty((0, 0), np.float32)))
        if kv_cache.length > len(
            states
        ):  # a shared prefix has keys and values, but no hidden states
            kv_cache.truncate(len(states))
        unscored = sequence.unscored()
        first = kv_cache.length
        if len(unscored) > 1:
            score = sequence.score(unscored[:-1], rows="all", hidden=(depth,))
            score.groups[0][-1].logits = False
            scores = yield score
            states.extend(scores, first)
        scores = yield sequence.score(unscored[-1:], hidden=(depth,))
        states.extend(scores, kv_cache.length - 1)
        row = 0
        while not sequence.finished:
            sequence.state[_KEY] = states.rows
            logits, sampler = scores.row(row), sequence.sampler
            tokens, probabilities = self._candidates(sampler, logits)
            position = sequence.length
            logits = logits.copy() if sequence.compute_logprobs is not None else logits
            scores = yield sequence.extend(
                tokens, [ROOT] * len(tokens), runner=TARGET, hidden=(depth,)
            )
            candidate_states = [unit(scores.last_state(node)) for node in range(len(tokens))]
            similarity = np.array([states.max_cosine(state) for state in candidate_states])
            row = int(((1 - self.alpha) * probabilities - self.alpha * similarity).argmax())
            kv_cache.retain([row])
            states.append(candidate_states[row])
            sequence.record_logprobs(logits, position, tokens[row], sampler)
            sequence.emit([tokens[row]])

    def _candidates(self, sampler: Sampler, logits: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The `k` most likely tokens in descending order, and their probabilities."""
        distribution = sampler.distribution(logits)
        index = largest(distribution.scores, self.k)
        index = index[descending(distribution.scores[index])]
        tokens = index if distribution.tokens is None else distribution.tokens[index]
        return [int(token) for token in tokens], distribution.probabilities()[index]


class States:
    """Hidden states normalized to length 1, one per position."""

    def __init__(self, rows: np.ndarray) -> None:
        self._buffer = rows
        self._count = len(rows)

    @property
    def rows(self) -> np.ndarray:
        """float32 `[positions, hidden_size]`, a view."""
        return self._buffer[: self._count]

    def __len__(self) -> int:
        return self._count

    def extend(self, scores: Scores, first: int) -> None:
        """Append the states of `scores` from position `first` on; skip those stored already."""
        for row in range(len(self) - first, len(scores)):
            self.append(unit(scores.last_state(row)))

    def append(self, state: np.ndarray) -> None:
        if self._count == len(self._buffer):
            grown = np.empty((max(64, 2 * self._count), len(state)), np.float32)
            grown[: self._count] = self._buffer[: self._count].reshape(self._count, len(state))
            self._buffer = grown
        self._buffer[self._count] = state
        self._count += 1

    def max_cosine(self, state: np.ndarray) -> float:
        """The largest cosine similarity to an earlier state."""
        return float((self.rows @ state).max())


def unit(state: np.ndarray) -> np.ndarray:
    """`state`, normalized to length 1."""
    normalized: np.ndarray = state / max(float(np.linalg.norm(state)), 1e-12)
    return normalized
