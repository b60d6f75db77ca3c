"""Oracle test of specdiff-2 (SpecDiff-2, arXiv:2511.00606): the paths drafted from one pass of the
diffusion model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.masked_drafts import all_rounds, marginals
from anydecode.certification.rounds import accepted, plain_token
from anydecode.sampling.noise import Noise


@oracle_test("specdiff-2")
def specdiff() -> Iterator[Check]:
    """The first path uses the target's sampler; the others are samples at their own temperature."""
    noise = Noise(5).with_purpose("draft")
    for temperature in (0.8, 0.0):
        trace = all_rounds("specdiff-2:size=4,paths=3", temperature)
        wrong = 0
        for one in trace:
            rows, start = marginals(one.text, 4), len(one.text)
            paths = [[plain_token(row, start + i, temperature) for i, row in enumerate(rows)]]
            for number in (1, 2):
                temperature_of_paths = np.float32(1.5)
                keys = [
                    row / temperature_of_paths + noise.gumbel(range(len(row)), start + i, number)
                    for i, row in enumerate(rows)
                ]
                paths.append([int(key.argmax()) for key in keys])
            expected = {tuple(path[: n + 1]) for path in paths for n in range(4)}
            wrong += one.tokens[:4] != paths[0] or set(one.paths) != expected
        yield Check(f"paths at T={temperature} equal the oracle", wrong == 0, f"{len(trace)}")
    yield Check("some trees have more than one path", any(len(one.tokens) > 4 for one in trace))
    yield Check("at most three paths", all(len(one.tokens) <= 12 for one in trace))
    yield Check("drafts are accepted", accepted(trace) > len(trace))
