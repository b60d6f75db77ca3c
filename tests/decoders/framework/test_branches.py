"""Branches of a sequence: what they have in common is stored once, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.decoders.framework import rollouts
from anydecode.decoders.search import apar, beam_group
from anydecode.errors import OutOfMemoryError
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

METHODS = [
    "beam:width=4",
    "diverse-beam:width=4,groups=2",
    "particle-filtering:n=4,step_tokens=8",
    "phi:width=2,k=3,step_tokens=8",
    "a-star:k=3,step_tokens=8,expansions=6",
]


def _texts(
    llm: LLM, decoder: str, preempted_after: int | None = None, **options: Any
) -> list[list[int]]:
    """The texts of a request, which is preempted after some steps."""
    given = {"temperature": 0.8, "seed": 3, "n": 1, **options}
    request = llm.request("the cat sat on the", decoder=decoder, max_tokens=40, **given)
    llm.start(request, background=False)
    for step in range(10_000):
        if step == preempted_after:
            llm.engine.preempt(request.jobs[0])
        if request.done:
            break
        llm.engine.step()
    llm.engine.check_integrity()
    return [one.tokens for one in request.generation().samples]


def _open(positions: int = 4096) -> LLM:
    model = ScriptedModel(seed=1)
    return LLM(model, tokenizer=ByteTokenizer(), prefix_cache=False, cache_positions=positions)


def _unlimited(decoder: str) -> tuple[list[list[int]], int, int]:
    """The texts of a request with enough memory, the largest number of positions in use, and the
    number of passes."""
    with _open() as llm:
        texts, runner = _texts(llm, decoder), llm.engine.runners["target"]
        return texts, runner.pool.max_used, runner.num_passes


@pytest.mark.parametrize("decoder", METHODS)
def test_branches_need_no_more_memory_after_a_restart(decoder: str) -> None:
    expected, peak, num_steps = _unlimited(decoder)
    for step in range(1, num_steps, max(1, num_steps // 8)):
        with _open(peak) as llm:
            assert _texts(llm, decoder, step) == expected


def _nothing(*given: Any) -> Iterator[Any]:
    """Shares nothing."""
    yield from ()


@pytest.mark.parametrize("decoder", METHODS[:3])
def test_branches_that_share_nothing_need_more(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, peak, num_steps = _unlimited(decoder)
    for module in (apar, beam_group, rollouts):
        monkeypatch.setattr(module, "share_prefixes", _nothing)
    with _open(peak) as llm, pytest.raises(OutOfMemoryError):
        _texts(llm, decoder, num_steps - 2)


@pytest.mark.parametrize("decoder", ["a-star:k=3,step_tokens=8,expansions=6", "best-of-n:n=3"])
def test_samplers_that_learn_from_logits_keep_what_they_have_learned(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong twin: after a restart the tokens are appended without the logits that mirostat has
    learned from."""

    def found(step: int | None) -> list[list[int]]:
        with _open() as llm:
            return _texts(llm, decoder, step, mirostat=2, mirostat_tau=2.0, temperature=1.5)

    expected = found(None)
    assert [found(step) for step in (12, 25)] == [expected] * 2
    forget = property(lambda rollout: None, lambda rollout, sampler: None)
    monkeypatch.setattr(rollouts.Rollout, "sampler", forget)
    assert [found(step) for step in (12, 25)] != [expected] * 2
