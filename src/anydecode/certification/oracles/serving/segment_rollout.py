"""Oracle test of segment-rollout (UloRL, arXiv:2507.19766): an answer in segments equals the answer
of one call, and reuses the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

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
