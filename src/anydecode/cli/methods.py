"""`anydecode methods`: list the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json
from anydecode.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anydecode.catalogue import Card


def methods(
    family: Annotated[
        str | None, typer.Option("--family", help="Only methods of this family. Default: all.")
    ] = None,
    json: options.Json = False,
) -> None:
    """List the decoding methods: their guarantees, requirements and papers.

    Example: anydecode methods --family speculative
    """
    from anydecode.catalogue import FAMILIES, cards

    if family is not None and family not in FAMILIES:
        raise InvalidRequestError(f"no family {family!r}: choose from {', '.join(FAMILIES)}")
    selected = cards(family)
    if json:
        print_json(selected)
    else:
        print_table(selected)


def print_table(selected: Sequence[Card]) -> None:
    """Print one row per card."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("key", "family", "exactness", "needs", "paper"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for card in selected:
        needs = ", ".join(card.needs) or "nothing"
        table.add_row(card.key, card.family, card.exactness, needs, card.paper)
    Console().print(table)
