"""Converts the layouts of encoders (BERT, RoBERTa, DistilBERT, ModernBERT, Nomic BERT, Jina BERT,
GTE, EuroBERT) to the usual one: names of modules and keys of the config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from anydecode.kernels import portable
from anydecode.kernels.interface import Weight
from anydecode.models.encoder_tasks import UPDATES
from anydecode.models.families.dispatch import class_names
from anydecode.models.families.rope import rope_type
from anydecode.models.families.values import int_value, mapping_value, value_or
from anydecode.models.limits import MAX_EXPERTS, MAX_LAYERS, ConfigError, number, refusal
from anydecode.models.loading.lazy import Reader


@dataclass(frozen=True)
class _Layout:
    """A layout of checkpoints.

    Attributes:
        prefixes: The start of the names of all tensors but the head's.
        blocks: The names that the list of layers may have.
        outer: The modules outside the layers, and their usual names.
        inner: The modules of a layer, and their usual names.
        halves: The fused modules of a layer, and the usual names of both halves of their rows.
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
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
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
_ELECTRA = replace(
    _BERT,
    prefixes=("electra.", ""),
    head={"classifier.dense": "dense", "classifier.out_proj": "output"},
    head_activation="gelu",
)
_ERNIE = replace(
    _BERT,
    prefixes=("ernie.", ""),
    head={"ernie.pooler.dense": "dense", "pooler.dense": "dense", "classifier": "output"},
    fixed={**_ONLY_ENCODER, "use_task_id": False},
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
_MPNET = _Layout(
    prefixes=("mpnet.", ""),
    blocks=("encoder.layer",),
    outer={**_EMBEDDINGS, "encoder.relative_attention_bias": "relative_attention_bias"},
    inner={
        **_BERT_LAYER,
        **{f"attention.attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
        "attention.LayerNorm": "post_attention_layernorm",
    },
    head={"classifier.dense": "dense", "classifier.out_proj": "output"},
)
_DEBERTA = _Layout(
    prefixes=("deberta.", ""),
    blocks=("encoder.layer",),
    outer={
        **_EMBEDDINGS,
        "encoder.rel_embeddings": "relative_positions",
        "encoder.LayerNorm": "relative_norm",
    },
    inner={
        **_BERT_LAYER,
        "attention.self.query_proj": "self_attn.q_proj",
        "attention.self.key_proj": "self_attn.k_proj",
        "attention.self.value_proj": "self_attn.v_proj",
    },
    head={"pooler.dense": "dense", "classifier": "output"},
    keys={"pooler_hidden_act": "classifier_activation"},
    fixed={"position_biased_input": False, "conv_kernel_size": 0},
    head_activation="gelu",
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
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
#: The layers of Nomic BERT and GTE in transformers.
_GATED_LAYER = {
    **{name: name for name in (*_ATTENTION, *_MLP, "post_attention_layernorm")},
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_ONLY_NOMIC = {
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "parallel_block": False,
    "use_rms_norm": False,
}
#: The layout of its repositories, and that of transformers.
_NOMIC = _Layout(
    prefixes=("nomic_bert.", ""),
    blocks=("encoder.layers", "layers"),
    outer={**_EMBEDDINGS, "emb_ln": "embed_norm"},
    inner={
        **_GATED_LAYER,
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
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        **_ONLY_NOMIC,
    },
)
_NOMIC_MOE = replace(
    _NOMIC,
    inner={
        **_NOMIC.inner,
        "mlp.fc1": "mlp.up_proj",
        "mlp.router.layer": "mlp.router.layer",
        "mlp.experts": "mlp.experts",
    },
    keys={**_NOMIC.keys, "moe_top_k": "num_experts_per_tok"},
    fixed={
        "activation_function": "gelu",
        "expert_choice_router": False,
        "moe_normalize_expert_weights": False,
        "num_shared_experts": 0,
        **_ONLY_NOMIC,
    },
)
_JINA = _Layout(
    prefixes=("bert.", ""),
    blocks=("encoder.layer",),
    outer=_EMBEDDINGS,
    inner={
        **_BERT_LAYER,
        "mlp.wo": "mlp.down_proj",
        "mlp.layernorm": "post_feedforward_layernorm",
    },
    halves={"mlp.gated_layers": ("mlp.gate_proj", "mlp.up_proj")},
    head={"bert.pooler.dense": "dense", "classifier": "output"},
    fixed={"is_decoder": False, "position_embedding_type": "alibi", "feed_forward_type": "geglu"},
)
#: The layout of its repositories (`NewModel`), and that of transformers.
_GTE = _Layout(
    prefixes=("new.", "gte.", ""),
    blocks=("encoder.layer", "layers"),
    outer=_EMBEDDINGS,
    inner={
        **_GATED_LAYER,
        "attention.qkv_proj": "self_attn.qkv_proj",
        **{f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
        "mlp.down_proj": "mlp.down_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_feedforward_layernorm",
    },
    halves={"mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj")},
    head={
        "new.pooler.dense": "dense",
        "gte.pooler.dense": "dense",
        "classifier": "output",
        "classifier.dense": "dense",
        "classifier.out_proj": "output",
    },
    fixed={
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
    },
)
_EUROBERT = _Layout(
    prefixes=("model.", ""),
    blocks=("layers",),
    outer={"embed_tokens": "embed_tokens", "norm": "norm"},
    inner={
        name: name for name in (*_ATTENTION, *_MLP, "input_layernorm", "post_attention_layernorm")
    },
    head={"dense": "dense", "classifier": "output"},
    head_activation="gelu",
    head_pooling=None,
)
_JINA_CODE = replace(
    _JINA,
    inner={
        **_BERT_LAYER,
        "attention.self.layer_norm_q": "self_attn.q_norm",
        "attention.self.layer_norm_k": "self_attn.k_norm",
        "layer_norm_1": "second_attention_layernorm",
        "mlp.down_layer": "mlp.down_proj",
        "layer_norm_2": "post_feedforward_layernorm",
    },
    halves={"mlp.up_gated_layer": ("mlp.up_proj", "mlp.gate_proj")},
)
#: The layout of its repository, where each matrix has updates for tasks, and that of transformers.
_JINA_V3 = _Layout(
    prefixes=("roberta.", ""),
    blocks=("encoder.layers", "layers"),
    outer={**_EMBEDDINGS, "emb_ln": "embed_norm"},
    inner={
        **{name: name for name in (*_ATTENTION, "post_attention_layernorm")},
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "mixer.Wqkv": "self_attn.qkv_proj",
        "mixer.out_proj": "self_attn.o_proj",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_feedforward_layernorm",
    },
    head={},
    keys={"rotary_emb_base": "rope_theta"},
    fixed={"position_embedding_type": "rotary", "is_decoder": False},
)
_LAYOUTS = {
    "bert": _BERT,
    "electra": _ELECTRA,
    "ernie": _ERNIE,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _DISTILBERT,
    "modernbert": _MODERNBERT,
    "mpnet": _MPNET,
    "nomic_bert": _NOMIC,
    "nomic_bert_moe": _NOMIC_MOE,
    "deberta-v2": _DEBERTA,
    "jina_bert_v2": _JINA,
    "jina_bert_code": _JINA_CODE,
    "jina_embeddings_v3": _JINA_V3,
    "gte": _GTE,
    "eurobert": _EUROBERT,
}
#: Matrices with updates for each task, in Jina's third model.
_ORIGINAL, _UPDATES = "parametrizations.weight.original", "parametrizations.weight.0."
#: The names of norms in checkpoints that were converted from TensorFlow.
_OLD_LEAVES = {"gamma": "weight", "beta": "bias"}


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is written in one of these layouts."""
    return _model_type(config) in tuple(_LAYOUTS)


def _model_type(config: Mapping[str, Any]) -> Any:
    """The model type, where repositories give one that others have too."""
    model_type = config.get("model_type")
    if model_type == "bert" and any("JinaBert" in name for name in class_names(config)):
        return "jina_bert_v2"
    if model_type == "xlm-roberta" and config.get("position_embedding_type") == "rotary":
        return "jina_embeddings_v3"
    if model_type == "nomic_bert" and config.get("moe_every_n_layers"):
        return "nomic_bert_moe"
    return "gte" if model_type == "new" else model_type


def to_hf_layout(
    config: dict[str, Any], readers: Mapping[str, Reader]
) -> tuple[dict[str, Any], dict[str, Reader]]:
    """Config and tensors in the usual layout. The tensors of a classifier are named `classifier.*`,
    and the config's `classifier` says how they are used.

    Raises:
        CheckpointError: A size is invalid, or an option is not supported.
    """
    model_type = _model_type(config)
    if model_type == "jina_bert_v2" and any("up_gated_layer" in name for name in readers):
        model_type = "jina_bert_code"
    layout = _LAYOUTS[model_type]
    for key, value in layout.fixed.items():
        if config.get(key) not in (None, value):
            raise ConfigError(f"{key} {config[key]!r} is not supported in a {model_type} config")
    usual = {**config, "model_type": model_type}
    for key, other in layout.keys.items():
        if config.get(key) is not None:
            usual[other] = config[key]
    first = 0
    if layout in (_ROBERTA, _MPNET):  # positions are counted from the padding token's id + 1
        first = int_value(config, "pad_token_id", 1, low=0) + 1
        length = int_value(config, "max_position_embeddings", 512, low=first + 1)
        usual["max_position_embeddings"] = length - first
    if layout is _MODERNBERT:
        usual |= _modernbert(config)
    if layout is _GTE:
        usual |= _gte(config)
    if layout is _DEBERTA:
        _check_disentangled(config)
    if layout in (_DEBERTA, _ELECTRA):
        size = config.get("hidden_size")
        width = config.get("embedding_size", 128 if layout is _ELECTRA else None)
        if width not in (None, size):
            raise refusal("embedding_size", width, f"{size}, the hidden size")
    if layout is _NOMIC_MOE:
        every = int_value(config, "moe_every_n_layers")
        layers = range(int_value(usual, "num_hidden_layers", 12, high=MAX_LAYERS))
        usual["mlp_only_layers"] = [layer for layer in layers if layer % every != 1]
    head = {}
    if any(
        str(name).endswith("SequenceClassification") for name in config.get("architectures") or ()
    ):
        head = dict(layout.head)
        default = "late" if layout is _EUROBERT else "cls"
        pooling = layout.head_pooling or config.get("classifier_pooling") or default
        pooling = "cls" if pooling == "bos" else pooling
        activation = usual.get("classifier_activation") or layout.head_activation
        usual["classifier"] = {"activation": activation, "pooling": pooling}
    result: dict[str, Reader] = {}
    for name, reader in readers.items():
        if _UPDATES in name:
            updated, _, part = name.partition(f".{_UPDATES}")
            target = _usual_name(updated, layout)
            if target is not None:
                result[f"{UPDATES}{target}.{part}"] = reader
            continue
        module, _, leaf = name.replace(_ORIGINAL, "weight").rpartition(".")
        leaf = _OLD_LEAVES.get(leaf, leaf)
        if module in head:
            result[f"classifier.{head[module]}.{leaf}"] = reader
            continue
        if layout is _NOMIC_MOE and name.endswith(("experts.mlp.w1", "experts.mlp.w2")):
            count = int_value(config, "num_experts", high=MAX_EXPERTS)
            kind, module = ("up", "down")[leaf == "w2"], module.removesuffix(".mlp")
            stack = f"model.{_usual_name(module, layout)}.{kind}_proj"
            result[stack] = partial(_expert_stack, reader, count, leaf == "w2")
            continue
        halves = _halves(module, layout)
        for index, half in enumerate(halves):
            result[f"model.{half}.{leaf}"] = partial(_half, reader, index)
        target = None if halves else _usual_name(module, layout)
        if target == "embed_positions" and first:
            reader = partial(_rows_from, reader, first)
        if target is not None:
            result[f"model.{target}.{leaf}"] = reader
    return usual, result


def _check_disentangled(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a DeBERTa whose attention is not that of the published ones."""
    kinds = config.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else list(kinds)
    if sorted(map(str, kinds)) != ["c2p", "p2c"]:
        raise refusal("pos_att_type", config.get("pos_att_type"), "c2p and p2c")
    for key in ("relative_attention", "share_att_key"):
        if config.get(key) is not True:
            raise refusal(key, config.get(key), "true")


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


def _gte(config: Mapping[str, Any]) -> dict[str, Any]:
    """The usual keys of GTE's rotary embedding. With the scaling "ntk", both the base and the
    wavelengths grow."""
    scaling = mapping_value(config, "rope_scaling")
    if rope_type(scaling) != "ntk":
        return {}
    if scaling.get("mixed_b") is not None:
        raise refusal("mixed_b of rope_scaling", scaling["mixed_b"], "null")
    factor = number("factor of rope_scaling", scaling.get("factor"), 1e-6, 1e6)
    theta = number("rope_theta", value_or(config, "rope_theta", 10_000.0), 1.001, 1e12)
    heads = int_value(config, "num_attention_heads", 12)
    dim = int_value(config, "hidden_size", 768) // heads
    stretch = float(portable.power(factor, 2 / max(dim, 1)))
    return {
        "rope_theta": theta * factor,
        "rope_scaling": {"rope_type": "linear", "factor": stretch},
    }


def _usual_name(module: str, layout: _Layout) -> str | None:
    """The usual name of a module; None for one that is not part of the encoder."""
    module = _without_prefix(module, layout)
    if module in layout.outer:
        return layout.outer[module]
    number, inner = _in_layer(module, layout)
    return f"layers.{number}.{layout.inner[inner]}" if inner in layout.inner else None


def _halves(module: str, layout: _Layout) -> list[str]:
    """The usual names of both halves of a fused module; none for another one."""
    number, inner = _in_layer(_without_prefix(module, layout), layout)
    return [f"layers.{number}.{name}" for name in layout.halves.get(inner, ())]


def _without_prefix(module: str, layout: _Layout) -> str:
    start = next(prefix for prefix in (*layout.prefixes, "") if module.startswith(prefix))
    return module[len(start) :]


def _in_layer(module: str, layout: _Layout) -> tuple[str, str]:
    """The number of a module's layer and its name there; both are empty outside the layers."""
    for blocks in layout.blocks:
        number, _, inner = module.removeprefix(f"{blocks}.").partition(".")
        if module.startswith(f"{blocks}.") and inner and re.fullmatch("[0-9]+", number):
            return number, inner
    return "", ""


def _half(reader: Reader, half: int) -> np.ndarray | Weight:
    """The first or the second half of the rows of a matrix or of a vector."""
    tensor = reader()
    if isinstance(tensor, Weight):
        count = tensor.out_features // 2
        data = tensor.data[half * count : (half + 1) * count]
        return replace(tensor, data=data, out_features=len(data))
    count = len(tensor) // 2
    return tensor[half * count : (half + 1) * count]


def _expert_stack(reader: Reader, count: int, is_transposed: bool) -> np.ndarray:
    """The matrices `[experts, out, in]` of experts that are stored one below the other, those of
    their outputs transposed."""
    tensor = np.asarray(reader())
    if tensor.ndim != 2 or len(tensor) % count:
        raise ConfigError(
            f"the matrices of experts have shape {list(tensor.shape)}; allowed are those of"
            f" {count} experts, one below the other"
        )
    stack = tensor.reshape(count, -1, tensor.shape[1])
    return stack.swapaxes(1, 2) if is_transposed else stack


def _rows_from(reader: Reader, first: int) -> np.ndarray:
    return np.asarray(reader())[first:]
