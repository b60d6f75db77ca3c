"""What a trained drafter is worth: its drafts in the engine's own loop."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.training.drafters.learner import Learner

#: Drafted and verified as chains of this length, if the drafter can.
DEPTH = 5


def measure(
    llm: LLM, prompts: Seq[list[int]], learner: Learner, tokens: int, temperature: float
) -> dict[str, Any]:
    """Tokens per pass of the target, and the fraction of the drafts that is accepted at each depth
    of a chain, of those whose predecessors were.

    Args:
        llm: The target and its drafter.
        prompts: What to answer.
        learner: The drafter's recipe.
        tokens: Maximum number of tokens of an answer.
        temperature: Sampling temperature.
    """
    depth = min(DEPTH, learner.max_drafts or DEPTH)
    reached, accepted = np.zeros(depth), np.zeros(depth)
    passes = count = 0
    answers = llm.generate(
        list(prompts),
        decoder=learner.decoder.format(depth),
        temperature=temperature,
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
