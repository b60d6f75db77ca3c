"""Decoders that are suspended while their constraint computes a mask: the other jobs go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from anydecode import JsonSchema, Regex
from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, scripted_llm
from anydecode.constraints import guidance_engine
from anydecode.constraints.background import BackgroundTask, work_until
from anydecode.decoders.autoregressive import Autoregressive
from anydecode.decoders.decoder import Decoder
from anydecode.engine import engine
from anydecode.errors import EngineStoppedError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel
from anydecode.scoring.score import Decoding, Scores
from anydecode.scoring.sequence import Sequence

OPTIONS = {"max_tokens": 24, "temperature": 0.7, "seed": 4, "ignore_eos": True}
PENALTY = {"presence_penalty": 0.5}  # the engine samples, not the pass


class _Waiting(Decoder):
    """Plain decoding that waits, each time that it is resumed with scores, before it samples."""

    def __init__(self, wait: Callable[[Sequence], object]) -> None:
        super().__init__()
        self.wait = wait

    def decode(self, sequence: Sequence) -> Decoding:
        inner = Autoregressive().decode(sequence)
        value: Any = None
        while True:
            try:
                action = inner.send(value)
            except StopIteration:
                return
            value = yield action
            self.wait(sequence)


def start(llm: LLM, decoders: list[Any], **options: Any) -> list[Any]:
    requests = [
        llm.request(PROMPTS[0], decoder=one, **{**OPTIONS, "seed": seed, **options})
        for seed, one in enumerate(decoders)
    ]
    for request in requests:
        llm.start(request, background=False)
    return requests


def tokens(llm: LLM, requests: list[Any]) -> list[list[int]]:
    llm.driver.advance(lambda: all(request.done for request in requests))
    llm.engine.check_integrity()
    return [request.generation().tokens for request in requests]


def jobs(llm: LLM) -> list[engine.Job]:
    return [*llm.engine.running, *llm.engine.waiting]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders are suspended whenever they may be."""
    monkeypatch.setattr(engine, "MAX_RESUME_SECONDS", -1.0)


def test_the_others_go_on_and_texts_stay_the_same(at_once: None) -> None:
    lengths: list[int] = []

    def wait(sequence: Sequence) -> None:
        if len(sequence.tokens) == 3:
            (other,) = [job.sequence for job in jobs(llm) if job.sequence is not sequence]
            work_until(lambda seconds: len(other.tokens) >= 10)
            lengths.append(len(other.tokens))

    with LLM("tiny-autoregressive") as llm:  # its buffers hold the logits of the last pass
        expected = tokens(llm, start(llm, ["autoregressive"] * 2, **PENALTY))
        assert tokens(llm, start(llm, [_Waiting(wait), "autoregressive"], **PENALTY)) == expected
    assert lengths == [10]


