"""LongSpec in training: the layer's logits are those of the oracle, and positions and the rows of
the target that it sees are chosen at random."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.longspec import DraftLayer  # noqa: E402
from anydecode.errors import UnsupportedCombinationError  # noqa: E402
from anydecode.training.drafters import longspec  # noqa: E402
from anydecode.training.drafters.longspec import LongSpec  # noqa: E402
from learners import TinyLearner  # noqa: E402


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("window", [4, 512])
@pytest.mark.parametrize("offset", [0, 900])
def test_logits_equal_the_oracles(
    lag: int, window: int, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row sees the target up to `lag` positions before its own; a shift of all positions changes
    nothing."""
    monkeypatch.setattr(longspec, "choose_lag", lambda random: lag)
    monkeypatch.setattr(longspec, "anchor_offset", lambda length, *_: torch.arange(length) + offset)
    monkeypatch.setattr(longspec, "WINDOW", window)
    tiny = TinyLearner(LongSpec, 1)
    checkpoint = tiny.checkpoint(tmp_path, has_head=False)
    found = tiny.logits()
    for known in range(lag + 1, len(tiny.tokens) + 1):
        text, drafted = tiny.tokens[: known - lag + 1], tiny.tokens[known - lag + 1 : known]
        layer = DraftLayer(checkpoint, tiny.target, text)
        tiny.assert_equal(0, found[known, 0], layer.logits(tuple(drafted)))


def test_first_rows_see_nothing_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longspec, "choose_lag", lambda random: 5)
    found = TinyLearner(LongSpec, 1).logits()
    assert all(torch.isfinite(torch.from_numpy(row)).all() for row in found.values())


def test_positions_behind_the_sinks_have_one_offset() -> None:
    random = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(60):
        positions = longspec.anchor_offset(20, 5000, random)
        steps = positions.diff()
        sinks = int((steps != 1).nonzero()[0]) + 1 if (steps != 1).any() else 0
        assert sinks <= 4 and (steps != 1).sum() <= 1
        assert positions[-1] < 4000 and (sinks == 0 or positions[0] == 0)
        seen.add((sinks, int(positions[-1])))
    assert {sinks for sinks, _ in seen} == {0, 1, 2, 3, 4} and len(seen) > 50


@pytest.mark.parametrize(("length", "max_positions"), [(1201, 40_000), (20, 1000)])
def test_long_texts_and_small_models_keep_their_positions(length: int, max_positions: int) -> None:
    positions = longspec.anchor_offset(length, max_positions, torch.Generator().manual_seed(0))
    assert positions.tolist() == list(range(length))


def test_lags_are_those_of_the_drafts_of_a_round() -> None:
    random = torch.Generator().manual_seed(0)
    assert {longspec.choose_lag(random) for _ in range(60)} == {1, 2, 3, 4, 5}


def test_refusals() -> None:
    with pytest.raises(UnsupportedCombinationError, match="depth=1"):
        TinyLearner(LongSpec, 2)
