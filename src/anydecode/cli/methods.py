"""`anydecode methods`: list the catalogue, or print one card of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from anydecode.cli import options
from anydecode.cli.output import cut, output_width, print_json, wrapped
from anydecode.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anydecode.catalogue import Card, Parameter


def methods(
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Print all about this method. Default: list methods."),
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="Only methods of this family. Default: all.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            "--search", help="Only methods with this text in key, summary or paper. Default: all."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the decoding methods with their claims, or print all about one of them.

    Example: anydecode methods --family speculative
    """
    from anydecode.catalogue import FAMILIES, cards, find, parameters

    if key is not None:
        if family is not None or search is not None:
            raise InvalidRequestError("give a KEY or --family and --search, not both")
        card, described = find(key).card, parameters(key)
        if json:
            print_json({**card.to_dict(), "parameters": [asdict(one) for one in described]})
        else:
            print_card(card, described)
        return
    if family is not None and family not in FAMILIES:
        raise InvalidRequestError(f"no family {family!r}: choose from {', '.join(FAMILIES)}")
    text = (search or "").lower()
    selected = [
        card
        for card in cards(family)
        if any(text in part.lower() for part in (card.key, card.summary, card.paper))
    ]
    if json:
        print_json(selected)
    else:
        print_list(selected)


def print_list(selected: Sequence[Card]) -> None:
    """Print the cards by family, one line each: key, exactness, whether the method is partial, and
    as much of the summary as fits."""
    width = output_width()
    for family in dict.fromkeys(card.family for card in selected):
        chosen = [card for card in selected if card.family == family]
        key_width = max(len(card.key) for card in chosen)
        claim_width = max(len(card.exactness) for card in chosen)
        print(f"{family} ({len(chosen)})")
        for card in chosen:
            summary = f"partial: {card.summary}" if card.missing else card.summary
            line = f"  {card.key:<{key_width}}  {card.exactness:<{claim_width}}  {summary}"
            print(cut(line, width))
        print()
    count = f"{len(selected)} method{'' if len(selected) == 1 else 's'}"
    num_partial = sum(bool(card.missing) for card in selected)
    count += f", {num_partial} partial" if num_partial else ""
    print(wrapped(f"{count}; all about one: anydecode methods KEY", width))


def print_card(card: Card, parameters: Sequence[Parameter]) -> None:
    """Print all about one method."""
    from anydecode.catalogue import CLAIMS

    width = output_width()
    print(f"{card.key} ({card.family})\n")
    print(wrapped(card.summary, width))
    print()
    for name, text in (
        ("claim", f"{card.exactness}: {CLAIMS[card.exactness]}"),
        ("use", card.use),
        ("paper", card.paper),
        ("needs", ", ".join(card.needs) or "nothing but a model"),
        ("works with", ", ".join(card.works_with)),
    ):
        if text:
            print(wrapped(text, width, f"{name:<12}"))
    if parameters:
        print("\nparameters")
    for one in parameters:
        default = f" = {one.default}" if one.default else ", required"
        print(wrapped(f"{one.name}: {one.type}{default}", width, "  ", " " * 6))
        print(wrapped(one.description, width, " " * 6))
        if one.bounds:
            print(wrapped(f"allowed: {one.bounds}", width, " " * 6))
        print(wrapped(f"in requests to a server: {one.remote or 'not allowed'}", width, " " * 6))
    if card.missing:
        print("\npartial: not implemented")
    for part in card.missing:
        print(wrapped(part, width, "  - "))
    if card.deviations:
        print("\ndifferences from the paper")
    for deviation in card.deviations:
        print(wrapped(deviation, width, "  - "))
    if card.measured:
        print("\nmeasured")
    for result in card.measured:
        print(wrapped(result, width, "  - "))
    if card.citation:
        print("\ncitation")
    for line in card.citation.splitlines():
        print(wrapped(line, width, "  ", " " * 6))
