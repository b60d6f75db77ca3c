"""Oracle test of stand (STAND, arXiv:2506.04708): running averages of the target's rows, and Gumbel
samples without replacement for the published tree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.oracles.speculative.draft_lengths import FixedCosts
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.oracles.speculative.worthwhile_trees import WorthwhileRanks, seconds
from anydecode.certification.rounds import Logits, TracedRound, accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.stand import NgramProbabilities
from anydecode.decoders.speculative.token_recycling import PUBLISHED
from anydecode.sampling.noise import Noise


@oracle_test("stand")
def stand() -> Iterator[Check]:
    """Running averages over ten tokens, longest n-gram first, Gumbel samples without replacement,
    for the part of the published tree that saves time and for the whole tree. Samples under the
    paper's rejection rule follow the target."""
    table = NgramProbabilities(width=2)
    table.update((1,), [5, 6], [0.6, 0.4])
    table.update((1,), [6, 7], [0.8, 0.2])
    yield Check(
        "averages by hand",
        {k: round(v, 9) for k, v in table.rows[(1,)][1].items()} == {6: 0.6, 5: 0.3},
    )
    logits = wordy(spread=1.6, echo=3)  # so that the n-gram length matters
    for key in ("stand", "stand:row_cost=0"):
        for temperature in (0.0, 0.8):
            with scripted(logits) as llm:
                llm.cost_model = FixedCosts(seconds)
                trace = [
                    one
                    for prompt in PROMPTS
                    for one in rounds(llm, key, prompt, temperature=temperature)
                ]
            chosen = WorthwhileRanks(PUBLISHED) if key == "stand" else None
            wrong = _stand_mistakes(trace, logits, temperature, chosen)
            name = f"{key} at T={temperature}"
            yield Check(f"{name} equals the oracle", wrong == 0, f"{len(trace)} rounds")
            yield Check(f"{name}: drafts are accepted", accepted(trace) > 0)
    yield from rejection_checks("stand", prompt=REPEATING, kind="wor")


def _stand_mistakes(
    trace: list[TracedRound], logits: Logits, temperature: float, chosen: WorthwhileRanks | None
) -> int:
    """The number of rounds with another tree than that of the paths that save time (None: all)."""
    replay, wrong = StandReplay(logits, temperature, chosen), 0
    for one in trace:
        wrong += one.paths != replay.tree(one.text)
        replay.learn(one)
    return wrong


class StandReplay:
    """The trees of STAND. `confidence` is the mean, over the nodes with children, of the largest
    average probability."""

    def __init__(self, logits: Logits, temperature: float, chosen: WorthwhileRanks | None) -> None:
        self.logits = logits
        self.temperature = temperature
        self.chosen = chosen
        self.confidence = 0.0
        self._averages: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}

    def tree(self, text: list[int], size: int = len(PUBLISHED)) -> list[tuple[int, ...]]:
        """The tree that is drafted after a text."""
        shape = PUBLISHED if self.chosen is None else self.chosen.choose(len(text))
        tree: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        samples: dict[tuple[int, ...], list[int]] = {}
        tops = {}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks))[:size]:
            above = tree.get(ranks[:-1])
            if above is None:
                continue
            if above not in samples:
                samples[above] = self._drawn([*text, *above])
            if ranks[-1] < len(samples[above]):
                tree[ranks] = (*above, samples[above][ranks[-1]])
                row = self._row([*text, *above])
                assert row is not None
                tops[above] = float(row.max())
        self.confidence = float(np.mean(list(tops.values()))) if tops else 0.0
        return list(tree.values())[1:]

    def learn(self, one: TracedRound) -> None:
        """Reads the ranks of the generated tokens, then the rows of a round."""
        for number, token in enumerate(one.generated):
            candidates = self._drawn([*one.text, *one.generated[:number]])
            if candidates and self.chosen is not None:
                self.chosen.saw(candidates, token)
        for path in [(), *one.paths]:
            _learn(self._averages, [*one.text, *path], self.logits, self.temperature)

    def _row(self, text: list[int]) -> np.ndarray | None:
        keys = (tuple(text[-n:]) for n in (3, 2, 1))
        return next((self._averages[key][1] for key in keys if key in self._averages), None)

    def _drawn(self, text: list[int]) -> list[int]:
        row = self._row(text)
        if row is None:
            return []
        ids = np.flatnonzero(row)
        keys = np.log(row[ids])
        if self.temperature:
            keys = keys + Noise(5).gumbel(ids, len(text))
        order: list[int] = ids[np.argsort(-keys)].tolist()
        return order


def _learn(
    averages: dict[tuple[int, ...], tuple[int, np.ndarray]],
    text: list[int],
    logits: Logits,
    temperature: float,
) -> None:
    row = logits(tuple(text)).astype(float)
    top = np.argsort(-row)[:10]
    fresh = np.zeros_like(row)
    fresh[top] = np.exp((row[top] - row.max()) / (temperature or 1))
    fresh /= fresh.sum()
    for n in (1, 2, 3):
        if len(text) >= n:
            count, average = averages.get(tuple(text[-n:]), (0, np.zeros_like(row)))
            average = (count * average + fresh) / (count + 1)
            average[np.argsort(-average)[10:]] = 0
            averages[tuple(text[-n:])] = (count + 1, average)
