"""SARATHI: each pass runs all decodes and one chunk of one prompt (Agrawal et al., "Efficient LLM
Inference by Piggybacking Decodes with Chunked Prefills", arXiv:2308.16369)."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import ScheduledSpan
from anydecode.engine.schedules.chunked import Chunked
from anydecode.scoring.score import ScoreRequest


@register(
    Card(
        "sarathi",
        "serving",
        paper="Agrawal et al. 2023, SARATHI, arXiv:2308.16369",
        exactness="token-exact",
        use="LLM(schedule='sarathi') or anydecode serve --schedule sarathi",
        summary="Each pass runs all decodes and one chunk of one prompt.",
        deviations=(
            "the chunk is the rest of the budget after the decodes; it is not rounded to matrix"
            " tiles, which the row kernels do not have",
            "without a budget, the chunk size follows from the measured pass costs on this machine",
            "a draft tree counts with all its rows",
        ),
    )
)
class Sarathi(Chunked):
    """Every pass has all decodes and the next chunk of at most one prompt."""

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes, resumed, fresh = self.split(waiting)
        yield from self.prefill(decodes, [*resumed, *fresh][:1])
