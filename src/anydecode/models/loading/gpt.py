"""Converts the layouts of GPT, GPT-2, GPT-Neo, GPT-J, CodeGen, GPT-NeoX, GPT-BigCode, CodeShell,
Falcon, BLOOM, MPT, OPT, Jais, BioGPT, XGLM, EXAONE 3, InternLM2, Qwen, ChatGLM, Persimmon, DBRX,
TeleChat and Refact to the usual one: module names, separate queries, keys and values, and matrices
of shape [out, in]."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels import portable
from anydecode.kernels.interface import Weight
from anydecode.models.families.values import (
    bool_value,
    mapping_value,
    rotary_share,
    value_or,
)
from anydecode.models.limits import MAX_COUNT, MAX_EXPERTS, ConfigError, integer, number, refusal
from anydecode.models.loading.lazy import Reader


@dataclass(frozen=True)
class _Layout:
    """A layout of checkpoints.

    Attributes:
        keys: Its config keys, and the usual ones.
        defaults: The values of keys that its configs may leave out.
        fixed: Options, and the only value that is supported.
        prefixes: The start of the names of all tensors but the head's.
        blocks: The name of the list of layers.
        outer: The modules outside the layers, and their usual names.
        inner: The modules of a layer, and their usual names; several where one is read twice.
        qkv: The fused queries, keys and values of a layer; empty if they are separate.
        rows: Returns the rows of queries, keys and values in the fused matrix; of keys and values
            if the queries are apart.
        is_transposed: Whether the matrices of layers are stored as [in, out].
        num_unused: The rows of the table of positions before that of position 0.
        has_key_heads: Whether `num_key_value_heads` is a key of its configs. Others have as many
            heads of keys as of queries.
    """

    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    prefixes: tuple[str, ...]
    blocks: str
    outer: Mapping[str, str]
    inner: Mapping[str, tuple[str, ...]]
    qkv: str
    rows: Callable[[dict[str, Any]], tuple[np.ndarray, ...]]
    is_transposed: bool = False
    num_unused: int = 0
    has_key_heads: bool = False


def _heads(config: dict[str, Any]) -> tuple[int, int, int]:
    """The numbers of query heads and key heads, and the size of a head."""
    heads = integer("num_attention_heads", config.get("num_attention_heads"), 1, MAX_COUNT)
    kv_heads = integer("num_key_value_heads", config.get("num_key_value_heads"), 1, MAX_COUNT)
    hidden = integer("hidden_size", config.get("hidden_size"))
    if heads % kv_heads or hidden % heads:
        allowed = f"a multiple of {kv_heads} that divides the hidden size {hidden}"
        raise refusal("num_attention_heads", heads, allowed)
    return heads, kv_heads, hidden // heads


def _in_sequence(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All queries, all keys, all values."""
    heads, kv_heads, size = _heads(config)
    q, k, v = np.split(
        np.arange((heads + 2 * kv_heads) * size), [heads * size, (heads + kv_heads) * size]
    )
    return q, k, v


