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
from anydecode.scoring.goodput import useful_counts

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
        first = len(bursts)
        if spec.drafts:
            bursts.extend(map(Burst, spec.drafts, spec.step_limits))
        output = run(rows, cache, spec)
        if spec.drafts:
            for burst, tokens in zip(bursts[first:], output.steps, strict=True):
                burst.tokens = tokens
        return output

    llm.model.run = running  # type: ignore[method-assign]
    yield bursts


@contextmanager
def recorded_calls(llm: LLM) -> Iterator[list[list[Burst]]]:
    """The calls with drafts for several sequences, in order, with the burst of each."""
    calls: list[list[Burst]] = []
    run = llm.model.run

    def running(rows: Any, cache: Any, spec: Any) -> Any:
        if len(spec.drafts) < 2:
            return run(rows, cache, spec)
        bursts = list(map(Burst, spec.drafts, spec.step_limits))
        output = run(rows, cache, spec)
        for burst, tokens in zip(bursts, output.steps, strict=True):
            burst.tokens = tokens
        calls.append(bursts)
        return output

    llm.model.run = running  # type: ignore[method-assign]
    yield calls


class _Copies:
    """The copies of one sequence in a call, by `MatchCursor`."""

    def __init__(self, burst: Burst) -> None:
        self.burst, self.left, self.cursors = burst, list(burst.tokens), list[MatchCursor]()
        for text in burst.texts:
            history = NgramIndex(NGRAM_SIZES)
            history.extend(text.tokens.tolist())
            self.cursors.append(MatchCursor(history))
            self.cursors[-1].position, self.cursors[-1].length = text.position, text.match
        for cursor in self.cursors:
            if cursor.length < NGRAM_SIZES[0]:
                cursor.search(self.cursors[0].history.tokens)

    def _chance(self, index: int, depth: int = 0) -> float:
        length = self.cursors[index].length
        chances = self.burst.texts[index].chances
        return float(chances[min(length + depth, MAX_MATCH)]) if length else 0.0

    def paths(self, max_drafts: int, min_probability: float) -> tuple[list[int], list[float]]:
        """The chain from the best text, and the probabilities of its beginnings."""
        if not self.cursors:
            return [], []
        room = min(max_drafts, self.burst.num_steps - len(self.burst.tokens) + len(self.left) - 1)
        best = max(range(len(self.cursors)), key=self._chance)
        chain = self.cursors[best].chain(room)
        paths = np.cumprod([self._chance(best, depth) for depth in range(len(chain))]).tolist()
        paths = [path for path in paths if path >= min_probability]
        return chain[: len(paths)], paths

    def read(self, draft: Sequence[int]) -> None:
        """Go on behind a pass with this draft."""
        kept = 0
        while kept < min(len(draft), len(self.left) - 1) and self.left[kept] == draft[kept]:
            kept += 1
        for token in self.left[: kept + 1]:
            if self.cursors:
                self.cursors[0].history.append(token)
            for cursor in self.cursors:
                cursor.step(self.cursors[0].history.tokens)
        self.left = self.left[kept + 1 :]


def shared_drafts_by_rule(
    bursts: Sequence[Burst], apart: bool = False, unweighted: bool = False
) -> list[list[list[int]]]:
    """The drafts of each sequence in each pass of a call: of all chains the tokens which together
    promise the most per second, by `useful_counts`, each with the weight of its sequence; with
    `apart`, those of each sequence as if its drafts were the only ones; with `unweighted`, those
    of sequences that count alike."""
    first = bursts[0].drafts
    costs, copies, found = first.costs.tolist(), [_Copies(burst) for burst in bursts], []
    for number in range(len(first.rows)):
        chains, paths = zip(
            *(one.paths(len(costs) - 1, first.min_probability) for one in copies), strict=True
        )
        weights = [1.0 if unweighted else burst.drafts.weight for burst in bursts]
        paths = [
            [weight * path for path in one] for weight, one in zip(weights, paths, strict=True)
        ]

        def cost(rows: int) -> float:
            return costs[rows] if rows < len(costs) else float("inf")

        if apart:
            counts = [useful_counts([path], len(bursts), cost)[0] for path in paths]
        else:
            counts = useful_counts(paths, len(bursts), cost)
        found.append([chain[:count] for chain, count in zip(chains, counts, strict=True)])
        for one, burst in zip(copies, bursts, strict=True):
            one.read(burst.drafts.drafts[number])
    return found


def drafts_by_rule(burst: Burst, sizes: tuple[int, ...] = NGRAM_SIZES) -> list[list[int]]:
    """The drafts of a burst without a drafter; see `scored_by_rule`."""
    return [draft for draft, _ in scored_by_rule(burst, sizes=sizes)]


def scored_by_rule(
    burst: Burst,
    chains: Mapping[int, Chain] | None = None,
    siblings: Mapping[int, tuple[int, float]] | None = None,
    sizes: tuple[int, ...] = NGRAM_SIZES,
) -> list[tuple[list[int], int | None]]:
    """The draft of each pass of a burst and the sibling of its first token, by `MatchCursor`,
    `best_draft`, and the chains and siblings that its drafter drafts at each length of the text,
    with the probabilities that it gives them."""
    drafts, drafter, cursors = burst.drafts, burst.drafter, []
    for text in burst.texts:
        history = NgramIndex(sizes)
        history.extend(text.tokens.tolist())
        cursors.append(MatchCursor(history))
        cursors[-1].position, cursors[-1].length = text.position, text.match
    own, costs = cursors[0].history, drafts.costs.tolist()
    for cursor in cursors:
        if cursor.length < sizes[0]:
            cursor.search(own.tokens)
    can_draft, num_due = drafter is not None and len(drafter.tokens) > 0, 0
    if drafter is not None:
        num_due = drafter.num_due
    tokens, found = list(burst.tokens), list[tuple[list[int], int | None]]()
    for given, given_sibling in zip(drafts.drafts, drafts.siblings, strict=True):
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
        draft, sibling = copied[:count], None
        if drafter is not None and chains is not None and can_draft and room:
            if num_due or rate < drafter.rate:
                chain, chances = followed(drafter, chains[len(own)], costs, room)
                num_due, spent = max(0, num_due - 1), drafter.seconds * len(chain)
                with_drafting = [seconds + spent for seconds in costs]  # also without a draft
                path, first = paths(chances), len(chain)
                longest = min(room, drafter.max_drafts)
                if siblings is not None and drafter.sibling_chances is not None and first < longest:
                    sibling, probability = siblings[len(own)]
                    share = drafter.sibling_chances[min(int(2 * probability * 10), 9)]
                    if share >= drafts.min_probability:
                        first = sum(one >= share for one in path)
                        path.insert(first, share)
                count, rate = best_draft(path, with_drafting, 0, 0.0)
                draft, sibling = (
                    chain[: count - (count > first)],
                    sibling if count > first else None,
                )
                count, copied_rate = best_draft(copied_paths, with_drafting, 0, 0.0)
                if copied_rate > rate:
                    draft, sibling = copied[:count], None
        can_draft = drafter is not None
        found.append((draft, sibling))
        if len(tokens) > 1 and tokens[0] == given_sibling and given[:1] != tokens[:1]:
            given = [given_sibling]
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
