"""What the trainings of small draft models are made of."""

from __future__ import annotations

from dataclasses import dataclass

from anydecode.errors import InvalidRequestError

#: Divergences of the draft model's distribution from the target's.
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd", "tv")
#: Where the answers are from that the draft model does not write itself.
SOURCES = ("target", "fixed")


@dataclass(frozen=True)
class DraftRecipe:
    """A draft model of the target's vocabulary, and how it learns.

    Attributes:
        name: The method's key.
        layers: Number of its layers.
        width: Its hidden size, with random weights at first. None: it begins as the target's first
            layers, whose embedding and head it keeps.
        objective: One of `DIVERGENCES`, or "cross-entropy": the tokens of the answers are learned
            and the target's distributions are not.
        beta: The weight of the target in the mixture of the Jensen-Shannon divergence.
        data: One of `SOURCES`.
        on_policy: Probability that the answers of a step are the draft model's own.
        pretraining: The part of the budget in which it learns the tokens of texts first.
        whole_texts: Whether these are whole texts; otherwise the answers of the second part.
        mixed: The last part of the pre-training, in which half of the texts are code, if there is
            any.
    """

    name: str
    layers: int
    width: int | None = None
    objective: str = "cross-entropy"
    beta: float = 0.5
    data: str = "target"
    on_policy: float = 0.0
    pretraining: float = 0.0
    whole_texts: bool = False
    mixed: float = 0.0

    def __post_init__(self) -> None:
        if self.objective not in (*DIVERGENCES, "cross-entropy"):
            raise InvalidRequestError(
                f"{self.name}: divergence is {self.objective!r}; choose from"
                f" {', '.join(DIVERGENCES)}"
            )
        if self.data not in SOURCES:
            raise InvalidRequestError(
                f"{self.name}: data is {self.data!r}; choose from {', '.join(SOURCES)}"
            )
        shares = self.on_policy, self.pretraining, self.mixed
        if not (0 < self.beta < 1 and all(0 <= share <= 1 for share in shares)):
            raise InvalidRequestError(
                f"{self.name} needs 0 < beta < 1, and shares of the budget and of answers from 0"
                " to 1"
            )