def _by_group(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group by group: the query heads that share a key head, that key head, its value head."""
    heads, kv_heads, size = _heads(config)
    group = heads // kv_heads
    rows = np.arange((heads + 2 * kv_heads) * size).reshape(kv_heads, group + 2, size)
    return rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()


def _by_key_head(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """TeleChat: the keys of a head, then its values; the queries are apart."""
    _, kv_heads, size = _heads(config)
    rows = np.arange(2 * kv_heads * size).reshape(kv_heads, 2, size)
    return rows[:, 0].ravel(), rows[:, 1].ravel()


def _one_key_head(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Refact: the key head, then the value head; the queries are apart."""
    size = _heads(config)[2]
    return np.arange(size), np.arange(size, 2 * size)


def _by_part(config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CodeGen: in each of four parts, the queries, values and keys of a quarter of the heads."""
    heads, _, size = _heads(config)
    if heads % 4:
        raise refusal("num_attention_heads", heads, "a multiple of 4 in a codegen config")
    rows = np.arange(3 * heads * size).reshape(4, 3, -1)
    return rows[:, 0].ravel(), rows[:, 2].ravel(), rows[:, 1].ravel()


_GPT2 = _Layout(
    keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={"hidden_act": "gelu_new", "tie_word_embeddings": True},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    prefixes=("transformer.", ""),
    blocks="h",
    outer={"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"},
    inner={
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.c_fc": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    qkv="attn.c_attn",
    rows=_in_sequence,
    is_transposed=True,
)
_JAIS = replace(
    _GPT2,
    fixed={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    inner={**_GPT2.inner, "mlp.c_fc2": ("mlp.gate_proj",)},
)
_GPT_J = replace(
    _GPT2,
    defaults={"hidden_act": "gelu_new", "rotary_dim": 64},
    fixed={},
    prefixes=("transformer.",),
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    inner={
        "ln_1": ("input_layernorm", "post_attention_layernorm"),
        **{f"attn.{part}_proj": (f"self_attn.{part}_proj",) for part in "qkv"},
        "attn.out_proj": ("self_attn.o_proj",),
        "mlp.fc_in": ("mlp.up_proj",),
        "mlp.fc_out": ("mlp.down_proj",),
    },
    qkv="",
    is_transposed=False,
)
_CODEGEN = replace(_GPT_J, qkv="attn.qkv_proj", rows=_by_part)
_GPT_NEOX = _Layout(
    keys={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    defaults={"hidden_act": "gelu", "attention_bias": True},
    fixed={},
    prefixes=("gpt_neox.",),
    blocks="layers",
    outer={"embed_in": "embed_tokens", "final_layer_norm": "norm"},
    inner={
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    qkv="attention.query_key_value",
    rows=_by_group,
)
_GPT_NEOX_JAPANESE = replace(
    _GPT_NEOX,
    defaults={
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "intermediate_multiple_size": 4,
        "attention_out_bias": True,
    },
    prefixes=("gpt_neox_japanese.",),
)
_FALCON = _Layout(
    keys={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    fixed={},
    prefixes=("transformer.",),
    blocks="h",
    outer={"word_embeddings": "embed_tokens", "ln_f": "norm"},
    inner={
        "ln_attn": ("input_layernorm",),
        "ln_mlp": ("post_attention_layernorm",),
        "self_attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    qkv="self_attention.query_key_value",
    rows=_by_group,
)
_BLOOM = _Layout(
    keys={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    fixed={"apply_residual_connection_post_layernorm": False},
    prefixes=("transformer.", ""),
    blocks="h",
    outer={
        "word_embeddings": "embed_tokens",
        "word_embeddings_layernorm": "embed_norm",
        "ln_f": "norm",
    },
    inner={
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "self_attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    qkv="self_attention.query_key_value",
    rows=_by_group,
)
_MPT = _Layout(
    keys={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    fixed={"no_bias": True, "logit_scale": None},
    prefixes=("transformer.",),
    blocks="blocks",
    outer={"wte": "embed_tokens", "norm_f": "norm"},
    inner={
        "norm_1": ("input_layernorm",),
        "norm_2": ("post_attention_layernorm",),
        "attn.out_proj": ("self_attn.o_proj",),
        "ffn.up_proj": ("mlp.up_proj",),
        "ffn.down_proj": ("mlp.down_proj",),
    },
    qkv="attn.Wqkv",
    rows=_in_sequence,
)
_REFACT = replace(
    _GPT2,
    defaults={"num_key_value_heads": 1},
    fixed={"multi_query": True},
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    inner={
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.q": ("self_attn.q_proj",),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.gate_up_proj": ("mlp.gate_up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    qkv="attn.kv",
    rows=_one_key_head,
    is_transposed=False,
    has_key_heads=True,
)
_OPT = _Layout(
    keys={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    defaults={
        "hidden_act": "relu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    fixed={
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    },
    prefixes=("model.decoder.", "decoder."),
    blocks="layers",
    outer={
        "embed_tokens": "embed_tokens",
        "embed_positions": "embed_positions",
        "final_layer_norm": "norm",
        "project_in": "project_in",
        "project_out": "project_out",
    },
    inner={
        "self_attn_layer_norm": ("input_layernorm",),
        "final_layer_norm": ("post_attention_layernorm",),
        **{f"self_attn.{part}_proj": (f"self_attn.{part}_proj",) for part in "qkv"},
        "self_attn.out_proj": ("self_attn.o_proj",),
        "fc1": ("mlp.up_proj",),
        "fc2": ("mlp.down_proj",),
    },
    qkv="",
    rows=_in_sequence,
    num_unused=2,
)
#: The modules of a layer of GPT-Neo that a layer of EXAONE 3 has too.
_NEO_INNER = {
    "ln_1": ("input_layernorm",),
    "ln_2": ("post_attention_layernorm",),
    **{f"attn.attention.{part}_proj": (f"self_attn.{part}_proj",) for part in "qkv"},
    "attn.attention.out_proj": ("self_attn.o_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_GPT_NEO = replace(
    _GPT2,
    keys={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "window_size": "sliding_window",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    defaults={"hidden_act": "gelu_new", "tie_word_embeddings": True, "sliding_window": 256},
    fixed={},
    inner={**_NEO_INNER, "mlp.c_fc": ("mlp.up_proj",)},
    qkv="",
    is_transposed=False,
)
_GPT_BIGCODE = replace(
    _GPT2,
    defaults={"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    fixed={"scale_attn_weights": True, "add_cross_attention": False},
    rows=_by_group,
    is_transposed=False,
)
_CODESHELL = replace(
    _GPT2,
    keys={**_GPT2.keys, "num_query_groups": "num_key_value_heads"},
    defaults={"hidden_act": "gelu_pytorch_tanh"},
    fixed={
        "scale_attn_weights": True,
        "add_cross_attention": False,
        "position_embedding_type": "rope",
        "group_query_attention": True,
    },
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    is_transposed=False,
    has_key_heads=True,
)
_EXAONE = replace(
    _GPT_NEO,
    keys={
        "num_layers": "num_hidden_layers",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    defaults={"rms_norm_eps": 1e-5},
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    inner={
        **_NEO_INNER,
        "mlp.c_fc_0": ("mlp.gate_proj",),
        "mlp.c_fc_1": ("mlp.up_proj",),
    },
    has_key_heads=True,
)
_INTERNLM2 = _Layout(
    keys={"bias": "attention_bias"},
    defaults={},
    fixed={},
    prefixes=("model.", ""),
    blocks="layers",
    outer={"tok_embeddings": "embed_tokens", "norm": "norm"},
    inner={
        "attention_norm": ("input_layernorm",),
        "ffn_norm": ("post_attention_layernorm",),
        "attention.wo": ("self_attn.o_proj",),
        "feed_forward.w1": ("mlp.gate_proj",),
        "feed_forward.w3": ("mlp.up_proj",),
        "feed_forward.w2": ("mlp.down_proj",),
    },
    qkv="attention.wqkv",
    rows=_by_group,
    has_key_heads=True,
)
_QWEN = replace(
    _GPT2,
    keys={
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    defaults={"rms_norm_eps": 1e-6},
    fixed={"scale_attn_weights": True, "rotary_pct": 1.0},
    prefixes=("transformer.",),
    outer={"wte": "embed_tokens", "ln_f": "norm"},
    inner={
        "ln_1": ("input_layernorm",),
        "ln_2": ("post_attention_layernorm",),
        "attn.c_proj": ("self_attn.o_proj",),
        "mlp.w2": ("mlp.gate_proj",),
        "mlp.w1": ("mlp.up_proj",),
        "mlp.c_proj": ("mlp.down_proj",),
    },
    is_transposed=False,
)
_OPENAI_GPT = replace(
    _GPT2,
    # Its function called "gelu" is this one.
    defaults={
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
        "do_layer_norm_before": False,
    },
    fixed={"afn": "gelu"},
    outer={"tokens_embed": "embed_tokens", "positions_embed": "embed_positions"},
    inner={
        **_GPT2.inner,
        "ln_1": ("post_attention_layernorm",),
        "ln_2": ("post_feedforward_layernorm",),
    },
)
_BIOGPT = replace(
    _OPT,
    keys={},
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
    fixed={},
    prefixes=("biogpt.",),
    outer={
        "embed_tokens": "embed_tokens",
        "embed_positions": "embed_positions",
        "layer_norm": "norm",
    },
)
_XGLM = replace(
    _BIOGPT,
    keys={
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    },
    fixed={"add_cross_attention": False},
    prefixes=("model.",),
)
_CHATGLM = replace(
    _GPT_NEOX,
    keys={
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "padded_vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
        "kv_channels": "head_dim",
        "layernorm_epsilon": "rms_norm_eps",
        "multi_query_group_num": "num_key_value_heads",
        "add_qkv_bias": "attention_bias",
        "add_bias_linear": "mlp_bias",
    },
    defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
    fixed={
        "rmsnorm": True,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "position_encoding_2d": False,
    },
    prefixes=("transformer.encoder.", "transformer."),
    outer={"embedding.word_embeddings": "embed_tokens", "final_layernorm": "norm"},
    inner={
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "self_attention.dense": ("self_attn.o_proj",),
        "mlp.dense_h_to_4h": ("mlp.gate_up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    qkv="self_attention.query_key_value",
    rows=_in_sequence,
    has_key_heads=True,
)
_PERSIMMON = replace(
    _GPT_NEOX,
    keys={"qk_layernorm": "use_qk_norm"},
    defaults={"hidden_act": "relu2"},
    prefixes=("model.",),
    outer={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
    inner={
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "self_attn.dense": ("self_attn.o_proj",),
        "self_attn.q_layernorm": ("self_attn.q_norm",),
        "self_attn.k_layernorm": ("self_attn.k_norm",),
        "mlp.dense_h_to_4h": ("mlp.up_proj",),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    qkv="self_attn.query_key_value",
)
_DBRX = replace(
    _MPT,
    keys={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
    defaults={"max_position_embeddings": 2048},
    fixed={},
    inner={
        "norm_attn_norm.norm_1": ("input_layernorm",),
        "norm_attn_norm.norm_2": ("post_attention_layernorm",),
        "norm_attn_norm.attn.out_proj": ("self_attn.o_proj",),
        "ffn.router.layer": ("mlp.gate",),
        "ffn.experts.mlp": ("mlp",),
    },
    qkv="norm_attn_norm.attn.Wqkv",
)
_TELECHAT = replace(
    _FALCON,
    keys={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "training_seqlen": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
    fixed={"apply_residual_connection_post_layernorm": False, "embed_layernorm": False},
    inner={
        "input_layernorm": ("input_layernorm",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "self_attention.query": ("self_attn.q_proj",),
        "self_attention.dense": ("self_attn.o_proj",),
        **{f"mlp.{part}_proj": (f"mlp.{part}_proj",) for part in ("gate", "up", "down")},
    },
    qkv="self_attention.key_value",
    rows=_by_key_head,
    has_key_heads=True,
)
#: The experts of a layer of DBRX, and the stacks of matrices that they are.
_DBRX_EXPERTS = {
    ".mlp.w1": ".mlp.gate_proj.weight",
    ".mlp.v1": ".mlp.up_proj.weight",
    ".mlp.w2": ".mlp.down_proj.weight",
}
#: The norms of layers of OPT that follow the sublayers.
_SUM_NORMS = {
    "self_attn_layer_norm": ("post_attention_layernorm",),
    "final_layer_norm": ("post_feedforward_layernorm",),
}
_LAYOUTS = {
    "gpt2": _GPT2,
    "jais": _JAIS,
    "gptj": _GPT_J,
    "codegen": _CODEGEN,
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": _GPT_NEOX_JAPANESE,
    "falcon": _FALCON,
    "bloom": _BLOOM,
    "mpt": _MPT,
    "opt": _OPT,
    "gpt_neo": _GPT_NEO,
    "gpt_bigcode": _GPT_BIGCODE,
    "codeshell": _CODESHELL,
    "exaone": _EXAONE,
    "internlm2": _INTERNLM2,
    "qwen": _QWEN,
    "openai-gpt": _OPENAI_GPT,
    "biogpt": _BIOGPT,
    "xglm": _XGLM,
    "chatglm": _CHATGLM,
    "persimmon": _PERSIMMON,
    "dbrx": _DBRX,
    "telechat": _TELECHAT,
    "telechat2": _TELECHAT,
    "gpt_refact": _REFACT,
}
#: Options of MPT's attention, and the only value that is supported.
_MPT_ATTENTION = {
    "alibi": True,
    "qk_ln": False,
    "qk_gn": False,
    "prefix_lm": False,
    "rope": False,
    "sliding_window_size": -1,
}
#: The list of layers, the number of a layer, and a module in it.
_LAYER = re.compile(r"(\w+)\.(\d+)\.(.+)")
_HEADS = dict.fromkeys(
    ("lm_head", "embed_out", "output", "output_projection", "transformer.output_layer"), "lm_head"
)


def is_gpt(config: dict[str, Any]) -> bool:
    """Whether a config.json is written in one of these layouts."""
    return config.get("model_type") in tuple(_LAYOUTS)


def to_hf_layout(
    config: dict[str, Any], readers: Mapping[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors in the usual layout.

    Raises:
        CheckpointError: A size is invalid, or an option is not supported.
    """
    layout = _LAYOUTS[config["model_type"]]
    _check_fixed(config, layout.fixed, config["model_type"])
    usual = {**layout.defaults, **_usual_config(config, layout)}
    inner = dict(layout.inner)
    if not (layout.has_key_heads and "num_key_value_heads" in usual):
        usual["num_key_value_heads"] = usual.get("num_attention_heads")
    if config["model_type"] == "falcon":
        inner |= _complete_falcon(usual)
    complete = _COMPLETIONS.get(config["model_type"])
    if complete is not None:
        complete(usual)
    if config["model_type"] == "gpt_bigcode" and bool_value(usual, "multi_query", True):
        usual["num_key_value_heads"] = 1
    if not bool_value(usual, "do_layer_norm_before", True):
        inner |= _SUM_NORMS
    if config["model_type"] in ("gptj", "codegen"):
        size = _heads(usual)[2]
        rotary = integer("rotary_dim", usual["rotary_dim"], 1, size)
        usual["partial_rotary_factor"] = rotary_share(rotary, size)
    own = [key for key, other in layout.keys.items() if other == "intermediate_size"]
    if config["model_type"] == "gpt_refact":
        usual["intermediate_size"] = _refact_size(usual)
    elif own and config.get(own[0]) is None:
        usual["intermediate_size"] = 4 * integer("hidden_size", usual.get("hidden_size"))
    rows = layout.rows(usual)
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        result.update(_converted(name, reader, layout, inner, rows))
    if usual.get("word_embed_proj_dim", usual["hidden_size"]) != usual["hidden_size"]:
        _project(usual, result)
    if config["model_type"] == "xglm":
        result["model.embed_positions.weight"] = partial(_waves, usual)
    if config["model_type"] == "persimmon":
        _repeat_norms(usual, result)
    if config["model_type"] == "dbrx":
        _stack_experts(usual, result)
    if config["model_type"] == "gpt_neox_japanese":
        _add_biases(usual, readers, result)
    return usual, result


def _waves(config: Mapping[str, Any]) -> np.ndarray:
    """The table of positions of XGLM, float32: sines of all frequencies, then cosines. That of
    position 0 is its third row; the row of the padding token is zero."""
    count = integer("max_position_embeddings", config.get("max_position_embeddings"))
    hidden = integer("hidden_size", config.get("hidden_size"), 4)
    half = hidden // 2
    frequencies = portable.exp(np.arange(half) * (-math.log(10_000) / (half - 1)))
    angles = np.arange(count + 2, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    parts = portable.sine_and_cosine(angles)
    table = np.zeros((count + 2, hidden), np.float32)
    table[:, : 2 * half] = np.concatenate(parts, 1)
    padding = config.get("pad_token_id", 1)
    if isinstance(padding, int) and 0 <= padding < len(table):
        table[padding] = 0.0
    return table[2:]


def _add_biases(
    config: Mapping[str, Any], readers: Mapping[str, Reader], result: dict[str, Reader]
) -> None:
    """Give the attention of every layer a bias; GPT-NeoX Japanese has one in the last layer."""
    hidden = integer("hidden_size", config.get("hidden_size"))
    for index in range(integer("num_hidden_layers", config.get("num_hidden_layers"))):
        name = f"gpt_neox_japanese.layers.{index}.attention.dense_bias"
        bias = readers.get(name, partial(np.zeros, hidden, np.float32))
        result[f"model.layers.{index}.self_attn.o_proj.bias"] = bias


def _repeat_norms(config: Mapping[str, Any], readers: dict[str, Reader]) -> None:
    """Give each head its copy of the norms of queries and keys that all heads share."""
    heads = _heads(dict(config))[0]
    for name, reader in readers.items():
        if name.endswith((".q_norm.weight", ".k_norm.weight")):
            readers[name] = partial(_repeated, reader, (heads, 1))
        elif name.endswith((".q_norm.bias", ".k_norm.bias")):
            readers[name] = partial(_repeated, reader, (heads,))


def _repeated(reader: Reader, counts: tuple[int, ...]) -> np.ndarray:
    return np.tile(np.asarray(reader()), counts)


def _stack_experts(config: Mapping[str, Any], readers: dict[str, Reader]) -> None:
    """Read the experts of DBRX, whose rows are those of one matrix, as stacks of matrices."""
    count = integer("moe_num_experts", config.get("num_experts"), 1, MAX_EXPERTS)
    for name in list(readers):
        for end, stack in _DBRX_EXPERTS.items():
            if name.endswith(end):
                reader = partial(_stack, readers.pop(name), name, count, end == ".mlp.w2")
                readers[f"{name.removesuffix(end)}{stack}"] = reader


def _stack(reader: Reader, name: str, count: int, is_transposed: bool) -> np.ndarray:
    """A matrix as `count` matrices, which may be stored transposed."""
    rows = np.asarray(reader())
    if rows.ndim != 2 or len(rows) % count:
        raise CheckpointError(f"tensor {name} has shape {rows.shape}; it has {count} experts")
    stack = rows.reshape(count, -1, rows.shape[1])
    return stack.swapaxes(1, 2) if is_transposed else stack


def _project(config: dict[str, Any], readers: dict[str, Reader]) -> None:
    """Multiply the embedding and the head of a small OPT by the matrices between them and the
    hidden states."""
    size = integer("word_embed_proj_dim", config["word_embed_proj_dim"])
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    source = table if bool_value(config, "tie_word_embeddings") else head
    parts = [(table, table, "model.project_in.weight"), (head, source, "model.project_out.weight")]
    products: dict[str, Reader] = {}
    for target, name, projection in parts:
        for needed in (name, projection):
            if needed not in readers:
                raise CheckpointError(f"tensor {needed} is missing; its config implies it")
        pair = readers[name], readers[projection]
        products[target] = partial(_product, *pair, size, target == table)
    readers.update(products)
    config["tie_word_embeddings"] = False


def _check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any], model_type: str) -> None:
    """Raise CheckpointError if an option has another value than the one supported."""
    for key, value in fixed.items():
        if config.get(key) not in (None, value):
            raise ConfigError(f"{key} {config[key]!r} is not supported in a {model_type} config")


def _usual_config(config: dict[str, Any], layout: _Layout) -> dict[str, Any]:
    """The config with the usual keys; null counts as missing."""
    usual = {key: value for key, value in config.items() if value is not None}
    for key, other in layout.keys.items():
        if key in usual:
            usual[other] = usual[key]
    return usual


def _complete_falcon(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Complete a config of Falcon, and return the norms of its layers."""
    is_new = bool_value(config, "new_decoder_architecture")
    is_parallel = is_new or bool_value(config, "parallel_attn", True)
    if is_new:
        config["num_key_value_heads"] = config.get("num_kv_heads") or config["num_key_value_heads"]
    elif bool_value(config, "multi_query", True):
        config["num_key_value_heads"] = 1
    config["use_parallel_residual"] = is_parallel
    config["attention_bias"] = config["mlp_bias"] = config.get("bias", False)
    if not is_parallel:
        return {
            "input_layernorm": ("input_layernorm",),
            "post_attention_layernorm": ("post_attention_layernorm",),
        }
    return {"input_layernorm": ("input_layernorm", "post_attention_layernorm")}


def _complete_mpt(config: dict[str, Any]) -> None:
    """Complete a config of MPT, whose options of attention are an object of their own."""
    attention = mapping_value(config, "attn_config")
    _check_fixed(attention, _MPT_ATTENTION, "mpt")
    kind = value_or(attention, "attn_type", "multihead_attention")
    if kind == "multiquery_attention":
        config["num_key_value_heads"] = 1
    elif kind == "grouped_query_attention":
        config["num_key_value_heads"] = attention.get("kv_n_heads")
    elif kind != "multihead_attention":
        raise ConfigError(f"attn_type {kind!r} is not supported in an mpt config")
    norm = str(value_or(config, "norm_type", "layernorm")).lower()
    if norm not in ("layernorm", "low_precision_layernorm"):
        raise ConfigError(f"norm_type {norm!r} is not supported in an mpt config")
    for key in ("alibi_bias_max", "clip_qkv", "softmax_scale"):
        config[key] = attention.get(key)
    ratio = number("expansion_ratio", value_or(config, "expansion_ratio", 4))
    hidden = integer("hidden_size", config.get("hidden_size"))
    config["intermediate_size"] = int(ratio * hidden)


def _complete_qwen(config: dict[str, Any]) -> None:
    """Complete a config of Qwen, which has the size of both halves of a gated MLP together."""
    config["intermediate_size"] = (
        integer("intermediate_size", config.get("intermediate_size"), 2) // 2
    )
    has_bias = not bool_value(config, "no_bias", True)
    config["attention_out_bias"] = config["mlp_bias"] = has_bias


def _complete_jais(config: dict[str, Any]) -> None:
    """Complete a config of Jais, of whose options the published models have one."""
    options = {
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "scale_attn_weights": True,
        "alibi_scaling": None,
    }
    for key, value in options.items():
        given = config.get(key, True if value is True else None)
        if given != value:
            raise refusal(key, given, repr(value))
    config["hidden_act"] = "silu"


def _complete_norm_eps(config: dict[str, Any]) -> None:
    """BioGPT and XGLM: norms have the default of their class, whatever the config says."""
    config["layer_norm_eps"] = 1e-5


def _complete_chatglm(config: dict[str, Any]) -> None:
    """Complete a config of ChatGLM 2, 3 or GLM-4, whose base of rotations is a factor."""
    if "head_dim" not in config:
        raise ConfigError("a chatglm config without kv_channels (ChatGLM-6B) is not supported")
    if not bool_value(config, "multi_query_attention"):
        config["num_key_value_heads"] = config.get("num_attention_heads")
    ratio = number("rope_ratio", value_or(config, "rope_ratio", 1.0))
    config["rope_theta"] = 10_000.0 * ratio


def _complete_dbrx(config: dict[str, Any]) -> None:
    """Complete a config of DBRX, of whose parts two are objects of their own."""
    attention, experts = (mapping_value(config, f"{part}_config") for part in ("attn", "ffn"))
    order = value_or(experts, "moe_normalize_expert_weights", 1.0)
    if order != 1:
        raise refusal("moe_normalize_expert_weights", order, "1")
    config |= {
        "num_key_value_heads": attention.get("kv_n_heads", 1),
        "clip_qkv": attention.get("clip_qkv"),
        "rope_theta": value_or(attention, "rope_theta", 10_000.0),
        "intermediate_size": experts.get("ffn_hidden_size"),
        "num_experts": experts.get("moe_num_experts"),
        "num_experts_per_tok": experts.get("moe_top_k"),
        "hidden_act": mapping_value(experts, "ffn_act_fn").get("name", "silu"),
    }


#: What completes the configs of single layouts.
def _complete_gpt_neox_japanese(config: dict[str, Any]) -> None:
    """Complete a config of GPT-NeoX Japanese, which has a factor in place of the MLPs' size."""
    factor = integer("intermediate_multiple_size", config["intermediate_multiple_size"])
    config["intermediate_size"] = factor * integer("hidden_size", config.get("hidden_size"))


def _complete_telechat(config: dict[str, Any]) -> None:
    """Complete a config of TeleChat. A model that was trained with longer contexts than at first
    has a larger base of rotations; the keys of activations and rotations are not read, as in its
    own code."""
    trained = integer("training_seqlen", config["max_position_embeddings"])
    first = integer("base_seqlen", value_or(config, "base_seqlen", min(trained, 8192)))
    alpha = 2 ** math.ceil(math.log2(trained / first) + 1) - 1
    config |= {"hidden_act": "silu", "attention_out_bias": True, "mlp_out_bias": True}
    config["rope_theta"] = 10_000.0
    config["rope_scaling"] = {"rope_type": "ntk_alpha", "alpha": alpha} if alpha > 1 else None


def _refact_size(config: dict[str, Any]) -> int:
    """The inner size of Refact's MLPs: two thirds of that of plain ones, to a multiple of 256."""
    hidden = integer("hidden_size", config.get("hidden_size"))
    inner = integer("n_inner", value_or(config, "intermediate_size", 4 * hidden))
    return -(-(2 * inner // 3) // 256) * 256


_COMPLETIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "mpt": _complete_mpt,
    "qwen": _complete_qwen,
    "jais": _complete_jais,
    "biogpt": _complete_norm_eps,
    "xglm": _complete_norm_eps,
    "chatglm": _complete_chatglm,
    "dbrx": _complete_dbrx,
    "gpt_neox_japanese": _complete_gpt_neox_japanese,
    **dict.fromkeys(("telechat", "telechat2"), _complete_telechat),
}


def _converted(
    name: str,
    reader: Reader,
    layout: _Layout,
    inner: Mapping[str, tuple[str, ...]],
    rows: tuple[np.ndarray, ...],
) -> dict[str, Reader]:
    """The tensors of the usual layout that one tensor holds; none for a buffer."""
    module, _, leaf = name.rpartition(".")
    if module in _HEADS:
        return {f"{_HEADS[module]}.{leaf}": reader}
    start = next((prefix for prefix in layout.prefixes if module.startswith(prefix)), "")
    module = module[len(start) :]
    if module in layout.outer:
        if module == "embed_positions":
            reader = partial(_without_first, reader, layout.num_unused)
        return {f"model.{layout.outer[module]}.{leaf}": reader}
    layer = _LAYER.fullmatch(module)
    if layer is None or layer[1] != layout.blocks:
        return {name: reader}
    if layout.is_transposed and leaf == "weight":
        reader = partial(_transposed, reader)
    prefix = f"model.layers.{layer[2]}."
    if layer[3] == layout.qkv:
        return {
            f"{prefix}self_attn.{part}_proj.{leaf}": partial(_selected, reader, name, selected)
            for part, selected in zip("qkv"[-len(rows) :], rows, strict=True)
        }
    return {f"{prefix}{target}.{leaf}": reader for target in inner.get(layer[3], ())}


def _product(table: Reader, projection: Reader, size: int, is_transposed: bool) -> np.ndarray:
    """A matrix `[vocab_size, size]` times one of `[size, hidden_size]`, which may be stored
    transposed. The result has the type of the first one."""
    left, right = np.asarray(table()), np.asarray(projection())
    right = right.T if is_transposed else right
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != size or len(right) != size:
        raise CheckpointError(
            f"an embedding has shape {left.shape}, and its projection {right.shape}; their"
            f" word_embed_proj_dim is {size}"
        )
    product: np.ndarray = left.astype(np.float32) @ right.astype(np.float32)
    return product.astype(left.dtype)


def _transposed(reader: Reader) -> np.ndarray | Weight:
    """The matrix `[out, in]`. Quantised matrices are stored so."""
    tensor = reader()
    return tensor if isinstance(tensor, Weight) else np.asarray(tensor).T


def _without_first(reader: Reader, count: int) -> np.ndarray:
    return np.asarray(reader())[count:]


def _selected(reader: Reader, name: str, rows: np.ndarray) -> np.ndarray | Weight:
    tensor = reader()
    data = tensor.data if isinstance(tensor, Weight) else np.asarray(tensor)
    if not data.ndim or len(data) <= rows.max():
        raise CheckpointError(f"tensor {name} has shape {data.shape}; its config implies others")
    if isinstance(tensor, Weight):
        return replace(tensor, out_features=len(rows), data=data[rows])
    selected: np.ndarray = data[rows]
    return selected
