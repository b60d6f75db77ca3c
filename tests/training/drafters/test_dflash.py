"""DFlash and DSpark in training: the blocks' logits are those of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.dflash import Drafting  # noqa: E402
from anydecode.training.drafters import dflash  # noqa: E402
from anydecode.training.drafters.blocks import choose_starts  # noqa: E402
from anydecode.training.drafters.dflash import DFlash  # noqa: E402
from anydecode.training.drafters.dspark import DSpark  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(recipe: type[DFlash], folder: Path) -> bool:
    tiny = TinyLearner(recipe, 3, length=14)
    drafting, found = Drafting(tiny.checkpoint(folder), tiny.target), tiny.logits()
    for (known, step), logits in found.items():
        hidden = drafting.block(tiny.tokens[:known], 3)
        previous = tiny.tokens[known - 1 + step]
        expected, _, _ = drafting.step(hidden[step], previous, None)
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 4


@pytest.mark.parametrize("recipe", [DFlash, DSpark])
def test_blocks_equal_the_oracles(recipe: type[DFlash], tmp_path: Path) -> None:
    assert equals_oracle(recipe, tmp_path)


def test_confidence_equals_the_oracles(tmp_path: Path) -> None:
    tiny = TinyLearner(DSpark, 3, length=14)
    drafting = Drafting(tiny.checkpoint(tmp_path), tiny.target)
    hidden = drafting.block(tiny.tokens, 3)
    assert isinstance(tiny.learner, DSpark)
    states = torch.from_numpy(hidden).float()
    found = tiny.learner.confidence(states, torch.tensor([5, 6, 7])).sigmoid().tolist()
    expected = [
        drafting.step(row, token, None)[1] for row, token in zip(hidden, (5, 6, 7), strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-4)


def test_blocks_that_attend_to_the_context_of_their_first_slot_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has not computed it when the block is drafted."""
    attend = dflash.attend_blocks

    def leaking(projections: Any, blocks: Any, context: Any, places: Any, visible: Any) -> Any:
        return attend(projections, blocks, context, places, visible.roll(1, -1) | visible)

    monkeypatch.setattr(dflash, "attend_blocks", leaking)
    assert not equals_oracle(DFlash, tmp_path)


def test_blocks_start_where_the_answer_goes_on() -> None:
    tiny = TinyLearner(DFlash, 3, length=14)
    tiny.batch.is_answer[1, :10] = False  # three tokens of the second text are left
    starts = choose_starts(tiny.batch, torch.Generator().manual_seed(0))
    assert starts.shape == (2, 2)
    assert sorted({*starts[0].tolist()}) == sorted(starts[0].tolist())
    assert all(tiny.batch.is_answer[0, start + 1] for start in starts[0])
    assert tiny.batch.is_answer[1, starts[1, 0] + 1] and starts[1, 1] == 12
