"""Nexus: its certificate, and mistakes that the certificate rejects."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode import LLM
from anydecode.certification.tiny import tiny_model, tiny_network
from anydecode.engine.engine import Engine
from anydecode.engine.model_runner import ModelRunner
from anydecode.engine.schedule import Schedule
from anydecode.engine.schedules import nexus
from anydecode.models.scripted import ByteTokenizer
from certificates import assert_certified, assert_rejected, replace_class_default


@pytest.mark.slow
def test_certificate() -> None:
    assert_certified("nexus")


def test_certificate_rejects_the_smallest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def smallest(inter_token: Any, prefill: dict[int, float], **how: Any) -> int:
        return min(prefill)

    monkeypatch.setattr(nexus, "chosen_share", smallest)
    assert_rejected("nexus")


def test_certificate_rejects_prompts_that_never_age(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nexus.Nexus.__init__
    monkeypatch.setattr(
        nexus.Nexus, "__init__", lambda self, **given: made(self, **{**given, "ageing": 0.0})
    )
    assert_rejected("nexus")


def test_certificate_rejects_prompts_first_in_a_full_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = nexus.Nexus.__init__
    monkeypatch.setattr(
        nexus.Nexus, "__init__", lambda self, **given: made(self, **{**given, "full": 2.0})
    )
    assert_rejected("nexus")


def test_certificate_rejects_short_prompts_as_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexus, "is_prompt", lambda request: False)
    assert_rejected("nexus")


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("row_budget", 511), ("steps", 31), ("alpha", 1.2), ("alpha", 1.35), ("beta", 1.29),
        ("beta", 1.31), ("full", 0.69), ("full", 0.72), ("change", 0.04), ("change", 0.1),
        ("ageing", 15.0), ("ageing", 17.0),
    ],
)  # fmt: skip
def test_certificate_rejects_another_default(
    parameter: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_class_default(monkeypatch, nexus.Nexus, parameter, value)
    assert_rejected("nexus")


@pytest.mark.slow
def test_certificate_rejects_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexus.Nexus, "has_prompt_stream", False)
    assert_rejected("nexus")


def test_certificate_rejects_streams_with_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "choose_threads", lambda self, plan: None)
    assert_rejected("nexus")


@pytest.mark.slow
def test_certificate_rejects_a_fixed_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexus.Nexus, "decode_threads", Schedule.decode_threads)
    assert_rejected("nexus")


@pytest.mark.slow
def test_certificate_rejects_a_split_that_always_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexus, "with_hysteresis", lambda share, current, change: share)
    assert_rejected("nexus")


@pytest.mark.slow
def test_certificate_rejects_costs_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = nexus.Nexus.decode_threads

    def whole(self: Any, decodes: Any, prompts: Any, threads: int, cost: Any) -> int:
        same = cost and (lambda rows, context, one: cost(rows, context, threads))
        return chosen(self, decodes, prompts, threads, same)

    monkeypatch.setattr(nexus.Nexus, "decode_threads", whole)
    assert_rejected("nexus")


def test_certificate_rejects_slots_that_are_freed_during_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "_wait_for_streams", lambda self, job: None)
    assert_rejected("nexus")


@pytest.mark.parametrize(("threads", "num_streams"), [(1, 1), (2, 2)])
def test_two_streams_need_two_threads(threads: int, num_streams: int) -> None:
    model = tiny_model(threads=threads)
    with LLM(model, tokenizer=ByteTokenizer(), schedule="nexus") as llm:
        assert len(llm.engine.runners["target"].streams) == num_streams
        llm.generate([97] * 8, max_tokens=3, decoder="autoregressive", ignore_eos=True)
        assert llm.engine.runners["target"].num_rows == 8 + 2


def test_new_weights_are_those_of_both_streams() -> None:
    options: dict[str, Any] = {"max_tokens": 8, "decoder": "autoregressive", "ignore_eos": True}
    prompts = ["a prompt of some length " * 4, "another"]
    with LLM(tiny_model(seed=1), tokenizer=ByteTokenizer(), prefix_cache=False) as llm:
        expected = [one.tokens for one in llm.generate(prompts, **options)]
    model = tiny_model(threads=2)
    with LLM(model, tokenizer=ByteTokenizer(), schedule="nexus", prefix_cache=False) as llm:
        llm.generate(prompts, **options)
        model.replace_weights(tiny_network(seed=1))
        assert [one.tokens for one in llm.generate(prompts, **options)] == expected


@pytest.mark.slow
def test_decoders_use_the_model_while_passes_run() -> None:
    options: dict[str, Any] = {"decoder": "superposed", "max_tokens": 12, "seed": 3}
    prompts = ["copy Ada Ben Carl Dana Emil:", "copy Ada:", "x" * 90, "hello " * 30] * 2
    with LLM("tiny-autoregressive") as llm:
        expected = [one.tokens for one in llm.generate(prompts, **options)]
    with LLM("tiny-autoregressive", threads=2, schedule="nexus:row_budget=32") as llm:
        assert [one.tokens for one in llm.generate(prompts, **options)] == expected
        llm.engine.check_integrity()
