"""DiffuSpec: the best causal path through a diffusion model's predictions (Li et al., "DiffuSpec:
Unlocking Diffusion Language Models for Speculative Decoding", arXiv:2510.02358).

The draft model predicts all positions of the draft in one pass. A beam search combines these
predictions with a 3-gram model into one path. The draft length adapts to the recent accepted
lengths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.decoders.framework.acceptance import Acceptance
from anydecode.decoders.framework.rejection import ACCEPTANCE_WORDS, acceptance_rule
from anydecode.decoders.framework.speculation import (
    DraftBudget,
    DraftSession,
    Proposal,
    SpeculationRound,
    Speculative,
)
from anydecode.decoders.speculative.diffusion_draft import DiffusionDrafter, DiffusionSession
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import TARGET, Sequence
from anydecode.scoring.tree import TokenTree


class Trigrams:
    """A 3-gram model of the text so far: p(token | two tokens before), with Witten-Bell backoff."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def read(self, tokens: Seq[int]) -> None:
        """Append `tokens` to the text."""
        for token in tokens:
            for order in range(3):
                if len(self.text) >= order:
                    self._counts[tuple(self.text[len(self.text) - order :])][token] += 1
            self.text.append(token)

    def log_probability(self, token: int, kv_cache: Seq[int], vocab_size: int) -> float:
        """Natural logarithm of p(token | context)."""
        p = 1.0 / vocab_size
        for order in range(3):
            counts = self._counts.get(tuple(kv_cache[len(kv_cache) - order :] if order else ()))
            if counts and len(kv_cache) >= order:
                total, num_types = sum(counts.values()), len(counts)
                p = (counts.get(token, 0) + num_types * p) / (total + num_types)
        return math.log(p)


def candidates(
    row: np.ndarray, mass: float, max_candidates: int, end_tokens: Seq[int]
) -> list[tuple[int, float]]:
    """The candidate tokens of one position, most probable first.

    Returns:
        Pairs of token and log-probability: the smallest set with total probability `mass`, at most
            `max_candidates`, and every token of `end_tokens` with probability above 0.
    """
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    p = weights / weights.sum()
    order = np.argsort(-p, kind="stable")[:max_candidates]
    count = min(int(np.searchsorted(np.cumsum(p[order]), mass)) + 1, len(order))
    tokens = order[:count].tolist()
    tokens += [end for end in end_tokens if end < len(p) and end not in tokens and p[end] > 0]
    return [(token, math.log(p[token])) for token in tokens]


def best_path(
    rows: Seq[np.ndarray],
    trigrams: Trigrams,
    *,
    mass: float,
    max_candidates: int,
    beams: int,
    weight: float,
    end_tokens: Seq[int],
) -> list[int]:
    """Beam search over the candidates of the positions.

    A path's score is the sum of `weight` log q + (1 - `weight`) log p, where q is the diffusion
    model's probability and p that of the 3-gram model. The search ends after the first position
    whose candidates by mass contain an end token.
    """
    kv_cache = trigrams.text[-2:]
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    for row in rows:
        options = candidates(row, mass, max_candidates, end_tokens)
        extended = [
            (
                score
                + weight * q
                + (1 - weight) * trigrams.log_probability(token, [*kv_cache, *path][-2:], len(row)),
                [*path, token],
            )
            for score, path in hypotheses
            for token, q in options
            if not path or path[-1] not in end_tokens
        ]
        finished = [(score, path) for score, path in hypotheses if path and path[-1] in end_tokens]
        hypotheses = sorted([*extended, *finished], key=lambda one: (-one[0], one[1]))[:beams]
        likely = {token for token, _ in candidates(row, mass, max_candidates, ())}
        if likely & set(end_tokens):
            break
    return hypotheses[0][1]


class AdaptiveLength(DraftBudget):
    """Draft length between `min_length` and `max_length`: the smoothed draft length, plus `step`
    while the smoothed accepted length reaches it."""

    def __init__(self, min_length: int, max_length: int, step: int, smoothing: float) -> None:
        self.min_length, self.max_length, self.step, self.smoothing = (
            min_length,
            max_length,
            step,
            smoothing,
        )
        self.generated = self.accepted = 0.0
        self._rounds = 0

    def size(self, sequence: Sequence) -> int:
        if not self._rounds:
            return self.min_length
        increment = self.step if self.accepted >= self.generated else 0
        return min(max(int(self.generated) + increment, self.min_length), self.max_length)

    def observe(self, round: SpeculationRound) -> None:
        """Update the lengths; rounds without a draft do not count."""
        if not len(round.tree):
            return
        decay = self.smoothing if self._rounds else 0.0
        self._rounds += 1
        self.generated = decay * self.generated + (1 - decay) * len(round.tree)
        self.accepted = decay * self.accepted + (1 - decay) * round.num_accepted


