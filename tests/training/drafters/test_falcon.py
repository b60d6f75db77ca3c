"""Falcon in training: its logits are those of the oracle, and glancing shows rows their truth."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.falcon import Blocks  # noqa: E402
from anydecode.certification.tiny import tiny_network  # noqa: E402
from anydecode.errors import UnsupportedCombinationError  # noqa: E402
from anydecode.models.draft_heads import load_draft_head  # noqa: E402
from anydecode.training.drafters import falcon  # noqa: E402
from anydecode.training.drafters.falcon import Falcon  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(folder: Path) -> bool:
    tiny = TinyLearner(Falcon, 4)
    tiny.learner.eval()
    checkpoint, found = tiny.checkpoint(folder), tiny.logits()
    for (known, step), logits in found.items():
        drafter = Blocks(checkpoint, tiny.target, tiny.tokens[:known])
        expected = drafter.logits(tuple(tiny.tokens[known : known + step]))
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 8


def test_states_equal_the_oracles(tmp_path: Path) -> None:
    assert equals_oracle(tmp_path)


def test_blocks_whose_rows_see_those_before_alone_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = falcon.Blocks
    monkeypatch.setattr(
        falcon, "Blocks", lambda rows, positions, visible: own(rows, positions, visible.tril())
    )
    assert not equals_oracle(tmp_path)


def test_the_file_opens_for_its_target(tmp_path: Path) -> None:
    tiny = TinyLearner(Falcon, 4)
    network = load_draft_head(tiny.checkpoint(tmp_path), tiny.target)
    assert network.spec.architecture == "Falcon"
    assert network.spec.block is not None and network.spec.block.max_drafts == 2


def test_rows_glance_at_the_truth_of_a_falling_share_of_what_is_wrong() -> None:
    """Only first rows of blocks, state and token together, as many as the share of wrong rows."""
    tiny = TinyLearner(Falcon, 2, length=40)
    learner, batch = tiny.learner, tiny.batch
    batch.is_answer[:, 3:-1] = True
    firsts = torch.arange(0, 38, 2)
    own = firsts[:, None] + torch.arange(2)
    counts = []
    for progress in (0.0, 1.0):
        learner.progress = progress
        with torch.no_grad():
            context = learner.cells(batch.tokens[:, 1:], batch.final[:, :-1])
            found = learner.run_blocks(
                learner.cells(batch.tokens[:, own + 1], batch.final[:, own]), context, firsts
            )
            tokens, states = learner.glanced(batch, context, firsts, torch.Generator())
        wrong = learner.best_tokens(found) != learner.best_tokens(batch.final[:, own + 2])
        num_wrong = int((wrong & batch.is_answer[:, own + 2]).sum())
        is_shown = (states != batch.final[:, own]).any(-1)
        assert not is_shown[..., 1].any()
        texts, blocks = torch.nonzero(is_shown[..., 0]).unbind(-1)
        assert (tokens[texts, blocks, 0] == batch.tokens[texts, firsts[blocks] + 3]).all()
        assert (states[texts, blocks, 0] == batch.final[texts, firsts[blocks] + 2]).all()
        assert len(texts) == int((0.45 if progress == 0 else 0.1) * num_wrong)
        counts.append(len(texts))
    assert counts[0] > counts[1] > 0


def test_an_odd_depth_is_refused() -> None:
    with pytest.raises(UnsupportedCombinationError, match="depth 3 is no multiple"):
        Falcon(tiny_network(layers=6), [1, 2, 3], 3, 7)
