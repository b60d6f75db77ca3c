"""DRY (don't repeat yourself): a penalty on tokens that continue a repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from anydecode.catalogue import Card, Range, register
from anydecode.sampling.candidates import Candidates
from anydecode.sampling.history import History
from anydecode.sampling.preset import WORKS_WITH, SamplerPreset
from anydecode.sampling.processor import LogitsProcessor

#: Longer matches are penalised like matches of this length, so that the penalty stays finite.
MAX_MATCH = 64


class Dry(LogitsProcessor):
    """Subtracts multiplier * base^(length - allowed) from the logit of a token that would continue
    a repetition of `length` >= `allowed` tokens of prompt and output (DRY; p-e-w,
    text-generation-webui pull request 5677, 2024).

    Args:
        multiplier: Scale of the penalty.
        base: Growth of the penalty per repeated token.
        allowed: Minimum length of a penalised repetition.
        breakers: Token ids that end a match; they are never penalised.
        prompt: Token ids of the prompt.
    """

    is_stateful = True

    def __init__(
        self,
        multiplier: float,
        base: float = 1.75,
        allowed: int = 2,
        breakers: Iterable[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self.multiplier, self.base, self.allowed = multiplier, base, allowed
        self._breakers = frozenset(breakers)
        self._history = History(prompt)

    def apply(self, candidates: Candidates) -> Candidates:
        lengths = self._matches()
        if lengths:
            ids = np.array(sorted(lengths), np.int32)
            excess = np.array([lengths[int(token)] - self.allowed for token in ids])
            positions, found = candidates.positions(ids)
            penalty = self.multiplier * self.base ** excess[found].astype(np.float64)
            candidates.writable()[positions] -= penalty.astype(np.float32)
        return candidates

    def advance(self, token: int) -> None:
        self._history.append(token)

    def fork(self) -> Dry:
        branch = object.__new__(Dry)
        branch.__dict__.update(self.__dict__)
        branch._history = self._history.fork()
        return branch

    def _matches(self) -> dict[int, int]:
        """The penalised tokens, with the length of the longest repetition that each continues."""
        tokens = self._history.tokens
        ends = np.arange(len(tokens) - 1)  # where an earlier occurrence of the suffix ends
        longest: dict[int, int] = {}
        for length in range(1, MAX_MATCH + 1):
            ends = ends[ends >= length - 1]
            if not len(ends) or int(tokens[len(tokens) - length]) in self._breakers:
                break
            ends = ends[tokens[ends - length + 1] == tokens[len(tokens) - length]]
            if length >= self.allowed:
                following = np.unique(tokens[ends + 1]).tolist()
                longest.update((token, length) for token in following)
        return {token: n for token, n in longest.items() if token not in self._breakers}


@register(
    Card(
        "dry",
        "sampling",
        paper="Don't Repeat Yourself (p-e-w, text-generation-webui pull request 5677, 2024)",
        bibtex="@misc{dry2024, title = {Don't Repeat Yourself (DRY)}, author = {p-e-w},"
        " year = {2024},"
        " howpublished = {oobabooga/text-generation-webui, pull request 5677}}",
        exactness="lossy",
        summary="Penalises tokens that continue a repetition, more for longer repetitions.",
        works_with=WORKS_WITH,
        deviations=(
            "matches longer than 64 tokens count like 64, so that the penalty stays finite",
            "sequence breakers are token ids, and there are none by default",
        ),
        remote={"multiplier": Range(0, 100), "base": Range(1, 10), "allowed": Range(1, 64)},
    )
)
def dry(multiplier: float = 0.8, base: float = 1.75, allowed: int = 2) -> SamplerPreset:
    """A repetition of n >= `allowed` tokens is penalised by multiplier * base ** (n - allowed).

    Args:
        multiplier: Scale of the penalty.
        base: Growth of the penalty per repeated token.
        allowed: Minimum length of a penalised repetition.
    """
    options = {"dry_multiplier": multiplier, "dry_base": base, "dry_allowed": allowed}
    return SamplerPreset("dry", options, needs_temperature=False)
