"""Clover-2 in training: its logits are those of the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.clover import Regression  # noqa: E402
from anydecode.models.clover import load_clover  # noqa: E402
from anydecode.training.drafters.clover import Clover  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(folder: Path) -> bool:
    tiny = TinyLearner(Clover, 3)
    checkpoint, found = tiny.checkpoint(folder, has_head=False), tiny.logits()
    for (known, step), logits in found.items():
        drafter = Regression(checkpoint, tiny.target, tiny.tokens[:known])
        expected = drafter.logits(tuple(tiny.tokens[known : known + step]))
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 15


def test_states_equal_the_oracles(tmp_path: Path) -> None:
    assert equals_oracle(tmp_path)


def test_states_after_the_final_norm_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Clover.draft
    monkeypatch.setattr(
        Clover,
        "draft",
        lambda self, batch, random: draft(
            self, type(batch)(batch.tokens, batch.final, batch.final, batch.is_answer), random
        ),
    )
    assert not equals_oracle(tmp_path)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_drafter_opens_for_all_tokens_and_for_a_part(has_head: bool, tmp_path: Path) -> None:
    """With the embeddings, which its authors' code reads, or with those of the target."""
    tiny = TinyLearner(Clover, 4)
    network = load_clover(tiny.checkpoint(tmp_path, has_head), tiny.target)
    size = tiny.target.spec.vocab_size if has_head else len(tiny.vocabulary)
    assert network.spec.num_logits == size
    assert (network.tokens is tiny.target.weights.embedding) != has_head
    assert network.num_steps == 4
