"""A schedule outside the package: the waiting request with the shortest prompt starts next.

anydecode serve --schedule shortest-first:row_budget=256
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from anydecode import Card, DecodesFirst, Sequence, register


@register(
    Card(
        "shortest-first",
        "serving",
        paper="an example",
        exactness="token-exact",
        summary="Admits the request with the shortest prompt next.",
    )
)
class ShortestFirst(DecodesFirst):
    """`DecodesFirst`, with admission in the order of the prompts' lengths.

    Args:
        row_budget: Maximum number of rows per pass.
        short: Requests of more rows count as prompts.
    """

    def next_job(self, waiting: Seq[Sequence]) -> int:
        return min(range(len(waiting)), key=lambda i: len(waiting[i].prompt))
