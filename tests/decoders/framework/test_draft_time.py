"""What drafts cost: the passes that several sequences share, and what depends on them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.certification.oracles.speculative.draft_chains import TARGET, recorded_drafts
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.rounds import VirtualClock, blurred, scripted
from anydecode.certification.tiny import accelerated_model
from anydecode.decoders.framework import speculation
from anydecode.decoders.framework.draft_time import counted


def test_steps_get_the_results_of_their_actions() -> None:
    def steps() -> Generator[Any, Any, str]:
        first = yield "a"
        second = yield "b"
        return first + second

    seen: list[int] = []
    run = counted(steps(), lambda: seen.append(1))
    assert next(run) == "a"
    assert run.send("x") == "b"
    with pytest.raises(StopIteration) as end:
        run.send("y")
    assert end.value.value == ("xy", 2)
    assert len(seen) == 2


def test_steps_that_stop_early_release_what_they_hold() -> None:
    released = []

    def steps() -> Generator[Any, Any, None]:
        try:
            yield 1
        finally:
            released.append(1)

    run = counted(steps())
    next(run)
    run.close()
    assert released == [1]


@pytest.mark.parametrize(
    ("decoder", "open_llm"),
    [
        ("speculative-sampling:size=3", partial(scripted, TARGET, blurred(TARGET))),
        ("bandit", partial(scripted, TARGET, blurred(TARGET))),
        ("bandit:control=calibration", partial(scripted, TARGET, blurred(TARGET))),
        ("swift:tree=false,threshold=0,size=3,window=512", accelerated_model),
    ],
)
def test_the_passes_that_draft_are_shared_by_all_sequences(
    decoder: str, open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft takes a pass of one second, beside three other sequences."""
    with open_llm() as llm:
        VirtualClock(llm, target=1.0, draft=1.0)
        monkeypatch.setattr(speculation, "perf_counter", lambda: llm.engine.now)
        llm.cost_model = FixedCosts(lambda rows, context: 1.0, 3)
        recorded, _ = recorded_drafts(llm, decoder, "the cab had a bad cab")
    drafted = [(count, seconds) for count, seconds in recorded if count]
    assert len(drafted) > 5
    assert all(seconds == pytest.approx(count / 4) for count, seconds in drafted)
