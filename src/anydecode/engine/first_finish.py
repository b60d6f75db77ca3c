"""Of several samples of one request, those that finish first win; the rest is cancelled.

Agarwal et al., "First Finish Search: Efficient Test-Time Scaling in Large Language Models",
arXiv:2505.18149.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError

#: Tokens said so far, and why the sample ended (None: it has not).
Sample = tuple[int, str | None]


@register(
    Card(
        "first-finish",
        "serving",
        paper="Agarwal et al. 2025, First Finish Search, arXiv:2505.18149",
        exactness="token-exact",
        summary="Of n samples the first to finish win, counted in tokens; the rest is cancelled.",
        deviations=(
            "first is who needs the fewest tokens (ties: the lower number), not who is first by the"
            " clock, so that the winner does not depend on load; for that, a sample with fewer"
            " tokens than the winner goes on until it has as many",
            "an answer cut off by its length never wins while another stops by itself",
        ),
    )
)
class FirstFinish:
    """`first` samples win. One that stops by itself before `least` tokens does not count."""

    def __init__(self, first: int = 1, least: int = 0) -> None:
        if first < 1 or least < 0:
            raise InvalidRequestError(
                "first-finish needs first of 1 or more and least of 0 or more"
            )
        self.first, self.least = first, least

    def lost(self, samples: Seq[Sample]) -> list[int]:
        """The samples under way that can no longer be among the first."""
        ranked = self._ranked(samples)
        if len(ranked) < self.first:
            return []
        last = samples[ranked[self.first - 1]][0]
        return [i for i, (said, reason) in enumerate(samples) if reason is None and said >= last]

    def winners(self, samples: Seq[Sample]) -> list[int]:
        """The winning samples of a request that is over, the first one first. Where too few stopped
        by themselves, others fill up, those that were not cancelled before those that were."""
        ranked = self._ranked(samples)
        others = [i for i in range(len(samples)) if i not in set(ranked)]
        others.sort(key=lambda i: samples[i][1] == "cancelled")
        return [*ranked, *others][: self.first]

    def _ranked(self, samples: Seq[Sample]) -> list[int]:
        done = [
            i for i, (said, reason) in enumerate(samples) if reason == "stop" and said >= self.least
        ]
        return sorted(done, key=lambda i: (samples[i][0], i))
