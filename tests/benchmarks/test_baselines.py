"""`bench baselines`: the prompts that the engines get."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from anydecode.benchmarks import baselines


class RecordingWorker:
    """A worker that answers at once and keeps the prompts."""

    hello = {"version": "1", "settings": "", "load_seconds": 0.0}

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.prompts: list[str] = []

    def ask(self, *, prompt: str, tokens: int) -> dict[str, Any]:
        self.prompts.append(prompt)
        times = {"first": 0.5, "total": 1.5, "tokens": tokens, "prompt_tokens": 7}
        return {**times, "peak_memory": 1}


def test_no_prompt_is_asked_twice_and_all_engines_get_the_same() -> None:
    """A prefix cache would answer a repeated prompt faster, in the engines that have one."""
    workers = [RecordingWorker("anydecode"), RecordingWorker("other")]
    texts = ["The boats left.", "A lamp was lit."]
    given = cast(list[baselines.Worker], workers)
    results = baselines.measure(given, texts, tokens=9, rounds=3, missing={})
    assert Counter(workers[0].prompts) == Counter(workers[1].prompts)
    assert len(set(workers[0].prompts)) == len(workers[0].prompts) == 1 + 2 * 3
    beginnings = {prompt.partition(" ")[0] for prompt in workers[0].prompts}
    assert len(beginnings) == 7
    assert results["other"].rates == [8.0] * 3
