"""Oracle test of rsd (Recursive Speculative Decoding, arXiv:2402.14160): the conditioned keys, and
the trees of RSD-C and RSD-S."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.oracles.speculative.draft_trees import Path, compare_trees, draft_row
from anydecode.certification.oracles.speculative.penalised_drafts import penalty_checks
from anydecode.certification.oracles.speculative.rejection_rules import rejection_checks
from anydecode.decoders.speculative.rsd import condition_on_parent


@oracle_test("rsd")
def rsd() -> Iterator[Check]:
    """Gumbel-top-k per node; stochastic beams with the paper's formula. Samples under
    the paper's rejection rule follow the target."""
    yield from penalty_checks("rsd")
    keys = np.array([0.3, 2.0, -1.0])
    naive = -np.log(np.exp(-0.5) - np.exp(-2.0) + np.exp(-keys))
    yield Check(
        "conditioned keys equal the formula",
        np.allclose(condition_on_parent(0.5, keys), naive),
    )
    yield Check(
        "the largest key becomes the parent's key", condition_on_parent(0.5, keys)[1] == 0.5
    )
    yield Check(
        "no overflow for large keys",
        bool(np.isfinite(condition_on_parent(800.0, np.array([-700.0, 5.0]))).all()),
    )

    def branching(text: list[int], temperature: float) -> list[Path]:
        tree: list[Path] = []
        level: list[Path] = [()]
        for count in (3, 2, 1):
            level = [
                (*path, token)
                for path in level
                for token in list(draft_row(text, path, temperature))[:count]
            ]
            tree += level
        return tree

    def beams(text: list[int], temperature: float, width: int, depth: int) -> list[Path]:
        tree: list[Path] = []
        level: list[tuple[float, float, Path]] = [(0.0, 0.0, ())]
        for _ in range(depth):
            options = []
            for above, log, path in level:
                row = draft_row(text, path, temperature)
                raw = np.array([log + key for _, key in row.values()])
                shifted = raw
                if temperature:
                    inner = np.exp(-above) - np.exp(-raw.max()) + np.exp(-raw)
                    shifted = -np.log(inner)
                for key, (token, (q, _)) in zip(shifted, row.items(), strict=True):
                    options.append((float(key), log + float(np.log(q)), (*path, token)))
            level = sorted(options, key=lambda option: -option[0])[:width]
            tree += [path for _, _, path in level]
        return tree

    yield from compare_trees("rsd", partial(beams, width=3, depth=4))
    yield from compare_trees("rsd:width=4,depth=3", partial(beams, width=4, depth=3))
    yield from compare_trees("rsd:branching=3-2-1", branching)
    yield from rejection_checks("rsd", kind="wor")
    yield from rejection_checks("rsd", kind="wor", branching="3-2-1")
