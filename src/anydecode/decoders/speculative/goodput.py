"""Expected tokens per cost of draft lengths: the costs of passes and drafts, and the expected
number of accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from anydecode import catalogue
from anydecode.decoders.framework.acceptance import Acceptance, is_token_exact
from anydecode.decoders.framework.speculation import (
    Drafter,
    SpeculationRound,
    Speculative,
)
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence


@dataclass(frozen=True)
class LinearCost:
    """The cost of a pass: `fixed` + `per_row` * rows + `per_position` * context, in any unit."""

    fixed: float = 1.0
    per_row: float = 0.1
    per_position: float = 0.0

    def seconds(self, rows: int, context: int) -> float:
        """The cost of a pass over `rows` rows after `context` positions."""
        return self.fixed + self.per_row * rows + self.per_position * context


class DraftCosts:
    """The costs of passes and drafts: `given` by the user, else those of the engine."""

    def __init__(self, given: LinearCost | None = None) -> None:
        self.given = given
        self.per_draft = 0.0

    def cost(self, sequence: Sequence, rows: int, lengths: Seq[int], drafts: int) -> float:
        """The cost of `drafts` drafts and a pass over `rows` rows of sequences with these
        lengths."""
        if self.given is not None:
            return self.given.seconds(rows, sum(lengths))
        mean_length = sum(lengths) // len(lengths)  # measured costs are by the context of a row
        return sequence.cost_model.seconds(rows, mean_length) + self.per_draft * drafts

    def observe(self, round: SpeculationRound) -> None:
        """Update the moving average of the seconds per draft."""
        if len(round.tree):
            self.per_draft += 0.1 * (round.draft_seconds / len(round.tree) - self.per_draft)


def user_cost(fixed: float | None, per_row: float, per_position: float = 0.0) -> LinearCost | None:
    """The costs given by the user; None without `fixed`, so that they are measured."""
    if fixed is None:
        return None
    if min(fixed, per_row, per_position) < 0 or fixed + per_row <= 0:
        raise InvalidRequestError(
            "the costs of a pass must not be negative, and fixed or per_row must be above 0"
        )
    return LinearCost(fixed, per_row, per_position)


def expected_tokens(rate: float, size: int) -> float:
    """Expected tokens of a round with a chain of `size` drafts, each accepted with probability
    `rate`: (1 - rate^(size + 1)) / (1 - rate)."""
    return float(size + 1) if rate >= 1 else (1 - rate ** (size + 1)) / (1 - rate)


def chain_drafter(choice: str, rule: Acceptance | None = None) -> Drafter:
    """The drafter of the speculative method "key" or "key:name=value,name=value".

    Args:
        choice: Key, and parameters.
        rule: The acceptance rule that it drafts for; None: `TokenExact`.

    Raises:
        InvalidRequestError: The method has no drafter, or `choice` has an acceptance rule too.
    """
    expected = "a method with a drafter"
    key, given = catalogue.parse(choice)
    if "acceptance" in given:
        raise InvalidRequestError(
            f"{choice!r} only drafts here: give acceptance= to the method that verifies"
        )
    if is_token_exact(rule):
        method: Speculative = catalogue.build_as(choice, expected, Speculative)
        return method.drafter
    catalogue.check_kind(key, expected, Speculative)
    built: Speculative = catalogue.build(key, **given, acceptance=rule)
    return built.drafter
