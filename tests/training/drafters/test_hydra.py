"""Hydra and Hydra++ in training: the heads' logits are those of the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.hydra import Heads  # noqa: E402
from anydecode.models.hydra import load_hydra  # noqa: E402
from anydecode.training.drafters.hydra import Hydra, HydraPlus  # noqa: E402
from learners import TinyLearner  # noqa: E402


def equals_oracle(recipe: type[Hydra], folder: Path) -> bool:
    """Row t of head i: behind the text up to t + 1 and i drafted tokens."""
    tiny = TinyLearner(recipe, 3)
    checkpoint, found = tiny.checkpoint(folder), tiny.logits()
    for (known, step), logits in found.items():
        heads = Heads(checkpoint, tiny.target, tiny.tokens[:known])
        expected = heads.logits(tuple(tiny.tokens[known : known + step]))
        try:
            tiny.assert_equal(step, logits, expected)
        except AssertionError:
            return False
    return len(found) > 15


@pytest.mark.parametrize("recipe", [Hydra, HydraPlus])
def test_heads_equal_the_oracles(recipe: type[Hydra], tmp_path: Path) -> None:
    assert equals_oracle(recipe, tmp_path)


def test_heads_that_read_the_state_of_the_last_token_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has not computed it when the heads draft."""
    monkeypatch.setattr(Hydra, "prefix", lambda self, final: torch.roll(final, -1, 1))
    assert not equals_oracle(Hydra, tmp_path)


@pytest.mark.parametrize("recipe", [Hydra, HydraPlus])
@pytest.mark.parametrize("has_head", [True, False])
def test_heads_open_with_their_own_matrix_and_with_rows_of_the_targets(
    recipe: type[Hydra], has_head: bool, tmp_path: Path
) -> None:
    tiny = TinyLearner(recipe, 3)
    network = load_hydra(tiny.checkpoint(tmp_path, has_head), tiny.target)
    size = tiny.target.spec.vocab_size if has_head else len(tiny.vocabulary)
    assert network.spec.num_logits == size == network.heads[2].output.weight.out_features
    assert (network.prefix is not None) == (recipe is HydraPlus)
