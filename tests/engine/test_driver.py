"""The driver of requests that end before they start, after its engine is closed, and in a forked
process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from anydecode.certification.checks import scripted_llm
from anydecode.errors import EngineStoppedError


def test_a_closed_engine_refuses_requests_in_one_line() -> None:
    llm = scripted_llm()
    llm.generate("a", max_tokens=2)
    llm.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.generate("a", max_tokens=2)
    with pytest.raises(EngineStoppedError, match="closed"):
        asyncio.run(llm.agenerate("a", max_tokens=2))
    with pytest.raises(EngineStoppedError, match="closed"):
        next(iter(llm.stream("a", max_tokens=2)))


def test_a_request_that_is_abandoned_before_it_starts_leaves_no_work() -> None:
    with scripted_llm() as llm:
        request = llm.request("a", n=2, temperature=0.8, max_tokens=2)
        llm.abandon(request)
        llm.start(request, background=False)
        assert request.done and not llm.engine.has_work
        assert [one.finish_reason for one in request.generation().samples] == ["cancelled"] * 2
        assert len(llm.generate("a", max_tokens=2).tokens) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_refuses_requests_in_one_line() -> None:
    """The background thread of the parent does not exist in the child, where a request would wait
    for ever."""
    with scripted_llm() as llm:
        asyncio.run(llm.agenerate("a", max_tokens=2))
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(llm.agenerate("a", max_tokens=2))
            except EngineStoppedError as error:
                os._exit(7 if "after the fork" in str(error) else 8)
            finally:
                sys.stdout.flush()
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert llm.generate("a", max_tokens=2).tokens


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("is_used", [False, True], ids=["never-used", "idle"])
@pytest.mark.parametrize("kind", ["generate", "stream", "score", "embed"])
def test_a_child_of_multiprocessing_refuses_requests_in_one_line(is_used: bool, kind: str) -> None:
    """Without a background thread too: the kernels' threads do not exist in the child either."""
    context = multiprocessing.get_context("fork")
    with scripted_llm() as llm:
        calls = {
            "generate": lambda: llm.generate("a", max_tokens=2),
            "stream": lambda: list(llm.stream("a", max_tokens=2)),
            "score": lambda: llm.score("a", "b"),
            "embed": lambda: llm.embed("a"),
        }
        if is_used:
            calls[kind]()
        reader, writer = context.Pipe(duplex=False)

        def call() -> None:
            try:
                calls[kind]()
            except EngineStoppedError as error:
                writer.send(str(error))
            else:
                writer.send("no error")

        child = context.Process(target=call)
        child.start()
        assert reader.poll(60), "the child waits"
        assert reader.recv() == "the engine is another process's: open an LLM after the fork"
        child.join()
        assert child.exitcode == 0
        calls[kind]()


def test_a_request_that_is_submitted_while_the_engine_closes_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = scripted_llm()
    llm.driver.run_in_background()
    request, post = llm.request("a", max_tokens=2), llm.driver.post

    def closed_before(action: Callable[[], object]) -> None:
        llm.close()
        post(action)

    monkeypatch.setattr(llm.driver, "post", closed_before)
    llm.driver.submit(request.jobs[0])
    assert request.done and not llm.engine.has_work


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_can_close_while_the_parent_runs_a_pass() -> None:
    """The lock of the pass, which the fork has a copy of, is never released there."""
    context = multiprocessing.get_context("fork")
    with scripted_llm() as llm:
        model: Any = llm.model
        run, has_begun, may_end = model.run, threading.Event(), threading.Event()

        def held(*given: Any) -> Any:
            has_begun.set()
            may_end.wait(60)
            return run(*given)

        model.run = held
        llm.driver.run_in_background()
        request = llm.request("a", max_tokens=2, decoder="autoregressive")
        llm.driver.submit(request.jobs[0])
        assert has_begun.wait(60)
        child = context.Process(target=llm.close)
        child.start()
        child.join(30)
        if child.is_alive():
            child.kill()
            child.join()
        may_end.set()
        llm.driver.advance(lambda: request.done)
    assert child.exitcode == 0
