"""Converts the layouts of encoders (BERT, RoBERTa, DistilBERT, ModernBERT, Nomic BERT) to the usual
one: names of modules and keys of the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from anydecode.models.families.values import int_value
from anydecode.models.limits import ConfigError
from anydecode.models.loading.lazy import Reader


@dataclass(frozen=True)
class _Layout:
    """A layout of checkpoints.

    Attributes:
        prefixes: The start of the names of all tensors but the head's.
        blocks: The names that the list of layers may have.
        outer: The modules outside the layers, and their usual names.
        inner: The modules of a layer, and their usual names.
        head: The modules of a classifier, and their names in `models.classification`.
        keys: Its config keys, and the usual ones.
        fixed: Options, and the only value that is supported.
        head_activation: The activation between the two matrices of a classifier.
        head_pooling: The pooling before a classifier; None: `classifier_pooling` of the config.
    """

    prefixes: tuple[str, ...]
    blocks: tuple[str, ...]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    head: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    head_activation: str = "tanh"
    head_pooling: str | None = "cls"


_EMBEDDINGS = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embed_positions",
    "embeddings.token_type_embeddings": "embed_segments",
    "embeddings.LayerNorm": "embed_norm",
}
_BERT_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_feedforward_layernorm",
}
_ONLY_ENCODER = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
_BERT = _Layout(
    prefixes=("bert.", ""),
    blocks=("encoder.layer",),
    outer=_EMBEDDINGS,
    inner=_BERT_LAYER,
    head={"bert.pooler.dense": "dense", "pooler.dense": "dense", "classifier": "output"},
    fixed=_ONLY_ENCODER,
)
_ROBERTA = _Layout(
    prefixes=("roberta.", ""),
    blocks=("encoder.layer",),
    outer=_EMBEDDINGS,
    inner=_BERT_LAYER,
    head={"classifier.dense": "dense", "classifier.out_proj": "output"},
    fixed=_ONLY_ENCODER,
)
_DISTILBERT = _Layout(
    prefixes=("distilbert.", ""),
    blocks=("transformer.layer",),
    outer=_EMBEDDINGS,
    inner={
        "attention.q_lin": "self_attn.q_proj",
        "attention.k_lin": "self_attn.k_proj",
        "attention.v_lin": "self_attn.v_proj",
        "attention.out_lin": "self_attn.o_proj",
        "sa_layer_norm": "post_attention_layernorm",
        "ffn.lin1": "mlp.up_proj",
        "ffn.lin2": "mlp.down_proj",
        "output_layer_norm": "post_feedforward_layernorm",
    },
    head={"pre_classifier": "dense", "classifier": "output"},
    keys={
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    },
    head_activation="relu",
)
_MODERNBERT = _Layout(
    prefixes=("model.", ""),
    blocks=("layers",),
    outer={
        "embeddings.tok_embeddings": "embed_tokens",
        "embeddings.norm": "embed_norm",
        "final_norm": "norm",
    },
    inner={
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.Wo": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "mlp.Wi": "mlp.gate_up_proj",
        "mlp.Wo": "mlp.down_proj",
        "mlp_norm": "post_attention_layernorm",
    },
    head={"head.dense": "dense", "head.norm": "norm", "classifier": "output"},
    keys={"norm_eps": "layer_norm_eps"},
    fixed={"norm_bias": False},
    head_activation="gelu",
    head_pooling=None,
)
_NOMIC_NAMES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm",
)  # fmt: skip
#: The layout of its repositories, and that of transformers.
_NOMIC = _Layout(
    prefixes=("nomic_bert.", ""),
    blocks=("encoder.layers", "layers"),
    outer={**_EMBEDDINGS, "emb_ln": "embed_norm"},
    inner={
        **{name: name for name in _NOMIC_NAMES},
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "attn.Wqkv": "self_attn.qkv_proj",
        "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_feedforward_layernorm",
    },
    head={},
    keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    fixed={
        "activation_function": "swiglu",
        "prenorm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_scaling_factor": None,
        "parallel_block": False,
        "use_rms_norm": False,
    },
)
_LAYOUTS = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "nomic_bert": _NOMIC,
}
#: The names of norms in checkpoints that were converted from TensorFlow.
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is written in one of these layouts."""
    return config.get("model_type") in tuple(_LAYOUTS)


def to_hf_layout(
    config: dict[str, Any], readers: Mapping[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors in the usual layout. The tensors of a classifier are named `classifier.*`,
    and the config's `classifier` says how they are used.

    Raises:
        CheckpointError: A size is invalid, or an option is not supported.
    """
    model_type = config["model_type"]
    layout = _LAYOUTS[model_type]
    for key, value in layout.fixed.items():
        if config.get(key) not in (None, value):
            raise ConfigError(f"{key} {config[key]!r} is not supported in a {model_type} config")
    usual = dict(config)
    for key, other in layout.keys.items():
        if config.get(key) is not None:
            usual[other] = config[key]
    first = 0
    if layout is _ROBERTA:  # positions are counted from the padding token's id + 1
        first = int_value(config, "pad_token_id", 1, low=0) + 1
        length = int_value(config, "max_position_embeddings", 512, low=first + 1)
        usual["max_position_embeddings"] = length - first
    if layout is _MODERNBERT:
        usual |= _modernbert(config)
    head = {}
    if any(
        str(name).endswith("SequenceClassification") for name in config.get("architectures") or ()
    ):
        head = dict(layout.head)
        pooling = layout.head_pooling or config.get("classifier_pooling") or "cls"
        activation = config.get("classifier_activation") or layout.head_activation
        usual["classifier"] = {"activation": activation, "pooling": pooling}
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        module, _, leaf = name.rpartition(".")
        leaf = _OLD_LEAVES.get(leaf, leaf)
        if module in head:
            result[f"classifier.{head[module]}.{leaf}"] = reader
            continue
        target = _usual_name(module, layout)
        if target == "embed_positions" and first:
            reader = partial(_rows_from, reader, first)
        if target is not None:
            result[f"model.{target}.{leaf}"] = reader
    return usual, result


def _modernbert(config: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys of a ModernBERT config, in its present and its older form."""
    ropes = config.get("rope_parameters") or {}
    old = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    default = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
    parameters = {
        kind: {
            "rope_theta": config.get(old[kind]) or default[kind],
            **(ropes.get(kind) or {}),
        }
        for kind in old
    }
    # A token attends to as many tokens on each side as half the window, and to itself.
    window = int_value(config, "local_attention", 128) // 2 + 1
    return {"rope_parameters": parameters, "sliding_window": window}


def _usual_name(module: str, layout: _Layout) -> str | None:
    """The usual name of a module; None for one that is not part of the encoder."""
    start = next(prefix for prefix in (*layout.prefixes, "") if module.startswith(prefix))
    module = module[len(start) :]
    if module in layout.outer:
        return layout.outer[module]
    for blocks in layout.blocks:
        if not module.startswith(f"{blocks}."):
            continue
        number, _, inner = module[len(blocks) + 1 :].partition(".")
        if re.fullmatch(r"[0-9]+", number) and inner in layout.inner:
            return f"layers.{number}.{layout.inner[inner]}"
    return None


def _rows_from(reader: Reader, first: int) -> np.ndarray:
    return np.asarray(reader())[first:]
