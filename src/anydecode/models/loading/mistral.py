"""Converts the names of Mistral Large 4 as published to those of `transformers`."""

from __future__ import annotations

from typing import Any

from anydecode.models.loading.lazy import Reader

_OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lerope.alpha": "model.rotary_emb.alpha",
}
_MODULES = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate",
    **{
        f"{module}.{own}": f"{usual}.{part}_proj"
        for module, usual in (("feed_forward", "mlp"), ("shared_experts", "mlp.shared_experts"))
        for own, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
}
_SCALES = {"ssmax_scaling.s": "softmax_scaling.scale", "ssmax_scaling.b": "softmax_scaling.bias"}


def is_mistral_large4(config: dict[str, Any], readers: dict[str, Reader]) -> bool:
    """Whether a folder has tensors with these names."""
    kind = str(config.get("model_type"))
    return kind.startswith("mistral_large4") and "tok_embeddings.weight" in readers


def to_hf_layout(readers: dict[str, Reader]) -> dict[str, Reader]:
    """The tensors of the language model under their names in the Hugging Face layout."""
    names = {name: _renamed(name) for name in readers}
    return {usual: readers[name] for name, usual in names.items() if usual is not None}


def _renamed(name: str) -> str | None:
    """The name in the Hugging Face layout; None for tensors of other parts."""
    start, _, rest = name.partition(".")
    if start != "layers":
        return _OUTER.get(name)
    layer, _, part = rest.partition(".")
    for own, usual in _SCALES.items():
        part = part.replace(own, usual)
    module, _, leaf = part.rpartition(".")
    module = _MODULES.get(module, module)
    if module.startswith("attention."):
        module = f"self_attn.{module.removeprefix('attention.')}"
    elif module.startswith("experts."):
        module = f"mlp.{module}"
    return f"model.layers.{layer}.{module}.{leaf}"
