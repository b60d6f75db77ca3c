"""Oracle test of SmartSpec: the draft lengths of sequences side by side, replayed from their
rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts, latest_copy
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.rounds import TracedRound, scripted, traced_rounds, wordy

PROMPTS = ("abcabcabd", "the cab had a bad cab and the cab had", "aaaaaaaa")
MAX_DRAFTS = 8
#: The cost of a pass by its rows and its context.
Seconds = Callable[[int, int], float]


def seconds(rows: int, context: int) -> float:
    """The cost of a pass in the test: every row costs more than the one before it, and so do rows
    of long contexts."""
    return 1 + 0.01 * rows**2 + 0.001 * rows * context


@dataclass
class _Running:
    """One sequence of the replay. `history` is of the accepted and tested drafts of its rounds."""

    trace: list[TracedRound]
    num_rounds: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0

    @property
    def length(self) -> int:
        return len(self.trace[min(self.num_rounds, len(self.trace) - 1)].text)


@oracle_test("smartspec")
def smartspec() -> Iterator[Check]:
    """Every draft has the length of maximum goodput of all running sequences together."""
    for prompts in (PROMPTS[:1], PROMPTS):
        for temperature in (0.0, 0.8):
            with scripted(wordy(spread=2.0, echo=5)) as llm:
                llm.cost_model = FixedCosts(seconds)
                traces = traced_rounds(llm, "smartspec", prompts, 80, temperature=temperature)
            wrong, sizes = _replay(traces, seconds, MAX_DRAFTS)
            where = f"{len(prompts)} sequences, T={temperature}"
            yield Check(f"draft lengths equal the replay, {where}", wrong == 0, f"{sizes}")
            num_accepted = sum(len(one.accepted) for trace in traces for one in trace)
            yield Check(f"drafts are accepted, {where}", num_accepted > 0, f"{num_accepted}")
    yield from _many_lengths()
    yield from _beside_others()
    alone, two, three = sizes[:3]
    is_shorter = alone >= two >= three < alone
    yield Check("sequences that join shorten the drafts", is_shorter, f"{sizes[:3]}")
    with scripted(wordy()) as llm:
        llm.cost_model = FixedCosts(lambda rows, context: float(rows))
        (never,) = traced_rounds(llm, "smartspec", PROMPTS[:1], 30)
    yield Check("nothing is drafted where every row costs a pass", not any(o.tokens for o in never))
    yield from rejection_checks("smartspec", prompt=REPEATING, fixed=1.0, per_row=0.0)


def _many_lengths() -> Iterator[Check]:
    """With cheap rows and long drafts, small differences of the rates are other lengths."""

    def linear(rows: int, context: int) -> float:
        return 1 + 0.04 * rows

    for temperature in (0.0, 0.8):
        with scripted(wordy(spread=2.0, echo=5)) as llm:
            llm.cost_model = FixedCosts(linear)
            key = "smartspec:max_drafts=30"
            traces = traced_rounds(llm, key, PROMPTS, 240, temperature=temperature)
        wrong, sizes = _replay(traces, linear, 30)
        detail = f"{len(set(sizes))} lengths"
        name = f"draft lengths equal the replay, many lengths, T={temperature}"
        yield Check(name, wrong == 0 and len(set(sizes)) > 4, detail)


def _beside_others() -> Iterator[Check]:
    """Sequences of other decoders have a row and a token each. Their rows count where few rows are
    free of cost, their tokens where every row has one."""

    def limited(rows: int, context: int) -> float:
        return 1 + 0.5 * max(0, rows - 16)

    for name, cost in (("every row has a cost", seconds), ("16 rows have none", limited)):
        found = []
        for others in (0, 9):
            with scripted(wordy(spread=2.0, echo=5)) as llm:
                llm.cost_model = FixedCosts(cost, others)
                traces = traced_rounds(llm, "smartspec", PROMPTS, 80)
            wrong, sizes = _replay(traces, cost, MAX_DRAFTS, others)
            about = f"beside {others} sequences of other decoders, where {name}"
            yield Check(f"draft lengths equal the replay, {about}", wrong == 0, f"{sizes}")
            found.append(sum(sizes) / len(sizes))
        yield Check(f"others change the drafts, where {name}", found[0] != found[1], f"{found}")


def _replay(
    traces: list[list[TracedRound]], seconds: Seconds, max_drafts: int, others: int = 0
) -> tuple[int, list[int]]:
    """The number of drafts that differ from the oracle's, and the lengths chosen. All sequences
    share the time per draft and the history of all rounds. `others`: the number of sequences beside
    any one of them, of whatever decoder."""
    running: list[_Running] = []
    waiting = [_Running(trace) for trace in traces]
    shared: list[tuple[int, int]] = []
    per_draft, wrong, sizes = 0.0, 0, []
    while running or waiting:
        for one in [*running, *waiting]:
            if one in waiting:
                waiting.remove(one)
                running.append(one)
            else:
                last = one.trace[one.num_rounds]
                if last.tokens:
                    spent = last.entry["draft_seconds"] / len(last.tokens)
                    per_draft += (spent - per_draft) / 10
                tested = min(len(last.tokens), len(last.accepted) + 1)
                for history in (one.history, shared):
                    history.append((len(last.accepted), tested))
                one.num_rounds += 1
                if one.num_rounds == len(one.trace):
                    running.remove(one)
                    continue
            goodputs = [
                _goodput(running, shared, k, per_draft, seconds, others)
                for k in range(max_drafts + 1)
            ]
            if max(goodputs) > 1.02 * goodputs[one.size]:
                one.size = goodputs.index(max(goodputs))
            sizes.append(one.size)
            now = one.trace[one.num_rounds]
            wrong += now.tokens != latest_copy(now.text, one.size)
    return wrong, sizes


def _rate(history: Seq[tuple[int, int]], memory: int, first: float, weight: float) -> float:
    """The share of accepted drafts, where a round counts 1 - 1 / `memory` of the next one, and
    `first` as `weight` drafts."""
    weights = [(1 - 1 / memory) ** age for age in range(len(history))][::-1]
    accepted = sum(w * n for w, (n, _) in zip(weights, history, strict=True))
    tested = sum(w * n for w, (_, n) in zip(weights, history, strict=True))
    return (accepted + weight * first) / (tested + weight)


def _goodput(
    running: list[_Running],
    shared: Seq[tuple[int, int]],
    size: int,
    per_draft: float,
    seconds: Seconds,
    others: int,
) -> float:
    """All rates are equally probable at first: their mean is that of two drafts, one accepted."""
    foreign = max(0, others + 1 - len(running))
    first = _rate(shared, 50, 0.5, 2)
    rates = [_rate(one.history, 10, first, 4) for one in running]
    tokens = sum(rate**i for rate in rates for i in range(size + 1))
    context = sum(one.length for one in running) // len(running)
    cost = seconds(len(running) * (size + 1) + foreign, context)
    return (tokens + foreign) / (cost + per_draft * size * len(running))
