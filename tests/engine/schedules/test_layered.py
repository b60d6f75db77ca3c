"""Which prompts a cohort of layered prefill takes."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.api.llm import LLM
from anydecode.models.scripted import ByteTokenizer, ScriptedModel


def first_cohort(schedule: str, *lengths: int) -> list[int]:
    """The lengths of the prompts that run in the first pass, all submitted at once."""
    model = ScriptedModel(seed=1, num_layers=4)
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=512, schedule=schedule) as llm:
        requests = [
            llm.request([97 + number] * length, max_tokens=1, decoder="autoregressive")
            for number, length in enumerate(lengths)
        ]
        runner = llm.engine.runners["target"]
        run = runner.run
        passes: list[set[int]] = []

        def recorded(plan: Any) -> Any:
            passes.append({id(score.sequence.root) for score, _, _ in plan.scheduled})
            return run(plan)

        runner.run = recorded  # type: ignore[method-assign]
        for request in requests:
            llm.engine.submit(request.jobs[0])
        while not all(request.done for request in requests):
            llm.engine.step()
    return [
        length
        for request, length in zip(requests, lengths, strict=True)
        if id(request.jobs[0].sequence) in passes[0]
    ]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((5, 5, 5), [5, 5]),  # exactly as many rows as a cohort may have
        ((5, 6, 4), [5]),  # in order of arrival: the third does not overtake
        ((11, 5), [11]),  # a longer prompt alone, in chunks
        ((3, 3, 3), [3, 3, 3]),
    ],
)
def test_a_cohort_holds_whole_prompts_up_to_its_size(
    lengths: tuple[int, ...], expected: list[int]
) -> None:
    schedule = "layered-prefill:unit=2,cohort=10,short=2"
    assert first_cohort(schedule, *lengths) == expected
