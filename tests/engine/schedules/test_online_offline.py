"""Online and offline requests: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from anydecode import LLM
from anydecode.certification.checks import scripted_llm
from anydecode.engine import layer_ranges
from anydecode.engine.plan import Plan
from anydecode.engine.schedule import DecodesFirst
from anydecode.engine.schedules import online_offline
from anydecode.engine.schedules.online_offline import OnlineOffline
from anydecode.errors import InvalidRequestError
from certificates import assert_certified, assert_rejected, replace_class_default


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("online-offline")


def test_certificate_rejects_equal_treatment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineOffline, "schedule", DecodesFirst.schedule)
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = OnlineOffline.__init__
    monkeypatch.setattr(
        OnlineOffline, "__init__", lambda self, **given: made(self, **{**given, "offline": None})
    )
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_that_fill_online_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online_offline, "rows_beside", lambda *given, **how: 512)
    assert_rejected("online-offline")


def test_certificate_rejects_offline_rows_beyond_the_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    within = online_offline.rows_within
    monkeypatch.setattr(online_offline, "rows_within", lambda *given: max(1, within(*given)))
    assert_rejected("online-offline")


@pytest.mark.parametrize(
    "option", ["seconds=0", "seconds=-1", "offline=0", "stretch=1", "layers=0"]
)
def test_parameters_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(InvalidRequestError):
        LLM("tiny-autoregressive", schedule=f"online-offline:{option}")


def test_certificate_rejects_limited_passes_without_online_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = OnlineOffline._limit

    def limit(self: OnlineOffline, online: Any, offline: Any, left: int) -> int:
        return allowed(self, online, offline, left) if online else 9

    monkeypatch.setattr(OnlineOffline, "_limit", limit)
    assert_rejected("online-offline")


@pytest.mark.parametrize(
    ("parameter", "value"), [("stretch", 1.9), ("stretch", 2.2), ("row_budget", 511)]
)
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, OnlineOffline, parameter, value)
    assert_rejected("online-offline")


def test_certificate_rejects_passes_that_run_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlineOffline, "yields", lambda self, request, arrived: False)
    assert_rejected("online-offline")


def test_certificate_rejects_online_rows_that_leave_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        OnlineOffline, "yields", lambda self, request, arrived: arrived.priority <= 0
    )
    assert_rejected("online-offline")


def test_certificate_rejects_rows_that_leave_for_offline_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        OnlineOffline, "yields", lambda self, request, arrived: request.sequence.priority > 0
    )
    assert_rejected("online-offline")


def test_certificate_rejects_other_ranges_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_ranges, "RANGE_SECONDS", 0.004)
    assert_rejected("online-offline")


def test_certificate_rejects_rows_that_keep_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "unreserve_left", lambda self: None)
    assert_rejected("online-offline")


def test_certificate_rejects_the_states_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = Plan.remove
    monkeypatch.setattr(Plan, "remove", lambda self, requests: remove(self, requests)[::-1])
    assert_rejected("online-offline")


def test_an_online_request_stops_a_pass_that_runs_on_another_thread() -> None:
    with scripted_llm(schedule="online-offline:layers=1") as llm:
        model: Any = llm.model
        run, ranges, has_started, may_continue = model.run, [], threading.Event(), threading.Event()

        def blocked(rows: Any, *given: Any) -> Any:
            ranges.append((int(rows.start[0]), len(rows)))
            has_started.set()
            assert may_continue.wait(60)
            return run(rows, *given)

        model.run = blocked
        llm.driver.run_in_background()
        options: dict[str, Any] = {"decoder": "autoregressive", "max_tokens": 1}
        offline = llm.request([97] * 100, priority=1, **options)
        online = llm.request([98] * 5, **options)
        llm.driver.submit(offline.jobs[0])
        assert has_started.wait(60)
        llm.driver.submit(online.jobs[0])
        may_continue.set()
        llm.driver.advance(lambda: online.done and offline.done)
    assert ranges[0] == (0, 100)
    assert ranges[1][0] == 0, "the second range has other layers of the same pass"
    assert ranges[1][1] > 5


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["layerskip", "beam", "token-recycling", "fastkv"])
def test_rows_that_leave_a_pass_change_no_text(decoder: str) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "seed": 3, "decoder": decoder, "ignore_eos": True}
    prompts = ["copy Ada Ben Carl Dana Emil:", "copy Ada:", "x" * 90, "hello " * 30]
    with LLM("tiny-autoregressive") as llm:
        expected = [one.tokens for one in llm.generate(prompts, **options)]
    with LLM("tiny-autoregressive", schedule="online-offline:layers=1") as llm:
        online, looks = llm.request(prompts[0]).jobs[0].sequence, 0

        def arrivals() -> list[Any]:
            nonlocal looks
            looks += 1
            return [online] if looks % 7 == 0 else []

        llm.engine.arrivals = arrivals
        answers = llm.generate(prompts, priority=1, **options)
        llm.engine.check_integrity()
    assert looks > 7
    assert [one.tokens for one in answers] == expected
