"""EAGLE and EAGLE-3 in training: unrolled draft steps are the rows of the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.eagle import Cache, Drafting  # noqa: E402
from anydecode.certification.oracles.speculative.state_drafters import TargetStates  # noqa: E402
from anydecode.training.drafters.eagle import Eagle  # noqa: E402
from anydecode.training.drafters.eagle3 import Eagle3  # noqa: E402
from anydecode.training.drafters.learner import Learner  # noqa: E402
from anydecode.training.drafters.unrolled import UnrolledAttention  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(recipe: type[Learner], folder: Path) -> bool:
    """Row t of step i: the drafter behind t + 1 rows of the target's states and i of its own."""
    tiny = TinyLearner(recipe, 3)
    drafting, forward = Drafting(tiny.checkpoint(folder), tiny.target), TargetStates(tiny.target)
    read = []
    for token in tiny.tokens:
        states = forward.states(token)
        read.append(drafting.target_state(states, forward.normed(states[-1])))
    compared = 0
    for (known, step), logits in sorted(tiny.logits().items()):
        cache = Cache()
        for position in range(1, known):
            found, state = drafting.row(cache, tiny.tokens[position], read[position - 1], position)
        for position in range(known, known + step):
            found, state = drafting.row(cache, tiny.tokens[position], state, position)
        try:
            tiny.assert_equal(step, logits, found)
        except AssertionError:
            return False
        compared += 1
    return compared > 15


@pytest.mark.parametrize("recipe", [Eagle, Eagle3])
def test_unrolled_steps_equal_the_oracles_rows(recipe: type[Learner], tmp_path: Path) -> None:
    assert equals_oracle(recipe, tmp_path)


@pytest.mark.parametrize("recipe", [Eagle, Eagle3])
def test_steps_that_forget_the_steps_before_differ(
    recipe: type[Learner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = UnrolledAttention.step

    def forgetful(self: UnrolledAttention, x: object) -> object:
        del self._keys[1:], self._values[1:]
        return step(self, x)  # type: ignore[arg-type]

    monkeypatch.setattr(UnrolledAttention, "step", forgetful)
    assert not equals_oracle(recipe, tmp_path)
