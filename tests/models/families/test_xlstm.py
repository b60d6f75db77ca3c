"""What the parity tests do not show of xLSTM: fused matrices, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anydecode.errors import CheckpointError
from anydecode.models.families import spec_from_config
from tiny_models import built, chain, checkpoint_of, hf_logits, hf_model, logits

TEXT = [(7 * i + 3) % 131 for i in range(20)]
SIZES: dict[str, Any] = {"hidden_size": 128, "num_heads": 4}
#: Fused modules, and their parts in order.
FUSED = {
    "mlstm_layer.qkv_opreact": [f"mlstm_layer.{x}" for x in ("q", "k", "v", "ogate_preact")],
    "mlstm_layer.ifgate_preact": [f"mlstm_layer.{x}gate_preact" for x in "if"],
    "ffn.proj_up_gate_z": ["ffn.proj_up_gate", "ffn.proj_up"],
}


def test_fused_matrices() -> None:
    theirs = hf_model("xLSTM", **SIZES)
    checkpoint = checkpoint_of(theirs)
    tensors = dict(checkpoint.tensors)
    for layer in range(3):
        for module, parts in FUSED.items():
            for leaf in ("weight", "bias"):
                names = [f"backbone.blocks.{layer}.{part}.{leaf}" for part in parts]
                found = [np.asarray(tensors.pop(name)) for name in names if name in tensors]
                if found:
                    tensors[f"backbone.blocks.{layer}.{module}.{leaf}"] = np.concatenate(found)
    own = built(replace(checkpoint, tensors=tensors))
    assert np.abs(logits(own, chain(TEXT)) - hf_logits(theirs, TEXT)).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bias": True}, "use_bias is True; allowed is false"),
        ({"embedding_dim": 64}, "embedding_dim is 64; allowed is 128, the hidden size"),
        ({"num_heads": 3}, "num_heads is 3; allowed is a divisor of the 128 numbers of v_dim"),
    ],
)
def test_settings_that_are_not_supported(change: dict[str, Any], message: str) -> None:
    config = {**checkpoint_of(hf_model("xLSTM", **SIZES)).config, **change}
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)
