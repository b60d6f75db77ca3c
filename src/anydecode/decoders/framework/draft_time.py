"""What a draft costs: the passes that it takes, and the time of drafting beside the target."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, TypeVar

from anydecode.scoring.score import DecoderAction, Ticket
from anydecode.scoring.sequence import DRAFT, TARGET, Sequence

T = TypeVar("T")


def counted(
    steps: Generator[DecoderAction, Any, T], on_step: Callable[[], object] | None = None
) -> Generator[DecoderAction, Any, tuple[T, int]]:
    """Run `steps`. Returns their result and the number of actions that they yielded; `on_step` is
    called when each of these has been carried out."""
    count, answer = 0, None
    with closing(steps):
        while True:
            try:
                action = steps.send(answer)
            except StopIteration as end:
                return end.value, count
            answer = yield action
            count += 1
            if on_step is not None:
                on_step()


def beside_target(
    steps: Generator[DecoderAction, Any, T],
    sequence: Sequence,
    ticket: Ticket,
    clock: Callable[[], float],
) -> Generator[DecoderAction, Any, tuple[T, float]]:
    """Draft while the request of `ticket` runs. Returns the drafts, and the time that they take
    from the passes of the target, in seconds: half of what passes while both run, and all after
    that; none if the draft model has a device of its own."""
    start = clock()
    ended: list[float] = []

    def note_end() -> None:
        if ticket.scores is not None and not ended:
            ended.append(clock())

    drafts, _ = yield from counted(steps, note_end)
    now = clock()
    alone = now - ended[0] if ended else 0.0
    return drafts, (now - start + alone) / 2 if shares_device(sequence) else 0.0


def shares_device(sequence: Sequence) -> bool:
    """Whether the passes of the draft model and of the target run on one device."""
    devices = {_device(sequence, runner) for runner in (TARGET, DRAFT)}
    return len(devices) == 1


def _device(sequence: Sequence, runner: str) -> str:
    executor = getattr(sequence.model(runner), "executor", None)
    return str(getattr(executor, "device", "cpu"))
