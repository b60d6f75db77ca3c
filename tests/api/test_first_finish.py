"""First-finish search: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

import pytest

from anydecode.api.first_finish import FirstFinish
from certificates import assert_certified, assert_rejected, replace_class_default


def test_certificate() -> None:
    assert_certified("first-finish")


def test_certificate_rejects_cancelling_before_enough_have_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: FirstFinish, samples: list) -> list[int]:
        return [i for i, (count, reason) in enumerate(samples) if reason is None and count > 8]

    monkeypatch.setattr(FirstFinish, "lost", lost)
    assert_rejected("first-finish")


def test_certificate_rejects_the_longest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    winners = FirstFinish.winners
    monkeypatch.setattr(FirstFinish, "winners", lambda self, samples: winners(self, samples)[::-1])
    assert_rejected("first-finish")


def test_certificate_rejects_samples_that_end_by_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    winners = FirstFinish.winners

    def any_end(self: FirstFinish, samples: list) -> list[int]:
        return winners(self, [(n, "stop" if end == "length" else end) for n, end in samples])

    monkeypatch.setattr(FirstFinish, "winners", any_end)
    assert_rejected("first-finish")


@pytest.mark.parametrize(("parameter", "value"), [("first", 2), ("min_tokens", 2)])
def test_certificate_rejects_another_default(
    parameter: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, FirstFinish, parameter, value)
    assert_rejected("first-finish")
