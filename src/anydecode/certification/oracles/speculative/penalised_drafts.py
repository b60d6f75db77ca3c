"""Drafts under penalties: each draft counts for those after it, as the tokens of the text do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check
from anydecode.certification.rounds import accepted, rounds, scripted, wordy

TARGET = wordy()
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5}


def penalty_checks(
    decoder: str, open_llm: Callable[[], LLM] = partial(scripted, TARGET, TARGET)
) -> Iterator[Check]:
    """Checks that a target that drafts for itself accepts all levels of its drafts under penalties.
    `open_llm` opens such a target."""
    with open_llm() as llm:
        trace = rounds(llm, decoder, "abcabcabd", 40, temperature=0.8, **PENALTIES)
    depths = [max(map(len, one.paths), default=0) for one in trace]
    pairs = list(zip(depths, trace, strict=True))[:-1]  # the last round may end the text
    is_accepted = all(depth == len(one.accepted) for depth, one in pairs)
    name = f"{decoder}: drafts count for the penalties of those after them"
    detail = f"{accepted(trace)} of {sum(depths)} levels accepted"
    yield Check(name, is_accepted and max(depths) > 1, detail)
