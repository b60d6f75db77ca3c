"""Sarathi-Serve: decodes, then chunks of prompts, within a row budget per pass (Agrawal et al.,
"Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024,
arXiv:2403.02310)."""

from __future__ import annotations

from collections.abc import Iterator

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import ScheduledSpan
from anydecode.engine.schedules.chunked import Chunked
from anydecode.scoring.score import ScoreRequest


@register(
    Card(
        "sarathi-serve",
        "serving",
        paper="Agrawal et al. 2024, Sarathi-Serve, OSDI 2024, arXiv:2403.02310",
        exactness="token-exact",
        use="LLM(schedule='sarathi-serve') or anydecode serve --schedule sarathi-serve",
        summary="A row budget per pass: decodes first, then started prompts, then new prompts.",
        deviations=(
            "memory is allocated chunk by chunk, not for the whole prompt on admission",
            "without a budget, the chunk size keeps the time between tokens within `stretch` times"
            " that without prompts, pass by pass, instead of one profiled number of tokens",
            "a draft tree counts with all its rows",
        ),
    )
)
class SarathiServe(Chunked):
    """Stall-free batching: all decodes run in every pass, and no pass exceeds its budget."""

    def schedule(self, waiting: list[ScoreRequest]) -> Iterator[ScheduledSpan]:
        decodes, resumed, fresh = self.split(waiting)
        yield from self.prefill(decodes, [*resumed, *fresh])