def test_without_the_scores_of_before_texts_would_change(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scores, "saved", lambda self: lambda: None)
    with LLM("tiny-autoregressive") as llm:
        expected = tokens(llm, start(llm, ["autoregressive"] * 2, **PENALTY))
        waits = _Waiting(lambda sequence: work_until(lambda seconds: True))
        assert tokens(llm, start(llm, [waits, "autoregressive"], **PENALTY)) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder", ["autoregressive", "auto", "beam", "pearl", "speculative-sampling", "llada:block=8"]
)
@pytest.mark.parametrize("positions, rows", [(4096, 512), (160, 512), (4096, 3)])
def test_texts_do_not_depend_on_suspensions(
    decoder: str, positions: int, rows: int, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:

    def answers(positions: int, rows: int) -> list[list[int]]:
        causal, tokenizer = "llada" not in decoder, ByteTokenizer()
        target = ScriptedModel(vocab_size=tokenizer.vocab_size, seed=1, causal=causal)
        draft = ScriptedModel(vocab_size=tokenizer.vocab_size, seed=1, noise=0.5)
        options = {"draft": draft, "cache_positions": positions, "row_budget": rows}
        with LLM(target, tokenizer=tokenizer, **options) as llm:
            batch = llm.generate(list(PROMPTS), decoder=decoder, **OPTIONS)
            assert (llm.engine.num_preemptions > 0) == (positions < 1000)
            llm.engine.check_integrity()
        return [answer.tokens for answer in batch]

    expected, suspended = answers(4096, 512), []
    save, emit = Scores.saved, Sequence.emit

    def saved(scores: Scores) -> Callable[[], None]:
        suspended.append(scores)
        return save(scores)

    def emit_later(sequence: Sequence, *arguments: Any, **options: Any) -> Any:
        work_until(lambda seconds: True)
        return emit(sequence, *arguments, **options)

    monkeypatch.setattr(Scores, "saved", saved)
    monkeypatch.setattr(Sequence, "emit", emit_later)
    assert answers(positions, rows) == expected
    assert suspended


def test_a_job_that_is_cancelled_while_suspended_ends(at_once: None) -> None:
    went_on: list[Sequence] = []

    def wait(sequence: Sequence) -> None:
        def is_over(seconds: float) -> bool:
            llm.engine.cancel(next(job for job in jobs(llm) if job.sequence is sequence))
            return False

        if len(sequence.tokens) == 3:
            work_until(is_over)
            went_on.append(sequence)

    with scripted_llm() as llm:
        expected = tokens(llm, start(llm, ["autoregressive"] * 2))
        requests = start(llm, [_Waiting(wait), "autoregressive"])
        found = tokens(llm, requests)
        assert found == [expected[0][:3], expected[1]]
        assert requests[0].generation().finish_reason == "cancelled"
        assert not went_on
        assert tokens(llm, start(llm, ["autoregressive"] * 2)) == expected


def test_a_request_that_arrives_meanwhile_is_answered(at_once: None) -> None:
    arrived: list[Any] = []

    def wait(sequence: Sequence) -> None:
        def is_over(seconds: float) -> bool:
            if not arrived:
                arrived.extend(start(llm, ["autoregressive"]))
            return bool(arrived[0].done)

        if len(sequence.tokens) == 3:
            work_until(is_over)
            assert not requests[0].done

    with scripted_llm() as llm:
        requests = start(llm, [_Waiting(wait)])
        (found,) = tokens(llm, requests)
        assert found == arrived[0].generation().tokens


def test_an_error_of_the_engine_meanwhile_ends_all_jobs(at_once: None) -> None:
    def fail() -> None:
        raise RuntimeError("between")

    def wait(sequence: Sequence) -> None:
        if len(sequence.tokens) == 3:
            llm.engine.between = fail
            work_until(lambda seconds: True)

    with scripted_llm() as llm:
        requests = start(llm, [_Waiting(wait), "autoregressive"])
        with pytest.raises(EngineStoppedError, match="between"):
            tokens(llm, requests)
        for request in requests:
            with pytest.raises(EngineStoppedError, match="between"):
                request.generation()


def test_closing_ends_a_suspended_job(at_once: None) -> None:
    begun, never = threading.Event(), threading.Event()

    def wait(sequence: Sequence) -> None:
        begun.set()
        work_until(never.wait)

    llm = scripted_llm()
    request = llm.request(PROMPTS[0], decoder=_Waiting(wait), **OPTIONS)
    llm.start(request)
    assert begun.wait(60)
    llm.close()
    assert request.done


def test_only_a_few_jobs_are_suspended_at_a_time(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_SUSPENDED", 2)
    num_waiting = [0]
    largest = 0

    def wait(sequence: Sequence) -> None:
        nonlocal largest
        num_waiting[0] += 1
        largest = max(largest, num_waiting[0])
        work_until(lambda seconds: requests[-1].done)
        num_waiting[0] -= 1

    constraint = {"constraint": Regex("[a-z ]+")}
    with scripted_llm() as llm:
        decoders = ["autoregressive"] * 6
        expected = tokens(llm, start(llm, decoders, **constraint))
        requests = start(llm, [_Waiting(wait)] * 5, **constraint)
        requests += [llm.request(PROMPTS[0], **{**OPTIONS, "seed": 9})]
        llm.start(requests[-1], background=False)
        assert tokens(llm, requests)[:5] == expected[:5]
    assert largest == 2


def test_long_decoders_are_resumed_one_per_step_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def waiting(name: str) -> _Waiting:
        def wait(sequence: Sequence) -> None:
            log.append(name)
            if name != "quick":
                monkeypatch.setattr(engine, "MAX_RESUME_SECONDS", -1.0)
                work_until(lambda seconds: True)
            monkeypatch.setattr(engine, "MAX_RESUME_SECONDS", 1000.0)

        return _Waiting(wait)

    names = ["a", "b", "quick", "c", "d"]
    with scripted_llm() as llm:
        expected = tokens(llm, start(llm, ["autoregressive"] * 5))
        assert tokens(llm, start(llm, [waiting(name) for name in names])) == expected
    first = log.index("quick")
    between = "".join(log[first:]).split("quick")[2:-1]  # without that in which they are found
    assert all(len(part) <= 1 for part in between), between
    assert set("".join(between)) == set("abcd")


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "multipleOf": 7}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["autoregressive", "auto"])
@pytest.mark.parametrize("options", [{}, {"presence_penalty": 0.5, "top_p": 0.9}])
def test_texts_do_not_depend_on_which_masks_are_long(
    decoder: str, options: dict[str, Any], at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**options, "constraint": JsonSchema(SCHEMA), "ignore_eos": False, "max_tokens": 60}

    def answers() -> list[list[int]]:
        with scripted_llm() as llm:
            return tokens(llm, start(llm, [decoder] * 3, **options))

    monkeypatch.setattr(engine, "MAX_RESUME_SECONDS", 1000.0)
    expected = answers()
    monkeypatch.setattr(engine, "MAX_RESUME_SECONDS", -1.0)
    assert answers() == expected
    monkeypatch.setattr(guidance_engine, "LONG_MASK_SECONDS", -1.0)
    assert answers() == expected


def test_the_others_go_on_while_a_long_mask_is_computed(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_tokens, num_masks = threading.Event(), [0]
    run = BackgroundTask.run

    def run_late(task: BackgroundTask[Any]) -> None:
        if threading.current_thread().name == "anydecode-long-mask":
            assert has_tokens.wait(60)
            num_masks[0] += 1
        run(task)

    def wait(sequence: Sequence) -> None:
        if len(sequence.tokens) >= 10:
            has_tokens.set()

    monkeypatch.setattr(BackgroundTask, "run", run_late)
    monkeypatch.setattr(guidance_engine, "LONG_MASK_SECONDS", -1.0)
    with scripted_llm() as llm:
        constrained = {"constraint": JsonSchema(SCHEMA), "ignore_eos": False, "temperature": 0.0}
        requests = [
            *start(llm, ["autoregressive"], **constrained),
            *start(llm, [_Waiting(wait)]),
        ]
        tokens(llm, requests)
    assert num_masks[0] > 0
