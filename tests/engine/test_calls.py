"""Functions that decoders run beside the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from anydecode import Call, Decoder, Decoding, Sequence
from anydecode.certification.checks import scripted_llm


class Calling(Decoder):
    """Emits a token that a function computes."""

    def __init__(self, function: Callable[[], Any], seconds: float = 30.0) -> None:
        self.function = function
        self.seconds = seconds
        self.calls: list[Call] = []
        self.on_result: Callable[[], object] = lambda: None

    def decode(self, sequence: Sequence) -> Decoding:
        yield sequence.score()
        call = yield Call(self.function, self.seconds)
        self.calls.append(call)
        self.on_result()
        sequence.emit([call.result if isinstance(call.result, int) else 0])
        while not sequence.finished:
            scores = yield sequence.score()
            sequence.emit([scores.sampled[-1]])


def test_the_decoder_gets_the_result() -> None:
    decoder = Calling(lambda: 7)
    with scripted_llm() as llm:
        assert llm.generate("a", decoder=decoder, max_tokens=3).tokens[0] == 7
    (call,) = decoder.calls
    assert (call.result, call.error, call.is_late) == (7, None, False)


def test_the_decoder_gets_the_error() -> None:
    decoder = Calling(lambda: {}["x"])
    with scripted_llm() as llm:
        llm.generate("a", decoder=decoder, max_tokens=3)
    assert isinstance(decoder.calls[0].error, KeyError) and not decoder.calls[0].is_late


def test_a_call_that_is_late_is_left_behind() -> None:
    end = threading.Event()
    decoder = Calling(lambda: end.wait(60), 0.05)
    with scripted_llm() as llm:
        llm.generate("a", decoder=decoder, max_tokens=3)
        end.set()
    assert decoder.calls[0].is_late and decoder.calls[0].result is None


@pytest.mark.parametrize("action", ["cancel", "preempt"])
def test_a_call_of_a_job_that_stops_is_forgotten(action: str) -> None:
    begun, end = threading.Event(), threading.Event()

    def function() -> int:
        begun.set()
        end.wait(60)
        return 5

    decoder = Calling(function)
    with scripted_llm() as llm:
        request = llm.request("a", decoder=decoder, max_tokens=3)
        llm.start(request)
        llm.driver.advance(begun.is_set)
        getattr(llm.engine, action)(request.jobs[0])
        assert not decoder.calls
        end.set()
        llm.driver.advance(lambda: request.done)
        llm.engine.check_integrity()
    assert [call.result for call in decoder.calls] == ([5] if action == "preempt" else [])


def test_a_call_is_not_delivered_to_a_job_that_is_preempted_meanwhile() -> None:
    """Two calls end together, and the first job preempts the other, as the steps do that run while
    its decoder is suspended."""
    threads, may_end = list[threading.Thread](), threading.Event()

    def function() -> int:
        threads.append(threading.current_thread())
        may_end.wait(60)
        return 5

    decoders = [Calling(function), Calling(function)]
    with scripted_llm() as llm:
        requests = [llm.request("a", decoder=one, max_tokens=3) for one in decoders]
        decoders[0].on_result = lambda: llm.engine.preempt(requests[1].jobs[0])
        for number, request in enumerate(requests, 1):
            llm.start(request, background=False)
            llm.driver.advance(lambda count=number: len(threads) == count)
        may_end.set()
        for thread in list(threads):
            thread.join()
        llm.driver.advance(lambda: all(request.done for request in requests))
        assert llm.engine.num_preemptions == 1
        llm.engine.check_integrity()
        texts = [request.generation().tokens for request in requests]
    assert texts[0] == texts[1] and texts[0][0] == 5
    assert [len(one.calls) for one in decoders] == [1, 1]


def test_several_jobs_call_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=30)

    def function() -> int:
        barrier.wait()
        return 9

    with scripted_llm() as llm:
        answers = llm.generate(["a", "b", "c"], decoder=Calling(function), max_tokens=2)
    assert [answer.tokens[0] for answer in answers] == [9, 9, 9]
