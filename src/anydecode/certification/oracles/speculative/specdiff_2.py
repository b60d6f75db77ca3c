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
    for key, size, num_paths, paths_temperature in (
        ("specdiff-2", 16, 4, 1.5),
        ("specdiff-2:size=4,paths=3,temperature=1.2", 4, 3, 1.2),
    ):
        yield from _compare_paths(key, size, num_paths, paths_temperature)


def _compare_paths(
    key: str, size: int, num_paths: int, paths_temperature: float
) -> Iterator[Check]:
    noise = Noise(5).with_purpose("draft")
    for temperature in (0.8, 0.0):
        trace = all_rounds(key, temperature)
        wrong = 0
        for one in trace:
            rows, start = marginals(one.text, size), len(one.text)
            paths = [[plain_token(row, start + i, temperature) for i, row in enumerate(rows)]]
            for number in range(1, num_paths):
                keys = [
                    row / np.float32(paths_temperature)
                    + noise.gumbel(range(len(row)), start + i, number)
                    for i, row in enumerate(rows)
                ]
                paths.append([int(row.argmax()) for row in keys])
            expected = {tuple(path[: n + 1]) for path in paths for n in range(size)}
            wrong += one.tokens[:size] != paths[0] or set(one.paths) != expected
        yield Check(
            f"{key} at T={temperature}: paths equal the oracle", wrong == 0, f"{len(trace)}"
        )
    yield Check(
        f"{key}: some trees have more than one path", any(len(one.tokens) > size for one in trace)
    )
    yield Check(f"{key}: drafts are accepted", accepted(trace) > len(trace))
