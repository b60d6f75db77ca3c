"""Oracle test of stand (STAND, arXiv:2506.04708): running averages of the target's rows, and Gumbel
samples without replacement for the published tree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.copied_chains import PROMPTS
from anydecode.certification.oracles.speculative.rejection_rules import REPEATING, rejection_checks
from anydecode.certification.rounds import Logits, TracedRound, accepted, rounds, scripted, wordy
from anydecode.decoders.speculative.stand import NgramProbabilities
from anydecode.decoders.speculative.token_recycling import PUBLISHED
from anydecode.sampling.noise import Noise


@oracle_test("stand")
def stand() -> Iterator[Check]:
    """Running averages over ten tokens, longest n-gram first, Gumbel samples without replacement
    for the tree of the two best nodes and for the whole published tree. Samples under the paper's
    rejection rule follow the target."""
    table = NgramProbabilities(width=2)
    table.update((1,), [5, 6], [0.6, 0.4])
    table.update((1,), [6, 7], [0.8, 0.2])
    yield Check(
        "averages by hand",
        {k: round(v, 9) for k, v in table.rows[(1,)][1].items()} == {6: 0.6, 5: 0.3},
    )
    logits = wordy(spread=1.6, echo=3)  # so that the n-gram length matters
    # At the default cost of 0.1 a row, two nodes of the published tree pay.
    for key, shape in (("stand", [(0,), (0, 0)]), ("stand:row_cost=0", PUBLISHED)):
        for temperature in (0.0, 0.8):
            with scripted(logits) as llm:
                trace = [
                    one
                    for prompt in PROMPTS
                    for one in rounds(llm, key, prompt, temperature=temperature)
                ]
            wrong = _stand_mistakes(trace, logits, temperature, shape)
            name = f"{key} at T={temperature}"
            yield Check(f"{name} equals the oracle", wrong == 0, f"{len(trace)} rounds")
            yield Check(f"{name}: drafts are accepted", accepted(trace) > 0)
    yield from rejection_checks("stand", prompt=REPEATING)


def _stand_mistakes(
    trace: list[TracedRound], logits: Logits, temperature: float, shape: list[tuple[int, ...]]
) -> int:
    averages: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}
    noise = Noise(5)
    wrong = 0

    def drawn(text: list[int]) -> list[int]:
        row = next((averages[k][1] for n in (3, 2, 1) if (k := tuple(text[-n:])) in averages), None)
        if row is None:
            return []
        ids = np.flatnonzero(row)
        keys = np.log(row[ids])
        if temperature:
            keys = keys + noise.gumbel(ids, len(text))
        order: list[int] = ids[np.argsort(-keys)].tolist()
        return order

    for one in trace:
        tree: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        samples: dict[tuple[int, ...], list[int]] = {}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks)):
            above = tree.get(ranks[:-1])
            if above is None:
                continue
            if above not in samples:
                samples[above] = drawn([*one.text, *above])
            if ranks[-1] < len(samples[above]):
                tree[ranks] = (*above, samples[above][ranks[-1]])
        wrong += one.paths != list(tree.values())[1:]
        for path in [(), *one.paths]:
            _learn(averages, [*one.text, *path], logits, temperature)
    return wrong


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
