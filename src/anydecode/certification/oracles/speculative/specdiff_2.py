"""Oracle test of specdiff-2 (SpecDiff-2, arXiv:2511.00606): the paths drafted from one pass of the
diffusion model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import expected, fit, sampled
from anydecode.certification.oracles.speculative.masked_drafts import TARGET, all_rounds, marginals
from anydecode.certification.oracles.speculative.rejection_rules import small_diffusion_llm
from anydecode.certification.rounds import accepted, plain_token
from anydecode.sampling.noise import Noise


@oracle_test("specdiff-2")
def specdiff() -> Iterator[Check]:
    """The first path uses the target's sampler; the others are samples at their own temperature.
    With `selection` tokens are accepted along the path with the largest expected streak alone, and
    samples follow the target."""
    for key, size, num_paths, paths_temperature in (
        ("specdiff-2", 16, 4, 1.5),
        ("specdiff-2:size=4,paths=3,temperature=1.2", 4, 3, 1.2),
    ):
        yield from _compare_paths(key, size, num_paths, paths_temperature)
    yield from _selection()


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


def _selection() -> Iterator[Check]:
    """The path that self-selection verifies, by the target's probabilities; samples with it."""
    temperature, wrong, num_accepted, num_later = 0.8, 0, 0, 0
    # Paths of a low temperature, so that many are accepted.
    for one in all_rounds("specdiff-2:selection=true,temperature=0.5", temperature):
        leaves = [path for path in one.paths if not any(other[:-1] == path for other in one.paths)]
        selected = max(leaves, key=lambda path: _expected_streak(one.text, path, temperature))
        kept = tuple(one.tokens[node] for node in one.accepted)
        wrong += kept != selected[: len(kept)]
        num_accepted += len(kept)
        num_later += bool(kept) and kept[0] != leaves[0][0]
    yield Check("tokens are accepted along the selected path", wrong == 0, f"{num_accepted}")
    yield Check("also along others than the first", num_later > 0, f"{num_later} rounds")
    with small_diffusion_llm() as llm:
        decoder = catalogue.build("specdiff-2", size=3, paths=3, selection=True)
        found = fit(
            sampled(llm, decoder, {"temperature": 0.8}, 600), expected({"temperature": 0.8})
        )
    yield Check("with selection samples follow the target", found.passed, str(found))


def _expected_streak(text: list[int], path: tuple[int, ...], temperature: float) -> float:
    total, product = 0.0, 1.0
    for depth, token in enumerate(path):
        row = TARGET((*text, *path[:depth])).astype(float) / temperature
        weights = np.exp(row - row.max())
        product *= weights[token] / weights.sum()
        total += product
    return total
