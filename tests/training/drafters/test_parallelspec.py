"""ParallelSpec in training: the logits of its positions are those of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.parallelspec import slot_logits  # noqa: E402
from anydecode.training.drafters import parallelspec  # noqa: E402
from anydecode.training.drafters.parallelspec import ParallelSpec  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(folder: Path) -> bool:
    tiny = TinyLearner(ParallelSpec, 3, length=14)
    checkpoint, found = tiny.checkpoint(folder), tiny.logits()
    for (known, step), logits in found.items():
        expected = slot_logits(checkpoint, tiny.target, tiny.tokens[:known])[step]
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 14


def test_positions_equal_the_oracles(tmp_path: Path) -> None:
    assert equals_oracle(tmp_path)


def test_one_state_for_all_masks_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of P-EAGLE."""
    run = parallelspec.run_masks

    def shared(layer: Any, context: Any, chosen: Any, masks: Any, state: Any) -> Any:
        return run(layer, context, chosen, masks[:1].expand_as(masks), state[:1].expand_as(state))

    monkeypatch.setattr(parallelspec, "run_masks", shared)
    assert not equals_oracle(tmp_path)


def test_a_block_behind_a_later_row_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parallelspec.run_masks
    monkeypatch.setattr(
        parallelspec,
        "run_masks",
        lambda layer, context, chosen, *given: run(layer, context, chosen + 1, *given),
    )
    assert not equals_oracle(tmp_path)
