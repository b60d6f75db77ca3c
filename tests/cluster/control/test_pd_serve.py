"""pd-serve: its certificate, and roles that change in a fleet."""

from __future__ import annotations

import pytest

from anydecode.cluster.control import pd_serve
from anydecode.cluster.control.pd_serve import RatioControl, capacity
from anydecode.cluster.fleet import MIN_BLOCKS
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected
from simulated_fleet import World, text


def test_the_certificate() -> None:
    assert_certified("pd-serve")


def test_a_capacity_that_forgets_the_decode_workers_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        pd_serve, "capacity", lambda n, m, t, u, places, others: n * places / t / (n + m)
    )
    assert_rejected("pd-serve")


def test_a_control_without_patience_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    step = RatioControl.step

    def hasty(self: RatioControl, *given: float) -> int:
        self.patience = 1
        return step(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(RatioControl, "step", hasty)
    assert_rejected("pd-serve")


def test_the_slower_stage_is_the_capacity() -> None:
    assert capacity(1, 3, 0.5, 2.0, 1, 4) == min(1 / 0.5, 3 * 4 / 2.0) / 4


@pytest.mark.parametrize("options", [{"period": 0}, {"gain": -0.1}, {"patience": 0}], ids=str)
def test_parameters_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match="pd-serve has"):
        RatioControl(**options)  # type: ignore[arg-type]


def test_roles_change_under_load_and_no_answer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and short answers: decode workers become prefill workers, but for one."""
    monkeypatch.setattr(
        RatioControl, "record_prefill", lambda self, _: setattr(self, "prefill_seconds", 20.0)
    )
    world = World()
    world.fleet.control = RatioControl(period=2.0, patience=2)
    for role in ("prefill", "decode", "decode", "decode"):
        world.join(role)
    numbers = []
    for _ in range(30):
        numbers += [world.submit(num_blocks=MIN_BLOCKS) for _ in range(3)]
        world.settle(1.0)
        world.check()
    world.settle(60)
    roles = sorted(member.role for member in world.fleet.members.values())
    assert roles == ["decode", "prefill", "prefill", "prefill"]
    assert world.fleet.counts["role_changes"] == 2
    assert all(world.received[one] == text(one) for one in numbers)
