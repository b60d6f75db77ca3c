"""P-EAGLE in training: the logits of its slots are those of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.dflash import ParallelEagle  # noqa: E402
from anydecode.training.drafters import blocks as parts  # noqa: E402
from anydecode.training.drafters.peagle import PEagle  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(folder: Path) -> bool:
    tiny = TinyLearner(PEagle, 3, length=14)
    drafting, found = ParallelEagle(tiny.checkpoint(folder), tiny.target), tiny.logits()
    for (known, step), logits in found.items():
        try:
            tiny.assert_equal(step, logits, drafting.block(tiny.tokens[:known], 3)[step])
        except AssertionError:
            return False
    return len(found) > 14


def test_slots_equal_the_oracles(tmp_path: Path) -> None:
    assert equals_oracle(tmp_path)


@pytest.mark.parametrize("mistake", ["later masks", "later rows"])
def test_slots_that_attend_to_later_rows_differ(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = parts.attend_blocks

    def leaking(projections: Any, blocks: Any, context: Any, places: Any, visible: Any) -> Any:
        if mistake == "later masks":
            blocks = blocks._replace(visible=blocks.visible | True)
        else:
            visible = visible.roll(1, -1) | visible
        return attend(projections, blocks, context, places, visible)

    monkeypatch.setattr(parts, "attend_blocks", leaking)
    assert not equals_oracle(tmp_path)
