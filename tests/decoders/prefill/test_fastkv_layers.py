"""Which layers of FastKV compute the whole prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anydecode import LLM, catalogue
from anydecode.certification.tiny import tiny_model
from anydecode.errors import UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer

LAYERS = 4


def computed_layers(layer: int) -> set[tuple[int, int]]:
    """(first layer, last layer) of the rows that a pass over the prompt computes."""
    model = tiny_model(layers=LAYERS)
    prompt = np.random.default_rng(1).integers(97, 123, 80).tolist()
    found: set[tuple[int, int]] = set()
    with LLM(model, tokenizer=ByteTokenizer(), cache_positions=400) as llm:
        runner = llm.engine.runners["target"]
        run = runner.run

        def recorded(plan: Any) -> Any:
            found.update((span.start, span.stop) for _, span, _ in plan.scheduled)
            return run(plan)

        runner.run = recorded  # type: ignore[method-assign]
        decoder = catalogue.build("fastkv", layer=layer, budget=20)
        llm.generate(prompt, decoder=decoder, max_tokens=1)
    return found - {(0, LAYERS)}


@pytest.mark.parametrize(("layer", "last"), [(-1, 1), (0, 0), (1, 1), (2, 2)])
def test_the_layers_after_the_chosen_one_compute_a_part(layer: int, last: int) -> None:
    assert computed_layers(layer) == {(0, last + 1), (last + 1, LAYERS)}


def test_a_layer_follows_the_chosen_one() -> None:
    with pytest.raises(UnsupportedCombinationError, match="layer=3 must be at least 0 and before"):
        computed_layers(3)
