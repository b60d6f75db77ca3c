"""LoRA adapters of the tiny model of certificates, as files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from anydecode.certification.tiny import tiny_model


def save_adapter(folder: Path, seed: int) -> Path:
    """Random factors for two matrices of every layer. Returns the folder."""
    generator = np.random.default_rng(seed)
    network = tiny_model().network
    tensors = {}
    for layer in network.weights.layers:
        for weight in (layer.query.weight, layer.mlp.down.weight):
            stem = f"base_model.model.{weight.name}"
            down = generator.standard_normal((2, weight.in_features), np.float32)
            up = generator.standard_normal((weight.out_features, 2), np.float32)
            tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
