"""Chunked prefill beside running decodes.

SARATHI: Agrawal et al., "Efficient LLM Inference by Piggybacking Decodes with Chunked Prefills",
arXiv:2308.16369. Sarathi-Serve: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve", OSDI 2024, arXiv:2403.02310.
"""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import RowBudget, Schedule, ScheduledSpan, fill, whole
from anydecode.engine.schedules.pacing import checked_stretch, is_prompt, rows_beside
from anydecode.scoring.score import ScoreRequest


def begun(score: ScoreRequest) -> bool:
    """Whether some rows of `score` have run in an earlier pass."""
    return any(span.done for spans in score.groups for span in spans)


class _Chunked(Schedule):
    """`budget` rows a pass; scores of more than `short` rows count as prompts. Without a `budget`,
    prompts get the rows that stretch the time between tokens to `stretch` times what it is without
    them, by what passes cost on this machine, and every prompt is one, however short."""

    def __init__(self, budget: int | None = None, short: int = 64, stretch: float = 2.0) -> None:
        self.budget = None if budget is None else RowBudget(budget).left
        self.short, self.stretch = short, checked_stretch(stretch)

    def split(
        self, waiting: list[ScoreRequest]
    ) -> tuple[list[ScoreRequest], list[ScoreRequest], list[ScoreRequest]]:
        """Decodes, prompts under way, prompts not begun; each in the order they came."""
        resumed = [score for score in waiting if begun(score)]
        fresh = [score for score in waiting if not begun(score)]
        decodes: list[ScoreRequest] = []
        prompts: list[ScoreRequest] = []
        for score in fresh:
            (prompts if self._is_prompt(score) else decodes).append(score)
        return decodes, resumed, prompts

    def _is_prompt(self, score: ScoreRequest) -> bool:
        return score.num_rows > self.short or (self.budget is None and is_prompt(score))

    def prefill(
        self, decodes: list[ScoreRequest], prompts: list[ScoreRequest]
    ) -> Iterator[ScheduledSpan]:
        """All `decodes`, then as much of `prompts` as the budget leaves."""
        rows = 0
        for score in decodes:
            rows += score.num_rows
            yield from whole(score)
        if prompts:
            left = (
                rows_beside(decodes, prompts, self.stretch)
                if self.budget is None
                else self.budget - rows
            )
            if left > 0:
                yield from fill(prompts, RowBudget(left, started=rows > 0))


@register(
    Card(
        "sarathi",
        "serving",
        paper="Agrawal et al. 2023, SARATHI, arXiv:2308.16369",
        exactness="token-exact",
        summary="One chunk of one prompt a pass, beside every decode.",
        deviations=(
            "the chunk is what the decodes leave of the budget; it is not rounded to matrix tiles,"
            " which the row kernels do not have",
            "without a budget, the chunk follows from what passes cost on this machine",
            "a draft tree counts with all its rows",
        ),
    )
)
class Sarathi(_Chunked):
    """Every pass has all decodes and at most one prompt's next chunk."""

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes, resumed, fresh = self.split(waiting)
        yield from self.prefill(decodes, [*resumed, *fresh][:1])


@register(
    Card(
        "sarathi-serve",
        "serving",
        paper="Agrawal et al. 2024, Sarathi-Serve, OSDI 2024, arXiv:2403.02310",
        exactness="token-exact",
        summary="A row budget per pass: decodes, then prompts under way, then new ones.",
        deviations=(
            "memory is taken chunk by chunk, not for the whole prompt on admission",
            "without a budget, chunks are what keeps the time between tokens within `stretch` times"
            " what it is without prompts, pass by pass, not one profiled number of tokens",
            "a draft tree counts with all its rows",
        ),
    )
)
class SarathiServe(_Chunked):
    """Stall-free: whoever speaks is in every pass, and no pass is longer than its budget."""

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes, resumed, fresh = self.split(waiting)
        yield from self.prefill(decodes, [*resumed, *fresh])
