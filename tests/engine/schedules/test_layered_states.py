"""Drafters that read the target's states get those of a prompt that ran layer group by layer
group, so that they draft as after a prompt that ran at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode.certification.tiny import (
    eagle3_checkpoint,
    eagle_checkpoint,
    longspec_checkpoint,
    with_drafter,
)
from anydecode.certification.tiny_blocks import dflash_checkpoint
from anydecode.certification.tiny_heads import medusa_checkpoint
from anydecode.engine.schedules import layered_prefill
from anydecode.scoring import sequence
from anydecode.scoring.draft_states import DraftStates

LAYERED = "layered-prefill:unit=4,cohort=24,short=2"
PROMPT = [97 + number * number % 13 for number in range(60)]  # three chunks of up to 8 groups
DRAFTERS = {
    "eagle": (eagle_checkpoint, "eagle"),
    "eagle-3": (eagle3_checkpoint, "eagle"),
    "medusa": (medusa_checkpoint, "medusa"),
    "longspec": (longspec_checkpoint, "longspec"),
    "dflash": (dflash_checkpoint, "dflash"),
}
Answers = list[tuple[list[int], list[list[int]]]]


def answers(name: str, schedule: str | None, prompts: list[list[int]], **options: Any) -> Answers:
    """The text and the drafts of each prompt, answered together, with 10 layers."""
    make, decoder = DRAFTERS[name]
    acceptance = options.pop("acceptance", None)
    key = decoder if acceptance is None else f"{decoder}:acceptance={acceptance}"
    options = {"max_tokens": 16, "ignore_eos": True, "seed": 3, "trace": True, **options}
    with with_drafter(make, layers=10, schedule=schedule, cache_positions=2048) as llm:
        found = llm.generate(prompts, decoder=key, **options)
    return [(one.tokens, [step["drafted"] for step in one.trace or ()]) for one in found]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_a_prompt_that_runs_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong twin: the parts of the prompt return no states."""
    prompts = [PROMPT, PROMPT[7:40]]
    for options in ({"temperature": 0.0}, {"temperature": 0.9}):
        expected = answers(name, None, prompts, **options)
        assert answers(name, LAYERED, prompts, **options) == expected
    monkeypatch.setattr(layered_prefill, "_divide_states", lambda *_: None)
    twins = answers(name, LAYERED, prompts, **options)
    assert [tokens for tokens, _ in twins] == [tokens for tokens, _ in expected]
    assert [drafts for _, drafts in twins] != [drafts for _, drafts in expected]


def test_texts_that_depend_on_drafts_are_the_same() -> None:
    options = {"temperature": 0.9, "acceptance": "rejection"}
    assert answers("eagle", LAYERED, [PROMPT], **options) == answers(
        "eagle", None, [PROMPT], **options
    )


@pytest.mark.parametrize("limit", [8, 30, 2048])
def test_the_states_are_bit_for_bit_those_of_the_last_rows(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence, "MAX_STATES", limit)
    found: dict[str | None, DraftStates] = {}
    skip = DraftStates.skip
    for schedule in (None, LAYERED):
        states: list[DraftStates] = []

        def before(self: DraftStates, *given: Any, states: list[DraftStates] = states) -> Any:
            states.append(self.fork())  # before the drafter reads them, which frees them
            return skip(self, *given)

        monkeypatch.setattr(DraftStates, "skip", before)
        answers("eagle-3", schedule, [PROMPT])
        found[schedule] = states[0]
    first, other = found[None], found[LAYERED]
    positions = [position for position in range(len(PROMPT)) if first.knows(position)]
    assert len(positions) == min(limit, len(PROMPT))
    for position in positions:
        assert np.array_equal(first.known(position), other.known(position))
    assert not any(other.knows(position) for position in set(range(60)) - set(positions))
