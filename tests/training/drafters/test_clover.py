"""Clover and Clover-2 in training: their logits are those of the oracle, and what Clover learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.clover import regression  # noqa: E402
from anydecode.models.clover import load_clover  # noqa: E402
from anydecode.training.drafters.clover import Clover, Clover2  # noqa: E402
from anydecode.training.drafters.learner import Learner  # noqa: E402
from learners import TinyLearner  # noqa: E402

BOTH = pytest.mark.parametrize("recipe", [Clover2, Clover])


def equals_oracle(recipe: type[Learner], folder: Path) -> bool:
    tiny = TinyLearner(recipe, 3)
    checkpoint, found = tiny.checkpoint(folder, has_head=False), tiny.logits()
    for (known, step), logits in found.items():
        drafter = regression(checkpoint, tiny.target, tiny.tokens[:known])
        expected = drafter.logits(tuple(tiny.tokens[known : known + step]))
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 15


@BOTH
def test_states_equal_the_oracles(recipe: type[Learner], tmp_path: Path) -> None:
    assert equals_oracle(recipe, tmp_path)


@BOTH
def test_states_after_the_final_norm_differ(
    recipe: type[Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = recipe.draft
    monkeypatch.setattr(
        recipe,
        "draft",
        lambda self, batch, random: draft(
            self, type(batch)(batch.tokens, batch.final, batch.final, batch.is_answer), random
        ),
    )
    assert not equals_oracle(recipe, tmp_path)


def test_the_loss_of_clover_is_the_cross_entropy_of_the_texts_tokens(tmp_path: Path) -> None:
    """By the oracle's logits, of the positions whose token can be drafted; a distribution of the
    target in place of the token would give another loss."""
    tiny = TinyLearner(Clover, 3)
    checkpoint = tiny.checkpoint(tmp_path, has_head=False)
    tokens, answer = tiny.tokens, tiny.batch.is_answer[0].tolist()
    losses = tiny.learner.losses(tiny.batch, torch.Generator().manual_seed(3))
    for step, found in enumerate(losses):
        expected = []
        for known in range(2, len(tokens) - step):
            drafted = tokens[known + step]
            if not answer[known + step - 1] or drafted not in tiny.vocabulary:
                continue
            drafter = regression(checkpoint, tiny.target, tokens[:known])
            row = drafter.logits(tuple(tokens[known : known + step]))[tiny.vocabulary]
            expected.append(np.log(np.exp(row - row.max()).sum()) + row.max())
            expected[-1] -= row[tiny.vocabulary.index(drafted)]
        assert found.count == 2 * len(expected) > 0  # the batch has the text twice
        loss = float(found.loss.detach())
        assert loss == pytest.approx(2 * sum(expected), rel=2e-3)
        assert 0 < found.accepted < found.count
    teachers = Learner.row_losses
    differing = [one.loss.detach() for one in losses]
    tiny.learner.row_losses = lambda *given: teachers(tiny.learner, *given)  # type: ignore[method-assign]
    others = tiny.learner.losses(tiny.batch, torch.Generator().manual_seed(3))
    assert all(abs(x - y.loss) > 0.1 for x, y in zip(differing, others, strict=True))


@BOTH
@pytest.mark.parametrize("has_head", [True, False])
def test_a_drafter_opens_for_all_tokens_and_for_a_part(
    recipe: type[Learner], has_head: bool, tmp_path: Path
) -> None:
    """With the embeddings, which the code of Clover-2 reads, or with those of the target."""
    tiny = TinyLearner(recipe, 4)
    network = load_clover(tiny.checkpoint(tmp_path, has_head), tiny.target)
    size = tiny.target.spec.vocab_size if has_head else len(tiny.vocabulary)
    assert network.spec.num_logits == size
    assert (network.tokens is tiny.target.weights.embedding) != has_head
    assert network.num_steps == 4
