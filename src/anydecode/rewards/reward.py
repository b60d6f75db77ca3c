"""The interface of rewards: from texts to numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from anydecode.catalogue import Bounds
from anydecode.errors import InvalidRequestError


@dataclass(frozen=True)
class SampledText:
    """A text that a reward values.

    Attributes:
        text: The generated text, without the prompt.
        num_tokens: How many tokens it has.
        logprob: The sum of their log-probabilities under the model, at temperature 1 and without
            penalties; NaN if the reward does not read it (`Reward.reads_logprobs`).
        is_complete: Whether the text has ended by itself. False for a text that was cut off by its
            limit, and for one that goes on.
    """

    text: str
    num_tokens: int
    logprob: float
    is_complete: bool


class Reward(ABC):
    """Values texts; higher is better. The value of a text may depend on the prompt and the text
    only, since values are kept and texts are valued in batches of any size.

    Attributes:
        reads_logprobs: Whether it reads `SampledText.logprob`.
        is_fast: Whether it needs less than about a millisecond for a batch, and never waits. Others
            run on a thread of their own, while the engine serves other requests.
        seconds: How long a batch may take for each of its texts, if the reward is not fast.
        bounds: The smallest and the largest value, or None for any number.
        remote: The parameters that a request to a server may set, as in `Card.remote`; None if
            requests may not name the reward.
    """

    reads_logprobs: ClassVar[bool] = False
    is_fast: ClassVar[bool] = False
    seconds: float = 30.0
    bounds: tuple[float, float] | None = None
    remote: ClassVar[Mapping[str, Bounds] | None] = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    @abstractmethod
    def values(self, prompt: str, texts: Seq[SampledText]) -> Seq[float]:
        """One finite number per text.

        Args:
            prompt: The text of the prompt.
            texts: At least one.
        """


def check_seconds(seconds: float) -> None:
    """Raise `InvalidRequestError` unless a reward may take this long."""
    if not isinstance(seconds, Real) or not seconds > 0:
        raise InvalidRequestError(f"a reward needs seconds above 0, not {seconds!r}")


class FunctionReward(Reward):
    """A Python function `(prompt, texts) -> values` as a reward.

    Args:
        function: The function.
        seconds: How long a batch may take for each of its texts.
        bounds: The smallest and the largest value, or None for any number.
    """

    def __init__(
        self,
        function: Callable[[str, list[str]], Seq[float]],
        seconds: float = 30.0,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        check_seconds(seconds)
        self.function = function
        self.seconds = seconds
        self.bounds = bounds

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def values(self, prompt: str, texts: Seq[SampledText]) -> Seq[float]:
        return self.function(prompt, [one.text for one in texts])
