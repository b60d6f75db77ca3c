"""`anydecode methods`: the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from anydecode.cli import options
from anydecode.cli.output import print_json, to_plain
from anydecode.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


def methods(
    family: Annotated[str | None, typer.Option("--family", help="Only this family.")] = None,
    json: options.Json = False,
) -> None:
    """List the decoding methods: what each promises, needs and goes together with.

    Example: anydecode methods --family speculative
    """
    from anydecode.catalogue import cards

    found = sorted(cards(), key=lambda card: (card.family, card.key))
    families = sorted({card.family for card in found})
    if family is not None and family not in families:
        raise InvalidRequestError(f"no family {family!r}: there are {', '.join(families)}")
    chosen = [card for card in found if family in (None, card.family)]
    if json:
        print_json(chosen)
    else:
        print_table(chosen)


def print_table(chosen: Sequence[Any]) -> None:
    """One row per card."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("key", "family", "exactness", "needs", "paper"):
        table.add_column(name, overflow="fold", no_wrap=name == "key")
    for card in chosen:
        needs = as_text(card.needs) or "nothing"
        table.add_row(card.key, card.family, card.exactness, needs, as_text(card.paper))
    Console().print(table)


def as_text(value: Any) -> str:
    """Lists joined by commas; of a record, its title."""
    plain = to_plain(value)
    if isinstance(plain, dict):
        return str(plain.get("title") or plain.get("name") or "")
    if isinstance(plain, list):
        return ", ".join(as_text(entry) for entry in plain)
    return "" if plain is None else str(plain)
