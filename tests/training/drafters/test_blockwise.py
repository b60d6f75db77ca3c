"""Proposal heads in training: their logits are those of the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.blockwise import head_logits  # noqa: E402
from anydecode.training.drafters.blockwise import Blockwise  # noqa: E402
from learners import TinyLearner  # noqa: E402


def test_heads_equal_the_oracles(tmp_path: Path) -> None:
    tiny = TinyLearner(Blockwise, 3)
    checkpoint, found = tiny.checkpoint(tmp_path), tiny.logits()
    assert len(found) > 15
    for (known, step), logits in found.items():
        expected = head_logits(checkpoint, tiny.target, tiny.tokens[:known])[step]
        tiny.assert_equal(step, logits, expected)
