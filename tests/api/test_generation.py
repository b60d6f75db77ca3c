"""Speeds of a generation, including those of one that took no time or no pass."""

from __future__ import annotations

from typing import Any

from anydecode.api.generation import Stats
from anydecode.certification.checks import scripted_llm


def test_speeds() -> None:
    stats = Stats(4, 10, 3, seconds=2.0, time_to_first_token=0.5)
    assert (stats.tokens_per_pass, stats.tokens_per_second) == (2.5, 5.0)
    empty = Stats(0, 0, 3, seconds=0.0, time_to_first_token=0.0)
    assert (empty.tokens_per_pass, empty.tokens_per_second) == (0.0, 0.0)
    assert stats.to_dict()["tokens_per_second"] == 5.0


def test_tokens_that_came_with_the_first_one_are_counted() -> None:
    with scripted_llm() as llm:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        plain = llm.generate("abc", decoder="autoregressive", **options)
        drafted = llm.generate("abc", decoder="suffix", prediction=plain.text, **options)
        whole = llm.generate("abc", decoder="autoregressive", **{**options, "max_tokens": 1})
    assert (plain.stats.num_first_tokens, plain.stats.num_later_tokens) == (1, 11)
    assert drafted.stats.num_first_tokens > 1
    assert drafted.stats.num_first_tokens + drafted.stats.num_later_tokens == 12
    assert whole.stats.num_later_tokens == 0


def test_the_times_of_a_generation_that_another_thread_reads_at_once() -> None:
    """A job is done before its request is told so."""
    found = []
    with scripted_llm() as llm:
        request = llm.request("abc", max_tokens=3)
        on_finish: Any = request.jobs[0].on_finish

        def read_first(job: Any) -> None:
            assert request.done
            found.append(request.generation().stats)
            on_finish(job)

        request.jobs[0].on_finish = read_first
        llm.start(request, background=False)
        llm.driver.advance(lambda: request.done)
    (stats,) = found
    assert 0 < stats.time_to_first_token <= stats.seconds <= request.generation().stats.seconds
