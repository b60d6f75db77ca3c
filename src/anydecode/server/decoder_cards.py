"""The cards of the decoders that requests may select, for the web page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from anydecode import catalogue
from anydecode.api.llm import LLM
from anydecode.decoders.decoder import Decoder
from anydecode.errors import AnydecodeError


def decoder_cards(llm: LLM) -> dict[str, Any]:
    """The cards of all decoders.

    Returns:
        `decoders`: those that `llm` can run and that need no parameters, sorted by key.
        `unavailable`: the others, each with a `reason`. `claims`: what each exactness means.
        `families`: in the order of the catalogue.
    """
    decoders, unavailable = [], []
    for key, entry in sorted(catalogue.entries().items()):
        if not issubclass(catalogue.kind_of(key) or object, Decoder):
            continue  # not built: other methods may open files or start threads
        try:
            llm.resources.check_decoder(key, entry.build().requirements)
        except (AnydecodeError, TypeError) as error:
            unavailable.append({**_card(entry.card), "reason": str(error)})
        else:
            decoders.append(_card(entry.card))
    return {
        "decoders": decoders,
        "unavailable": unavailable,
        "claims": catalogue.CLAIMS,
        "families": catalogue.FAMILIES,
    }


def _card(card: catalogue.Card) -> dict[str, Any]:
    return {
        "key": card.key,
        "family": card.family,
        "exactness": card.exactness,
        "summary": card.summary,
        "paper": card.paper,
        "needs": card.needs,
        "works_with": card.works_with,
        "deviations": card.deviations,
        "missing": card.missing,
        "measured": card.measured,
        "parameters": [asdict(one) for one in catalogue.parameters(card.key)],
    }
