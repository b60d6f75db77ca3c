"""The configs of models with recurrent layers from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from anydecode.models.limits import refusal
from anydecode.models.loading.gguf_keys import Keys


def lfm2(keys: Keys, config: dict[str, Any]) -> None:
    """Layers without key heads are convolutions."""
    heads, count = keys.get("attention.head_count_kv"), config["num_hidden_layers"]
    if not isinstance(heads, list) or len(heads) < count:
        raise refusal(
            f"{keys.file.path}: metadata lfm2.attention.head_count_kv",
            heads,
            f"a list of {count} numbers",
        )
    config["layer_types"] = ["full_attention" if entry else "conv" for entry in heads[:count]]
    config["conv_L_cache"] = keys.count("shortconv.l_cache")
    config["block_auto_adjust_ff_dim"] = False


def mamba(keys: Keys, config: dict[str, Any]) -> None:
    """Mamba, and Falcon-Mamba, which has norms of the gates."""
    has_norms = keys.get("ssm.dt_b_c_rms", False)
    if not isinstance(has_norms, bool):
        name = f"{keys.file.path}: metadata mamba.ssm.dt_b_c_rms"
        raise refusal(name, has_norms, "true or false")
    if has_norms:
        config["model_type"], config["architectures"] = "falcon_mamba", ["FalconMambaForCausalLM"]
    config["intermediate_size"] = keys.count("ssm.inner_size")
    for key, name in (
        ("ssm.state_size", "state_size"),
        ("ssm.conv_kernel", "conv_kernel"),
        ("ssm.time_step_rank", "time_step_rank"),
    ):
        config[name] = keys.count(key)
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in keys.file.tensors
    config["use_bias"] = "blk.0.ssm_in.bias" in keys.file.tensors
