"""Oracle tests of serving options, against cases computed by hand: drafting under load, samples
that race, and answers in segments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from anydecode.api.first_finish import FirstFinish
from anydecode.api.llm import LLM
from anydecode.certification.checks import PROMPTS, Check, oracle_test, scripted_llm
from anydecode.decoders.speculative.smartspec_server import LoadLimited, ServerGoodput
from anydecode.scoring.sequence import Sequence

_TEXT: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@oracle_test("smartspec-server")
def smartspec_server() -> Iterator[Check]:
    """A pass costs 1 + 0.02 * rows; every acceptance rate starts at 0.6. Alone, 5, 6 and 7 drafts
    give 2.128, 2.132 and 2.119 tokens per cost: 6 are best. 60 requests together draft 1 each."""
    for running in (1, 20, 60):
        expected = _best(running, 0.6, 1.0, 0.02)
        server = ServerGoodput(fixed=1.0, per_row=0.02)
        sizes = list(_sizes(server, running))
        yield Check(f"{running} requests draft {expected} each", sizes == [expected] * running)
    by_hand = (_best(1, 0.6, 1.0, 0.02), _best(60, 0.6, 1.0, 0.02)) == (6, 1)
    yield Check("6 drafts alone, 1 under load", by_hand)
    with scripted_llm(drafting=ServerGoodput(fixed=1.0, per_row=0.02)) as llm:
        loads = {
            id(_load_limited(llm, key).load)
            for key in ("prompt-lookup", "suffix", "token-recycling")
        }
        yield Check("one load is shared by all drafters", len(loads) == 1)
        rejecting = llm.decoder("rejection-sampling")
        yield Check(
            "a text that depends on drafts is unchanged", not isinstance(rejecting, LoadLimited)
        )
        plain = [one.tokens for one in llm.generate(list(PROMPTS), **_TEXT)]
        drafted = llm.generate(list(PROMPTS), decoder="prompt-lookup", **_TEXT)
        yield Check("the text equals plain decoding", [d.tokens for d in drafted] == plain)
        passes = sum(one.stats.passes for one in drafted)
        yield Check("drafts are accepted", passes < sum(map(len, plain)), f"{passes} passes")
        yield Check(
            "finished requests are removed from the load",
            not _load_limited(llm, "prompt-lookup").load.running,
        )


def _best(running: int, rate: float, fixed: float, per_row: float) -> int:
    """The draft length of maximum goodput, from the definition."""

    def goodput(size: int) -> float:
        tokens = sum(rate**i for i in range(size + 1))
        return running * tokens / (fixed + per_row * running * (size + 1))

    return max(range(9), key=goodput)


def _sizes(server: ServerGoodput, running: int) -> Iterator[int]:
    """The draft length of each of `running` sequences, distributed over two drafters."""
    with scripted_llm(drafting=server) as llm:
        keys = ("prompt-lookup", "suffix")
        budgets = []
        for number in range(running):
            request = llm.request("abcabc", max_tokens=20)
            sequence: Sequence = request.jobs[0].sequence
            sequence.cost_model = None
            budgets.append((sequence, _load_limited(llm, keys[number % 2]).budget(sequence)))
        for sequence, budget in budgets:
            yield min(budget.first.size(sequence), 8)  # type: ignore[attr-defined]


def _load_limited(llm: LLM, key: str) -> LoadLimited:
    decoder = llm.decoder(key)
    assert isinstance(decoder, LoadLimited)
    return decoder


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


@oracle_test("segment-rollout")
def segment_rollout() -> Iterator[Check]:
    """Segments of 7 tokens with other requests in between: the text of one call, with a shared
    cache."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "n": 3}
    for decoder in ("autoregressive", "prompt-lookup", "suffix"):
        options: dict[str, Any] = {"decoder": decoder, "max_tokens": 40, "temperature": 0.8}
        with scripted_llm() as llm:
            whole = llm.generate("abc" * 9, seed=5, **options, **penalties).samples
            found: dict[int, list[int]] = {}
            computed: list[int] = []
            runner, answer = llm.engine.runners["target"], None
            for turn in count():
                before = runner.num_rows
                resume: dict[str, Any] | None = answer.resume if answer else None
                seed = None if resume else 5
                numbers = [s["number"] for s in resume["samples"]] if resume else range(3)
                answer = llm.generate(
                    "abc" * 9, segment=7, resume=resume, seed=seed, **options, **penalties
                )
                found |= dict(zip(numbers, (s.tokens for s in answer.samples), strict=True))
                computed.append(runner.num_rows - before)
                longest = max(len(tokens) for tokens in found.values())
                if answer.resume is None or longest > 7 * (turn + 1):
                    break
                llm.generate("zq" * 20, max_tokens=5, ignore_eos=True)
        same = [found[i] for i in range(3)] == [one.tokens for one in whole]
        yield Check(f"the text equals one call's, {decoder}", same, f"{len(computed)} calls")
        # Without cache reuse a call would compute at least the prompt's 27 rows for each sample.
        later = max(computed[1:]) if decoder == "autoregressive" else 0
        yield Check(f"the shared cache is used, {decoder}", later <= 3 * (16 + 7), str(computed))