class PathDrafter(DiffusionDrafter):
    """Drafts one path per round."""

    def __init__(self, mass: float, max_candidates: int, beams: int, weight: float) -> None:
        if not 0 < mass <= 1 or max_candidates < 1 or beams < 1 or not 0 <= weight <= 1:
            raise InvalidRequestError(
                "diffuspec needs 0 < mass <= 1, candidates >= 1, beams >= 1 and 0 <= weight <= 1"
            )
        self.mass, self.max_candidates, self.beams, self.weight = (
            mass,
            max_candidates,
            beams,
            weight,
        )

    def open(self, sequence: Sequence) -> DraftSession:
        return _Session(sequence, self)


class _Session(DiffusionSession):
    def __init__(self, sequence: Sequence, drafter: PathDrafter) -> None:
        super().__init__(sequence)
        self.drafter = drafter
        self.trigrams = Trigrams()

    def propose(self, size: int) -> Proposal:
        sequence, drafter = self.sequence, self.drafter
        rows = yield from self.marginals(size)
        self.trigrams.read(sequence.all_tokens[len(self.trigrams.text) :])
        eos_ids = sequence.tokenizers[TARGET].eos_ids
        end_tokens = sorted(token for token in eos_ids if sequence.stops_at(token))
        path = best_path(
            rows,
            self.trigrams,
            mass=drafter.mass,
            max_candidates=drafter.max_candidates,
            beams=drafter.beams,
            weight=drafter.weight,
            end_tokens=end_tokens,
        )
        return TokenTree.chain(path)


@register(
    Card(
        "diffuspec",
        "speculative",
        paper="DiffuSpec (arXiv:2510.02358)",
        exactness="token-exact",
        summary=(
            "A diffusion model predicts the draft; a beam search with a 3-gram"
            " model selects one path."
        ),
        needs=("diffusion draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the 3-gram model counts this request's own text instead of a corpus",
            "verified token-exactly at every temperature (the paper: greedy)",
            "lengths default to 4 to 16 drafts in steps of 4, for small models (the paper: 20 to"
            " 30 in steps of 10)",
        ),
        bounds={"step": Range(0, 1024)},
        remote={
            "min_length": Range(1, 64),
            "max_length": Range(1, 64),
            "step": Range(1, 64),
            "smoothing": Range(0, 1),
            "mass": Range(0, 1),
            "candidates": Range(1, 32),
            "beams": Range(1, 16),
            "weight": Range(0, 100),
            "acceptance": ACCEPTANCE_WORDS,
        },
    )
)
def diffuspec(
    min_length: int = 4,
    max_length: int = 16,
    step: int = 4,
    smoothing: float = 0.5,
    mass: float = 0.8,
    candidates: int = 15,
    beams: int = 3,
    weight: float = 0.5,
    acceptance: str | Acceptance = "token-exact",
) -> Speculative:
    """DiffuSpec: beam-searched drafts from a diffusion model.

    Args:
        min_length: Minimum draft length.
        max_length: Maximum draft length.
        step: Increase of the draft length while drafts are fully accepted.
        smoothing: Weight of the past in the moving averages of the lengths, in [0, 1).
        mass: Total probability of the candidates of a position.
        candidates: Maximum number of candidates of a position.
        beams: Beam width.
        weight: Weight of the diffusion model in a path's score; the 3-gram model has the rest.
        acceptance: "token-exact", "rejection", "typical", "top-m" or "judge", or a rule.
    """
    if not 1 <= min_length <= max_length or step < 0 or not 0 <= smoothing < 1:
        raise InvalidRequestError(
            "diffuspec needs 1 <= min_length <= max_length, step >= 0, smoothing < 1"
        )
    drafter = PathDrafter(mass, candidates, beams, weight)
    return Speculative(
        drafter,
        max_length,
        acceptance_rule(acceptance),
        budget=lambda sequence: AdaptiveLength(min_length, max_length, step, smoothing),
    )
