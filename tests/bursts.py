"""Multi-step bursts in which the kernels draft, and the rules that they draft by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.framework.ngram_index import NgramIndex
from anydecode.decoders.speculative.draft_choice import best_draft
from anydecode.decoders.speculative.match_cursor import NGRAM_SIZES, MatchCursor
from anydecode.kernels.interface import MAX_MATCH, NUM_BINS, BurstDrafter, BurstDrafts

#: Tokens that a drafter drafts behind a text, and the probabilities that it gives them.
Chain = tuple[Sequence[int], Sequence[float]]


class Burst:
    """A burst's drafts and tokens, and the texts as they were before it."""

    def __init__(self, drafts: BurstDrafts, num_steps: int) -> None:
        self.drafts, self.num_steps = drafts, num_steps
        self.drafter = copy(drafts.drafter)
        self.texts = [
            text._replace(tokens=text.tokens[: text.length].copy()) for text in drafts.texts
        ]
        self.tokens: list[int] = []


@contextmanager
def recorded(llm: LLM) -> Iterator[list[Burst]]:
    """The bursts with drafts, in order."""
    bursts: list[Burst] = []
    run = llm.model.run

    def running(rows: Any, cache: Any, spec: Any) -> Any:
        if spec.drafts is not None:
            bursts.append(Burst(spec.drafts, spec.step_limits[0]))
        output = run(rows, cache, spec)
        if spec.drafts is not None:
            bursts[-1].tokens = output.steps[0]
        return output

    llm.model.run = running  # type: ignore[method-assign]
    yield bursts


def drafts_by_rule(
    burst: Burst,
    chains: Mapping[int, Chain] | None = None,
    sizes: tuple[int, ...] = NGRAM_SIZES,
) -> list[list[int]]:
    """The drafts of a burst by `MatchCursor`, `best_draft` and the chains that its drafter drafts
    at each length of the text."""
    drafts, drafter, cursors = burst.drafts, burst.drafter, []
    for text in burst.texts:
        history = NgramIndex(sizes)
        history.extend(text.tokens.tolist())
        cursors.append(MatchCursor(history))
        cursors[-1].position, cursors[-1].length = text.position, text.match
    own, costs = cursors[0].history, drafts.costs.tolist()
    can_draft, num_due = drafter is not None and len(drafter.tokens) > 0, 0
    if drafter is not None:
        num_due = drafter.num_due
    tokens, found = list(burst.tokens), []
    for given in drafts.drafts:
        num_read = len(burst.tokens) - len(tokens)
        room = min(len(costs) - 1, burst.num_steps - num_read - 1)

        def chance(index: int, depth: int = 0) -> float:
            length = cursors[index].length
            return burst.texts[index].chances[min(length + depth, MAX_MATCH)] if length else 0.0

        def paths(chances: Sequence[float]) -> list[float]:
            products = np.cumprod(chances).tolist()
            return [path for path in products if path >= drafts.min_probability]

        best = max(range(len(cursors)), key=chance)
        copied = cursors[best].chain(room)
        copied_paths = paths([chance(best, depth) for depth in range(len(copied))])
        count, rate = best_draft(copied_paths, costs, 0, 0.0)
        draft = copied[:count]
        if drafter is not None and chains is not None and can_draft and room:
            if num_due or rate < drafter.rate:
                chain, chances = followed(drafter, chains[len(own)], costs, room)
                num_due, spent = max(0, num_due - 1), drafter.seconds * len(chain)
                with_drafting = [seconds + spent for seconds in costs]  # also without a draft
                count, rate = best_draft(paths(chances), with_drafting, 0, 0.0)
                draft = chain[:count]
                count, copied_rate = best_draft(copied_paths, with_drafting, 0, 0.0)
                if copied_rate > rate:
                    draft = copied[:count]
        can_draft = drafter is not None
        found.append(draft)
        kept = 0
        while kept < min(len(given), len(tokens) - 1) and tokens[kept] == given[kept]:
            kept += 1
        for token in tokens[: kept + 1]:
            own.append(token)
            for cursor in cursors:
                cursor.step(own.tokens)
        tokens = tokens[kept + 1 :]
    return found


def followed(
    drafter: BurstDrafter, chain: Chain, costs: Sequence[float], room: int
) -> tuple[list[int], list[float]]:
    """The part of a chain after which one more token is not expected to save time, and the
    acceptance probabilities of its tokens."""
    tokens: list[int] = []
    chances: list[float] = []
    path = expected = 1.0
    last = len(drafter.mean_chances) - 1
    for depth, (token, probability) in enumerate(zip(*chain, strict=True)):
        kind = min(int(probability * NUM_BINS), NUM_BINS - 1)
        tokens.append(token)
        chances.append(float(drafter.chances[min(depth, last), kind]))
        path *= chances[-1]
        expected += path
        count = depth + 1
        if count == min(room, drafter.max_drafts):
            break
        rate = expected / (costs[count] + count * drafter.seconds)
        gain = path * float(drafter.mean_chances[min(count, last)])
        if gain < rate * (costs[count + 1] - costs[count] + drafter.seconds):
            break
    return tokens, chances
