"""First-finish search: of several samples of one request, the first to finish are kept and the
others are cancelled.

Agarwal et al., "First Finish Search: Efficient Test-Time Scaling in Large Language Models",
arXiv:2505.18149.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.arguments import checked_arguments
from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError

#: Number of tokens generated so far, and the finish reason (None while the sample runs).
SampleState = tuple[int, str | None]


@register(
    Card(
        "first-finish",
        "serving",
        paper="Agarwal et al. 2025, First Finish Search, arXiv:2505.18149",
        exactness="token-exact",
        use="llm.generate(prompt, n=4, temperature=1.0, first_finish=1)",
        summary="Keeps the samples that finish with the fewest tokens and cancels the others.",
        deviations=(
            "the first sample is the one with the fewest tokens (ties: the lower index), not the"
            " first by wall-clock time, so that the result does not depend on load; a sample with"
            " fewer tokens than the winner therefore continues until it has as many",
            "a sample that ends by its length limit never wins against one that stops by itself",
        ),
    )
)
class FirstFinish:
    """Selects the winning samples of a request.

    Args:
        first: Number of samples to keep.
        min_tokens: Samples that stop with fewer tokens do not count.
    """

    @checked_arguments()
    def __init__(self, first: int = 1, min_tokens: int = 0) -> None:
        if first < 1 or min_tokens < 0:
            raise InvalidRequestError(
                f"first is {first} and min_tokens is {min_tokens}; first-finish needs first of 1 or"
                " more and min_tokens of 0 or more"
            )
        self.first, self.min_tokens = first, min_tokens

    def lost(self, samples: Seq[SampleState]) -> list[int]:
        """The running samples that can no longer be among the first."""
        ranked = self._ranked(samples)
        if len(ranked) < self.first:
            return []
        last = samples[ranked[self.first - 1]][0]
        return [i for i, (count, reason) in enumerate(samples) if reason is None and count >= last]

    def winners(self, samples: Seq[SampleState]) -> list[int]:
        """The winning samples of a finished request, best first. If too few stopped by themselves,
        others fill up, those that were not cancelled first."""
        ranked = self._ranked(samples)
        others = [i for i in range(len(samples)) if i not in set(ranked)]
        others.sort(key=lambda i: samples[i][1] == "cancelled")
        return [*ranked, *others][: self.first]

    def _ranked(self, samples: Seq[SampleState]) -> list[int]:
        done = [
            i
            for i, (count, reason) in enumerate(samples)
            if reason == "stop" and count >= self.min_tokens
        ]
        return sorted(done, key=lambda i: (samples[i][0], i))
