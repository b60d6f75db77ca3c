"""What a trained drafter is worth: its drafts in the engine's own loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM

#: Drafted and verified as chains of this length, if the drafter can.
DEPTH = 5


def measure(
    llm: LLM,
    prompts: Seq[list[int]],
    decoder: str,
    depth: int,
    tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Tokens per pass of the target, and the fraction of the drafts that is accepted at each depth
    of a chain, of those whose predecessors were.

    Args:
        llm: The target and its drafter.
        prompts: What to answer.
        decoder: The decoder that drafts.
        depth: Number of drafts of its chains.
        tokens: Maximum number of tokens of an answer.
        temperature: Sampling temperature.
        seed: Random seed of the sampling.
    """
    reached, accepted = np.zeros(depth), np.zeros(depth)
    passes = count = 0
    answers = llm.generate(
        list(prompts),
        decoder=decoder,
        temperature=temperature,
        seed=seed,
        max_tokens=tokens,
        trace=True,
    )
    for answer in answers:
        passes, count = passes + answer.stats.passes, count + len(answer.tokens)
        for event in answer.trace or ():
            length, kept = len(event["drafted"]), len(event["accepted"])
            reached[: min(kept + 1, length)] += 1
            accepted[:kept] += 1
    return {
        "tokens_per_pass": round(count / max(1, passes), 3),
        "accepted_by_depth": [round(float(value), 3) for value in accepted / reached.clip(1)],
    }
