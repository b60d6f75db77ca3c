"""Scheduling by the priority of requests."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode.catalogue import Card, register
from anydecode.engine.schedule import DecodesFirst
from anydecode.scoring.sequence import Sequence


def most_urgent(sequences: Seq[Sequence]) -> int:
    """Index of the first sequence with the smallest `priority`."""
    return min(range(len(sequences)), key=lambda i: sequences[i].priority)


def least_urgent(sequences: Seq[Sequence]) -> int:
    """Index of the last sequence with the largest `priority`."""
    return max(range(len(sequences)), key=lambda i: (sequences[i].priority, i))


@register(
    Card(
        "priority",
        "serving",
        paper="common practice; no paper",
        exactness="token-exact",
        use="LLM(schedule='priority') or anydecode serve --schedule priority",
        summary="Requests with smaller priority numbers are admitted and run first.",
    )
)
class Priority(DecodesFirst):
    """`DecodesFirst` with admission and preemption by the request's `priority`."""

    def next_job(self, waiting: Seq[Sequence]) -> int:
        return most_urgent(waiting)

    def victim(self, running: Seq[Sequence]) -> int:
        return least_urgent(running)
