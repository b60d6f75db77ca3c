"""The best causal path through a diffusion model's proposals, of adaptive length (Li et al.,
"DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding", arXiv:2510.02358)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.decoders.speculative.core import (
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
    """Counts of the text so far; p(token | two before), backing off by Witten and Bell."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def read(self, tokens: Seq[int]) -> None:
        """The text goes on with `tokens`."""
        for token in tokens:
            for order in range(3):
                if len(self.text) >= order:
                    self._counts[tuple(self.text[len(self.text) - order :])][token] += 1
            self.text.append(token)

    def log_probability(self, token: int, before: Seq[int], vocab_size: int) -> float:
        """Natural logarithm."""
        p = 1.0 / vocab_size
        for order in range(3):
            counts = self._counts.get(tuple(before[len(before) - order :] if order else ()))
            if counts and len(before) >= order:
                total, kinds = sum(counts.values()), len(counts)
                p = (counts.get(token, 0) + kinds * p) / (total + kinds)
        return math.log(p)


def candidates(row: np.ndarray, mass: float, most: int, ends: Seq[int]) -> list[tuple[int, float]]:
    """The smallest set of tokens with probability `mass` together, at most `most`, and every end of
    text; each with log p, likeliest first."""
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    p = weights / weights.sum()
    order = np.argsort(-p, kind="stable")[:most]
    count = min(int(np.searchsorted(np.cumsum(p[order]), mass)) + 1, len(order))
    tokens = order[:count].tolist()
    tokens += [end for end in ends if end < len(p) and end not in tokens and p[end] > 0]
    return [(token, math.log(p[token])) for token in tokens]


def best_path(
    rows: Seq[np.ndarray],
    model: Trigrams,
    *,
    mass: float,
    most: int,
    beams: int,
    weight: float,
    ends: Seq[int],
) -> list[int]:
    """Beam search over the positions' candidates by `weight` log q + (1 - `weight`) log p of the
    trigrams, summed; it ends behind the first position whose candidates by mass hold an end."""
    before = model.text[-2:]
    held: list[tuple[float, list[int]]] = [(0.0, [])]
    for row in rows:
        options = candidates(row, mass, most, ends)
        grown = [
            (
                score
                + weight * q
                + (1 - weight) * model.log_probability(token, [*before, *path][-2:], len(row)),
                [*path, token],
            )
            for score, path in held
            for token, q in options
            if not path or path[-1] not in ends
        ]
        finished = [(score, path) for score, path in held if path and path[-1] in ends]
        held = sorted([*grown, *finished], key=lambda one: (-one[0], one[1]))[:beams]
        likely = {token for token, _ in candidates(row, mass, most, ())}
        if likely & set(ends):
            break
    return held[0][1]


class AdaptiveLength(DraftBudget):
    """The next draft's length: the smoothed generated length, and `step` more while the smoothed
    accepted length reaches it; between `fewest` and `most`."""

    def __init__(self, fewest: int, most: int, step: int, smoothing: float) -> None:
        self.fewest, self.most, self.step, self.smoothing = fewest, most, step, smoothing
        self.generated = self.accepted = 0.0
        self._rounds = 0

    def size(self, sequence: Sequence) -> int:
        if not self._rounds:
            return self.fewest
        more = self.step if self.accepted >= self.generated else 0
        return min(max(int(self.generated) + more, self.fewest), self.most)

    def observe(self, round: SpeculationRound) -> None:
        keep = self.smoothing if self._rounds else 0.0
        self._rounds += 1
        self.generated = keep * self.generated + (1 - keep) * len(round.tree)
        self.accepted = keep * self.accepted + (1 - keep) * round.num_accepted


class PathDrafter(DiffusionDrafter):
    """One path per round."""

    def __init__(self, mass: float, most: int, beams: int, weight: float) -> None:
        if not 0 < mass <= 1 or most < 1 or beams < 1 or not 0 <= weight <= 1:
            raise InvalidRequestError(
                "diffuspec needs 0 < mass <= 1, candidates and beams of 1 or more, 0 <= weight <= 1"
            )
        self.mass, self.most, self.beams, self.weight = mass, most, beams, weight

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
        known = sequence.tokenizers[TARGET].eos_ids
        ends = sorted(token for token in known if sequence.stops_at(token))
        path = best_path(
            rows,
            self.trigrams,
            mass=drafter.mass,
            most=drafter.most,
            beams=drafter.beams,
            weight=drafter.weight,
            ends=ends,
        )
        return TokenTree.chain(path)


@register(
    Card(
        "diffuspec",
        "speculative",
        paper="DiffuSpec (arXiv:2510.02358)",
        exactness="token-exact",
        summary="A diffusion model proposes, a beam search finds the path that reads like text.",
        needs=("diffusion draft model",),
        works_with=("constraints", "samplers", "guidance", "batches", "adapters"),
        deviations=(
            "the 3-gram model counts this request's own text instead of a corpus",
            "verified token-exactly at every temperature (the paper: greedy)",
            "lengths default to 4 to 16 drafts in steps of 4, for small models (the paper: 20 to 30"
            " in steps of 10)",
        ),
    )
)
def diffuspec(
    fewest: int = 4,
    most: int = 16,
    step: int = 4,
    smoothing: float = 0.5,
    mass: float = 0.8,
    candidates: int = 15,
    beams: int = 3,
    weight: float = 0.5,
) -> Speculative:
    """Drafts of `fewest` to `most` tokens. Candidates of a position have probability `mass`
    together, at most `candidates`; `weight` is the diffusion model's share of a path's score."""
    if not 1 <= fewest <= most or step < 0 or not 0 <= smoothing < 1:
        raise InvalidRequestError("diffuspec needs 1 <= fewest <= most, step >= 0, smoothing < 1")
    drafter = PathDrafter(mass, candidates, beams, weight)
    return Speculative(
        drafter, most, budget=lambda sequence: AdaptiveLength(fewest, most, step, smoothing)
    )
