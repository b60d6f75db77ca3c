"""pd-serve: its certificate, and roles that change in a fleet."""

from __future__ import annotations

import pytest

from anydecode.cluster.control import pd_serve
from anydecode.cluster.control.pd_serve import RatioControl, capacity
from anydecode.cluster.fleet import MIN_BLOCKS, Member
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected
from simulated_fleet import World, text


def test_certificate() -> None:
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


def test_scenarios_that_share_their_times_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RatioControl, "scenario", lambda self, num_tokens: 0)
    assert_rejected("pd-serve")


def test_moves_without_regard_to_arrivals_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_serve, "_RATE_WEIGHT", 0.0)
    monkeypatch.setattr(RatioControl, "record_arrival", lambda self, scenario: None)
    assert_rejected("pd-serve")


def test_scenarios_in_which_one_waits_for_another_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Member, "__post_init__", lambda self: vars(self).update(role=self.facts.role, scenario=None)
    )
    assert_rejected("pd-serve")


def test_the_slower_stage_is_the_capacity() -> None:
    assert capacity(1, 3, 0.5, 2.0, 1, 4) == min(1 / 0.5, 3 * 4 / 2.0) / 4


@pytest.mark.parametrize(
    "options",
    [
        {"period": 0},
        {"gain": -0.1},
        {"patience": 0},
        {"lengths": "5/3"},
        {"lengths": "0"},
        {"lengths": "a"},
        {"lengths": "/"},
        {"lengths": "/".join(map(str, range(1, 80)))},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="pd-serve has"):
        RatioControl(**options)  # type: ignore[arg-type]


def test_roles_change_under_load_and_no_answer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and short answers: decode workers become prefill workers, but for one."""
    monkeypatch.setattr(
        RatioControl, "record_prefill", lambda self, *_: setattr(self, "prefill_seconds", [20.0])
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


def test_prompts_belong_to_the_first_scenario_that_is_long_enough() -> None:
    control = RatioControl(lengths="256/2048")
    assert [control.scenario(n) for n in (1, 256, 257, 2048, 2049)] == [0, 0, 1, 1, 2]


def test_workers_change_their_scenario_under_load_and_no_answer_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All prompts are short: the workers of the other scenario go there, but for two."""
    world = World()
    control = world.fleet.control = RatioControl(period=2.0, patience=2, lengths="100/200")
    control.prefill_seconds, control.decode_seconds = [1.0, None, 1.0], [2.0, None, 2.0]
    for _ in range(6):
        world.join("prefill")
        world.join("decode")
    assert [one.scenario for one in world.fleet.members.values()] == [0, 0, 1, 1, 2, 2] * 2
    numbers = []
    for _ in range(40):
        numbers += [world.submit(num_blocks=MIN_BLOCKS) for _ in range(3)]
        world.settle(1.0)
        world.check()
    world.settle(60)
    scenarios = [one["scenario"] for one in world.fleet.status(world.now)["workers"]]
    assert sorted(scenarios) == [0] * 8 + [1, 1, 2, 2]
    assert all(world.received[one] == text(one) for one in numbers)
