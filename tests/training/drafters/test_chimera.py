"""Chimera in training: its logits are those of the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.chimera import Encoders  # noqa: E402
from anydecode.models.chimera import load_chimera  # noqa: E402
from anydecode.training.drafters import chimera  # noqa: E402
from anydecode.training.drafters.chimera import Chimera  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(folder: Path) -> bool:
    tiny = TinyLearner(Chimera, 3)
    checkpoint, found = tiny.checkpoint(folder, has_head=False), tiny.logits()
    for (known, step), logits in found.items():
        drafter = Encoders(checkpoint, tiny.target, tiny.tokens[:known])
        expected = drafter.logits(tuple(tiny.tokens[known : known + step]))
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 15


def test_states_equal_the_oracles(tmp_path: Path) -> None:
    assert equals_oracle(tmp_path)


def test_steps_that_do_not_see_the_outputs_before_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = chimera.attend_rows

    def forgetful(q: Any, keys: Any, values: Any, others: Any) -> Any:
        return own(q, keys, values, others[-1:])

    monkeypatch.setattr(chimera, "attend_rows", forgetful)
    assert not equals_oracle(tmp_path)


def test_outputs_learn_to_be_the_targets_states() -> None:
    tiny = TinyLearner(Chimera, 2)
    with torch.no_grad():
        (state, _), _ = tiny.learner.draft(tiny.batch, torch.Generator())
    rows, final = state[0], tiny.batch.final[0, 1:]
    far, near = rows.clone(), rows.clone()
    near[:, tiny.learner.width :] = final
    far[:, : tiny.learner.width] = final
    previous = acceptance = torch.zeros(len(rows))
    losses = [tiny.learner.extra_loss(one, final, previous, acceptance) for one in (near, far)]
    assert losses[0] is not None and losses[1] is not None
    assert losses[0].abs().max() == 0 and losses[1].min() > 0


@pytest.mark.parametrize("has_head", [True, False])
def test_the_file_opens_for_its_target(has_head: bool, tmp_path: Path) -> None:
    tiny = TinyLearner(Chimera, 3)
    network = load_chimera(tiny.checkpoint(tmp_path, has_head), tiny.target)
    assert network.spec.num_logits == len(tiny.vocabulary)
    assert len(network.resolvers) == 3
