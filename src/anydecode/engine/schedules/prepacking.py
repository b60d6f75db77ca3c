"""Prompts packed into passes of similar length.

Zhao, Israel, Van den Broeck and Grover, "Prepacking: A Simple Method for Fast Prefilling and
Increased Throughput in Large Language Models", arXiv:2404.09529.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import Schedule, ScheduledSpan, whole
from anydecode.engine.schedules.pacing import is_prompt
from anydecode.scoring.score import ScoreRequest


def pack(lengths: Seq[int], capacity: int) -> list[list[int]]:
    """Pack items of `lengths` into bins of `capacity`, the longest first, each into the emptiest
    bin with enough space or else a new one. Returns the item indices of each bin."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b, load in enumerate(loads) if load + lengths[index] <= capacity]
        if fitting:
            chosen = min(fitting, key=lambda b: loads[b])
        else:
            chosen = len(bins)
            bins.append([])
            loads.append(0)
        bins[chosen].append(index)
        loads[chosen] += lengths[index]
    return bins


@register(
    Card(
        "prepacking",
        "serving",
        paper="Zhao et al. 2024, Prepacking, arXiv:2404.09529",
        exactness="token-exact",
        use="LLM(schedule='prepacking') or anydecode serve --schedule prepacking",
        summary="Packs waiting prompts into bins as long as the longest prompt; one bin per pass.",
        deviations=(
            "bins run one after the other, each as one pass without padding, not in parallel as the"
            " padded rows of one batch",
            "a bin has at least 64 rows, so that many short prompts do not need many passes",
            "a prompt's last token runs with it, so its first new token needs no further pass",
        ),
    )
)
class Prepacking(Schedule):
    """Runs all decodes and one bin of whole prompts in every pass.

    Args:
        capacity: Minimum size of a bin in rows; a bin is at least as large as the longest prompt.
        short: Other requests of more rows count as prompts too.
    """

    def __init__(self, capacity: int = 64, short: int = 64) -> None:
        self.capacity = capacity
        self.short = short
        self._bins: list[list[ScoreRequest]] = []

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        current = set(waiting)
        self._bins = [kept for bin in self._bins if (kept := [s for s in bin if s in current])]
        decodes: list[ScoreRequest] = []
        prompts: list[ScoreRequest] = []
        for request in waiting:
            is_long = request.num_rows > self.short or is_prompt(request)
            (prompts if is_long else decodes).append(request)
        if not self._bins and prompts:
            lengths = [request.num_rows for request in prompts]
            packed = pack(lengths, max(self.capacity, *lengths))
            self._bins = [[prompts[i] for i in sorted(bin)] for bin in packed]
        for request in [*decodes, *(self._bins.pop(0) if self._bins else ())]:
            yield from whole(request)
