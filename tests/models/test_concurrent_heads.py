"""A decoder that was resumed by the draft model's pass reads heads while a pass of the target runs
on another thread, with the same buffers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from anydecode.certification.tiny import tiny_model
from anydecode.kernels.interface import Output
from tiny_models import chain, logits


def test_heads_wait_for_the_pass_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    states = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    rows = chain([5, 6, 7, 8])
    expected = logits(model, rows), model.head(states)
    run, is_running, may_end = model.executor.run, threading.Event(), threading.Event()

    def slow(*given: Any) -> Output:
        is_running.set()
        may_end.wait(60)
        return run(*given)

    monkeypatch.setattr(model.executor, "run", slow)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(logits, model, rows)
        assert is_running.wait(60)
        head = threads.submit(model.head, states)
        try:
            assert not threading.Event().wait(0.05) and not head.done()
        finally:
            may_end.set()
        found = running.result(), head.result()
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)
