"""Speeds of a generation, including those of one that took no time or no pass."""

from __future__ import annotations

from anydecode.api.generation import Stats


def test_speeds() -> None:
    stats = Stats(4, 10, 3, seconds=2.0, time_to_first_token=0.5)
    assert (stats.tokens_per_pass, stats.tokens_per_second) == (2.5, 5.0)
    empty = Stats(0, 0, 3, seconds=0.0, time_to_first_token=0.0)
    assert (empty.tokens_per_pass, empty.tokens_per_second) == (0.0, 0.0)
    assert stats.to_dict()["tokens_per_second"] == 5.0
