"""Oracle test of first-finish (First Finish Search, arXiv:2505.18149): winners and cancelled
samples by hand, and against samples that all run to their end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anydecode.api.first_finish import FirstFinish
from anydecode.certification.checks import Check, oracle_test, scripted_llm


@oracle_test("first-finish")
def first_finish() -> Iterator[Check]:
    """Winners and cancelled samples by hand; then against samples that all run to their end."""
    race = FirstFinish(2, min_tokens=5)
    samples = [(9, "stop"), (4, "stop"), (12, None), (7, None), (30, "length"), (8, "stop")]
    yield Check("samples that can no longer win are lost", race.lost(samples) == [2])
    yield Check("nothing is lost before two samples have finished", not race.lost(samples[:4]))
    ended = [*samples[:2], (12, "cancelled"), (7, "stop"), *samples[4:]]
    yield Check("the shortest win, if they have the minimum length", race.winners(ended) == [3, 5])
    few = [(30, "length"), (4, "stop"), (6, "cancelled"), (9, "stop")]
    yield Check("other samples fill up, cancelled ones last", race.winners(few) == [3, 0])
    default = FirstFinish()
    lost = default.lost([(1, "stop"), (1, None), (0, None)])
    yield Check("by default the first of any length wins", lost == [1], str(lost))
    tie = [(9, "length"), (9, "stop")]
    yield Check("a sample that stops wins against one cut off", FirstFinish(1).winners(tie) == [1])
    wrong, num_saved = 0, 0
    for first, seed in ((1, 1), (2, 2), (1, 3), (3, 4)):
        for decoder in ("autoregressive", "prompt-lookup"):
            options: dict[str, Any] = {"n": 5, "temperature": 1.0, "seed": seed, "max_tokens": 200}
            with scripted_llm() as llm:
                every = llm.generate("abcabc", **options).samples
                request = llm.request("abcabc", decoder=decoder, first_finish=first, **options)
                samples_of_race = llm._run([request])[0].samples
                llm.engine.check_integrity()
            stops = [one.tokens for one in every if one.finish_reason == "stop"]
            order = sorted(stops, key=len) + [o.tokens for o in every if o.tokens not in stops]
            wrong += [one.tokens for one in samples_of_race] != order[:first]
            num_generated = sum(len(job.sequence.tokens) for job in request.jobs)
            num_saved += sum(len(one.tokens) for one in every) - num_generated
    yield Check("the winners equal those of complete samples", wrong == 0, f"{wrong} wrong")
    yield Check("the others were cancelled", num_saved > 0, f"{num_saved} tokens saved")
