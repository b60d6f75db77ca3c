"""What is refused of ZAYA1."""

from __future__ import annotations

from typing import Any

import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from tiny_models import checkpoint_of, hf_model

SIZES = {"head_dim": 12, "moe_intermediate_size": 24, "num_experts": 5, "router_hidden_size": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cca_time0": 3}, "cca_time0 is 3; allowed is 2"),
        ({"layer_types": ["mamba"] * 3}, "layer_types is 'mamba'; allowed is hybrid or hybrid_sli"),
        ({"num_key_value_heads": 1, "head_dim": 9}, "the rotary size is|an even size of values"),
    ],
)
def test_settings_that_are_not_supported(change: dict[str, Any], message: str) -> None:
    config = {**checkpoint_of(hf_model("Zaya", **SIZES)).config, **change}
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)
