"""Medusa in training: the heads' logits are those of the oracle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from anydecode.certification.oracles.speculative.medusa import head_logits  # noqa: E402
from anydecode.models.checkpoint import Checkpoint  # noqa: E402
from anydecode.models.medusa import load_medusa  # noqa: E402
from anydecode.training.drafters.medusa import Medusa  # noqa: E402
from learners import TinyLearner  # noqa: E402


def test_heads_equal_the_oracles(tmp_path: Path) -> None:
    tiny = TinyLearner(Medusa, 3)
    written = tiny.checkpoint(tmp_path, has_head=False)
    tensors = {  # named as by the heads' authors
        re.sub(r"blocks\.(\d)\.layers\.0", r"\1.0.linear", name): tensor
        for name, tensor in written.tensors.items()
        if name != "token_map"
    }
    checkpoint = Checkpoint(written.name, written.path, written.config, tensors)
    found = tiny.logits()
    assert len(found) > 15
    for (known, step), logits in found.items():
        expected = head_logits(checkpoint, tiny.target, tiny.tokens[:known])[step]
        tiny.assert_equal(step, logits, expected)


@pytest.mark.parametrize("has_head", [True, False])
def test_the_heads_have_the_draft_vocabulary(has_head: bool, tmp_path: Path) -> None:
    tiny = TinyLearner(Medusa, 3)
    network = load_medusa(tiny.checkpoint(tmp_path, has_head), tiny.target)
    assert network.spec.head_size == len(tiny.vocabulary)
    assert network.weights.head_tokens is not None
    assert network.weights.head_tokens.tolist() == tiny.vocabulary
    assert network.num_steps == 3 and network.shared_head
