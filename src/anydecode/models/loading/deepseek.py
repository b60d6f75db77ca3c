"""Converts the names of DeepSeek-V4 as published to those of `transformers`. Factors of quantised
weights, `scale`, get their usual name; experts in FP4 have them in place of FP8 weights."""

from __future__ import annotations

from typing import Any

from anydecode.models.families.values import num_layers
from anydecode.models.loading.lazy import Reader

_OUTER = {
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
#: The parts of a module that predicts further tokens beside those of its layer.
_FURTHER = {
    "norm.weight": "shared_head.norm.weight",
    "head.weight": "shared_head.head.weight",
    "emb.tok_emb.weight": "embed_tokens.weight",
    **{f"hc_head_{kind}": f"hc_head.hc_{kind}" for kind in ("fn", "base", "scale")},
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.norm": "self_attn.kv_norm",  # as `transformers` writes it
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate": "mlp.gate",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
_VECTORS = {
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    **{
        f"hc_{part}_{kind}": f"{part}_hc.{kind}"
        for part in ("attn", "ffn")
        for kind in ("fn", "base", "scale")
    },
}


def is_deepseek_v4(config: dict[str, Any], readers: dict[str, Reader]) -> bool:
    """Whether a folder has tensors with these names."""
    return config.get("model_type") == "deepseek_v4" and "head.weight" in readers


def to_hf_layout(
    config: dict[str, Any], readers: dict[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """The config as it is, and the tensors under their names in the Hugging Face layout. Modules
    that predict further tokens are the layers behind those of the model."""
    count = num_layers(config)
    return config, {_renamed(name, readers, count): reader for name, reader in readers.items()}


def _renamed(name: str, readers: dict[str, Reader], count: int) -> str:
    own = name.removeprefix("model.")
    kind, layer, part = own.split(".", 2) if own.count(".") >= 2 else ("", "", own)
    if kind == "mtp" and layer.isdigit():
        layer, part = str(count + int(layer)), _FURTHER.get(part, part)
    elif kind != "layers":
        usual = _OUTER.get(own, own)
        return usual if usual.startswith("lm_head.") else f"model.{usual}"
    module, _, leaf = part.rpartition(".")
    if leaf == "scale" and f"{name.removesuffix('scale')}weight" in readers:
        leaf = "weight_scale_inv"
    usual = _MODULES.get(module, module)
    if usual.startswith("ffn."):
        usual = f"mlp.{usual.removeprefix('ffn.')}"
    return f"model.layers.{layer}.{_VECTORS.get(part, f'{usual}.{leaf}')}"
