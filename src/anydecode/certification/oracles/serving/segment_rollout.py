"""Oracle test of segment-rollout (UloRL, arXiv:2507.19766): an answer in segments equals the answer
of one call, and reuses the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from anydecode.api.rollout_queue import Rollout, RolloutQueue
from anydecode.certification.checks import Check, oracle_test, scripted_llm


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
    yield from _queue()


def _queue() -> Iterator[Check]:
    """Rounds of 7 tokens for 3 of 6 samples: unfinished samples first, the oldest first, and the
    texts and log-probabilities of one call each."""
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "logprobs": 2,
                               "stop_tokens": [99, 116]}  # fmt: skip
    prompts = (("abc" * 9, 2, 5), ("the cat", 3, 6), ("zq", 1, 7))
    with scripted_llm() as llm:
        whole = [one for prompt, n, seed in prompts
                 for one in llm.generate(prompt, n=n, seed=seed, **options).samples]  # fmt: skip
    with scripted_llm() as llm:
        queue = RolloutQueue(llm, 7, 3, **options)
        for prompt, n, seed in prompts:
            queue.add(prompt, n, seed)
        ended: list[Rollout] = []
        rounds: list[list[tuple[Any, int, int]]] = []
        while len(queue):
            started = {(one.prompt, one.number): len(one.tokens) for one in queue.unfinished}
            new = queue.round()
            ended += new
            after = {(one.prompt, one.number): len(one.tokens) for one in [*new, *queue.unfinished]}
            rounds.append([(*key, size) for key, size in after.items() if size != started.get(key)])
            llm.generate("zq" * 20, max_tokens=5, ignore_eos=True)
        llm.engine.check_integrity()
    expected = _simulated([len(one.tokens) for one in whole], 7, 3)
    names = [(prompt, number) for prompt, n, _ in prompts for number in range(n)]
    sizes = [[(*names[i], size) for i, size in one] for one in expected]
    is_right = [sorted(one) for one in rounds] == [sorted(one) for one in sizes]
    yield Check("a round continues the oldest samples first", is_right, f"{len(rounds)} rounds")
    found = {(one.prompt, one.number): one for one in ended}
    results = [found[name].generation for name in names]
    same = [one.tokens if one else [] for one in results] == [one.tokens for one in whole]
    yield Check("the samples of a queue equal those of one call", same)
    same = [found[name].logprobs for name in names] == [one.logprobs for one in whole]
    yield Check("and so do their log-probabilities", same)
    parts = [[(s.start, s.stop) for s in found[name].segments] for name in names]
    cuts = [[(i, min(i + 7, len(one.tokens))) for i in range(0, len(one.tokens), 7)]
            for one in whole]  # fmt: skip
    yield Check("the segments of a sample are recorded", parts == cuts, str(parts))


def _simulated(lengths: list[int], segment: int, capacity: int) -> list[list[tuple[int, int]]]:
    """The (sample, tokens after the round) of each round, for samples of these lengths."""
    sizes, waiting, rounds = [0] * len(lengths), list(range(len(lengths))), []
    while waiting:
        chosen = waiting[:capacity]
        for i in chosen:
            sizes[i] = min(lengths[i], sizes[i] + segment)
        rounds.append([(i, sizes[i]) for i in chosen])
        waiting = [i for i in waiting if sizes[i] < lengths[i]]
    return rounds
