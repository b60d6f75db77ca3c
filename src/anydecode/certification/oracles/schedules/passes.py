"""The passes of an engine under a schedule, and the text, which must not change."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from typing import Any

from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, Restarts, scripted_llm
from anydecode.models.scripted import ByteTokenizer, ScriptedModel

#: One pass: (request, rows, first layer, last layer) of every scheduled span.
Pass = set[tuple[int, int, int, int]]


LONG = ("x" * 200 + "abc" * 50, "hello " * 40, "q" * 300)


def same_text(schedule: str) -> Check:
    """Whether long and short prompts, with and without drafts, with restarts, give the text of the
    default schedule."""
    prompts = [*LONG, *PROMPTS]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with scripted_llm() as llm:
        expected = [answer.tokens for answer in llm.generate(prompts, **options)]
    for decoder in ("autoregressive", "prompt-lookup"):
        with scripted_llm(schedule=schedule) as llm, Restarts(llm.engine, seed=5):
            answers = llm.generate(prompts, decoder=decoder, **options)
            llm.engine.check_integrity()
        if [answer.tokens for answer in answers] != expected:
            return Check(f"the text equals the default schedule's, {decoder}", False)
    return Check("the text equals the default schedule's, with restarts", True)


def passes(
    schedule: str, lengths: Seq[int], *, tokens: int, layers: int = 3, **more: Any
) -> list[Pass]:
    """The passes for prompts of these lengths; `more` has one value per prompt for each option, and
    `running` and `cache_positions`. All are submitted at once, or each before the step of the
    engine that `arrivals` gives for it."""
    running, cache_positions = more.pop("running", 256), more.pop("cache_positions", 4096)
    arrivals: Seq[int] = more.pop("arrivals", [0] * len(lengths))
    model = ScriptedModel(seed=1, num_layers=layers)
    engine: dict[str, Any] = {"schedule": schedule, "prefix_cache": False, "max_running": running}
    result: list[Pass] = []
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=cache_positions, **engine) as llm:
        runner = llm.engine.runners["target"]
        plain: dict[str, Any] = {
            "decoder": "autoregressive",
            "ignore_eos": True,
            "max_tokens": tokens,
        }
        options = [
            {**plain, **{key: values[i] for key, values in more.items()}}
            for i in range(len(lengths))
        ]
        requests = [
            llm.request([97 + i] * length, **options[i]) for i, length in enumerate(lengths)
        ]
        number = {id(request.jobs[0].sequence): i for i, request in enumerate(requests)}
        run = runner.run

        def recording(plan: Any) -> Any:
            result.append(
                {
                    (number[id(score.sequence.root)], rows, span.start, span.stop)
                    for score, span, rows in plan.scheduled
                }
            )
            return run(plan)

        runner.run = recording  # type: ignore[method-assign]
        for step in count():
            for request, arrival in zip(requests, arrivals, strict=True):
                if arrival == step:
                    llm.engine.submit(request.jobs[0])
            llm.engine.step()
            if all(request.done for request in requests):
                break
    return result


def rows_of(all_passes: list[Pass]) -> list[dict[int, int]]:
    return [{request: rows for request, rows, _, _ in one} for one in all_passes]
