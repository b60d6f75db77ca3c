"""What the parity tests do not show of Doge: its context, and what is refused."""

from __future__ import annotations

import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from tiny_models import checkpoint_of, hf_model


def test_the_context_is_that_of_all_positions() -> None:
    config = checkpoint_of(hf_model("Doge", keep_window_size=100)).config
    assert spec_from_config(config).max_positions == 100
    with pytest.raises(CheckpointError, match="max_positions is 101; allowed is 100 at most"):
        spec_from_config(config, max_positions=101)


def test_experts_are_refused() -> None:
    config = {**checkpoint_of(hf_model("Doge")).config, "is_moe": True}
    with pytest.raises(CheckpointError, match="a mixture of experts of model type 'doge'"):
        spec_from_config(config)
