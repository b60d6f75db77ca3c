"""`anydecode methods`: the catalogue."""

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
    family: Annotated[str | None, typer.Option("--family", help="Only this family.")] = None,
    json: options.Json = False,
) -> None:
    """List the decoding methods: what each promises, needs and goes together with.

    Example: anydecode methods --family speculative
    """
    from anydecode.catalogue import FAMILIES, cards

    if family is not None and family not in FAMILIES:
        raise InvalidRequestError(f"no family {family!r}: there are {', '.join(FAMILIES)}")
    chosen = cards(family)
    if json:
        print_json(chosen)
    else:
        print_table(chosen)


def print_table(chosen: Sequence[Card]) -> None:
    """One row per card."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("key", "family", "exactness", "needs", "paper"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for card in chosen:
        needs = ", ".join(card.needs) or "nothing"
        table.add_row(card.key, card.family, card.exactness, needs, card.paper)
    Console().print(table)
