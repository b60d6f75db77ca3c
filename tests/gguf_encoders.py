"""GGUF files of tiny random encoders, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from encoder_models import WORDS, hf_encoder
from gguf_models import add_metadata, finish, interleave, tensor_names, usual_metadata
from remote_encoders import REMOTE, Remote

_LAST = 3
#: The keys of configs, by those of metadata, where repositories have other names.
_REMOTE_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
EMBEDDING_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 12,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
#: The names of Nomic BERT's modules in its repositories, by those of `transformers`.
_NOMIC = {
    "embeddings_layernorm": "emb_ln",
    "embeddings.layernorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.up_proj": "mlp.fc11",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}

#: The same of Jina's third model.
_JINA_V3 = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "mixer.out_proj",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
_OWN_NAMES = {"NomicBert": (_NOMIC, "attn.Wqkv"), "JinaEmbeddingsV3": (_JINA_V3, "mixer.Wqkv")}


#: The names of sizes in configs of DistilBERT, and the usual ones.
_DISTIL = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}


@dataclass
class Case:
    """An encoder of `transformers` and its GGUF file: `metadata` are the keys that the converter
    adds to those of every model."""

    family: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    head: str = "Model"


CASES: dict[str, Case] = {
    "bert": Case("Bert", "bert"),
    "roberta": Case("Roberta", "bert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": Case("XLMRoberta", "bert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": Case("DistilBert", "bert"),
    "nomic bert": Case(
        "NomicBert",
        "nomic-bert",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        {"rope.freq_base": 1000.0},
    ),
    "jina v3": Case(
        "JinaEmbeddingsV3",
        "jina-bert-v3",
        {
            "type_vocab_size": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
        {"rope.freq_base": 2000.0},
    ),
    "modernbert": Case(
        "ModernBert",
        "modern-bert",
        {
            "local_attention": 12,
            "global_attn_every_n_layers": 3,
            "num_hidden_layers": 5,
            "norm_eps": 1e-5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        {
            "attention.sliding_window": 12,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 5000.0,
            "rope.freq_base_swa": 500.0,
        },
    ),
    "eurobert": Case(
        "EuroBert",
        "eurobert",
        {
            "num_key_value_heads": 2,
            "mask_token_id": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        {"rope.dimension_count": 12},
    ),
    "llama embed": Case(
        "EuroBert",
        "llama-embed",
        {
            "num_key_value_heads": 2,
            "mask_token_id": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        {"rope.dimension_count": 12},
    ),
    "modernbert with silu": Case(
        "ModernBert",
        "modern-bert",
        {"hidden_activation": "silu", "norm_eps": 1e-5, "num_hidden_layers": 5},
        {
            "hidden_activation": "silu",
            "attention.sliding_window": 128,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
        },
    ),
    "embedding gemma": Case(
        "Gemma3Text",
        "gemma-embedding",
        EMBEDDING_GEMMA,
        {"attention.sliding_window": 12, "rope.freq_base_swa": 500.0},
    ),
}


#: Encoders of repositories: the architecture, the name in `REMOTE`, and the metadata beside those
#: of every model.
REMOTE_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jina bert": ("jina-bert-v2", "jina bert", {}),
    "jina bert with six heads": ("jina-bert-v2", "jina bert with six heads", {}),
    "nomic bert with experts": (
        "nomic-bert-moe",
        "nomic bert with experts",
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "moe_every_n_layers": 2,
            "rope.freq_base": 10000.0,
        },
    ),
}


def remote_tensors(name: str) -> tuple[Remote, dict[str, np.ndarray]]:
    """The kind of a repository and tensors that the converter keeps: it leaves out the bias of the
    experts' sum, which is zero in published files."""
    kind = REMOTE[REMOTE_CASES[name][1]][1]
    tensors = kind.tensors()
    for key in tensors:
        if key.endswith("experts.bias"):
            tensors[key] = np.zeros_like(tensors[key])
    return kind, tensors


def original(case: Case) -> Any:
    """The model of `transformers`."""
    return hf_encoder(case.family, case.head, **case.settings)


def write_encoder(
    path: Path,
    case: Case,
    model: Any,
    *,
    pooling: int | None = _LAST,
    extra: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the GGUF file of an encoder.

    Args:
        path: The file.
        case: How the converter writes it.
        model: The model of `transformers`.
        pooling: The number of its pooling; None: the file names none.
        extra: Further tensors.
        metadata: Further metadata of the architecture.
        tokenizer: Adds the tokenizer; None: the one of `encoder_models`.
    """
    config = model.config.to_dict()
    for name, other in _DISTIL.items():
        config.setdefault(other, config.get(name))
    config.setdefault("layer_norm_eps", config.get("norm_eps", 1e-12))
    offset = config["pad_token_id"] + 1 if "oberta" in case.family.lower() else 0
    config["max_position_embeddings"] -= offset
    layers = config["num_hidden_layers"]
    if case.architecture in ("gemma-embedding", "eurobert", "llama-embed"):
        config["layer_norm_eps"] = None
    keys = {
        **usual_metadata(config, layers),
        **{f"attention.{kind}_length": None for kind in ("key", "value")},
        **case.metadata,
        "pooling_type": pooling,
        "attention.causal": False,
        **(metadata or {}),
    }
    if case.architecture == "gemma-embedding":
        keys |= {f"attention.{kind}_length": config["head_dim"] for kind in ("key", "value")}
    writer = gguf.GGUFWriter(path, case.architecture)
    add_metadata(writer, case.architecture, keys)
    (tokenizer or add_letters)(writer)
    writer.add_token_type_count(config.get("type_vocab_size", 2))
    names = tensor_names(case.architecture, layers)
    for name, tensor in _stored(case, model).items():
        if "position_embeddings" in name:
            tensor = tensor[offset:]
        if case.family == "Gemma3Text" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if case.architecture == "llama-embed" and ("q_proj" in name or "k_proj" in name):
            kind = "attention" if "q_proj" in name else "key_value"
            tensor = interleave(tensor, config[f"num_{kind}_heads"])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(tensor, np.float32))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


def write_remote(
    path: Path,
    architecture: str,
    kind: Remote,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
) -> Path:
    """Write the GGUF file of an encoder with the names of its repository."""
    config = dict(kind.config)
    for name, other in _REMOTE_KEYS.items():
        config[other] = config.get(name, config.get(other))
    layers = config["num_hidden_layers"]
    keys = {
        **usual_metadata(config, layers),
        **{f"attention.{part}_length": None for part in ("key", "value")},
        "pooling_type": _LAST,
        "attention.causal": False,
        **metadata,
    }
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, architecture, keys)
    add_letters(writer)
    writer.add_token_type_count(config["type_vocab_size"])
    names = tensor_names(architecture, layers)
    for name, tensor in tensors.items():
        if name.startswith("pooler") or name.endswith("experts.bias"):
            continue
        if name.endswith(("experts.mlp.w1", "experts.mlp.w2")):
            tensor = tensor.reshape(config["num_experts"], config["intermediate_size"], -1)
            tensor = tensor.swapaxes(1, 2) if name.endswith("w2") else tensor
            name = f"{name}.weight"
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, np.ascontiguousarray(tensor))
    finish(writer)
    return path


def _stored(case: Case, model: Any) -> dict[str, np.ndarray]:
    """The tensors that the converter writes, by the names of the repositories."""
    found: dict[str, np.ndarray] = {}
    for full, parameter in model.state_dict().items():
        name = full
        for prefix in ("bert.", "roberta.", "distilbert.", "model."):
            name = name.removeprefix(prefix)
        for usual, own in _OWN_NAMES.get(case.family, ({}, ""))[0].items():
            name = name.replace(usual, own)
        if "pooler" in name or name.endswith(("position_ids", "token_type_ids", "inv_freq")):
            continue
        if case.family == "ModernBert" and name.startswith("classifier."):
            name = name.replace("classifier", "classifier.out_proj")
        if case.family in ("Gemma3Text", "EuroBert"):
            name = f"model.{name}"
        found[name] = parameter.numpy()
    fused = _OWN_NAMES.get(case.family, ({}, ""))[1]
    for name in [name for name in found if fused and "self_attn.q_proj" in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("self_attn.q_proj", fused)] = np.concatenate(parts)
    return found


def add_letters(writer: gguf.GGUFWriter) -> None:
    """The WordPiece tokenizer of `encoder_models`, whose words start with a mark in files."""
    types = [3] * 5 + [1] * (len(WORDS) - 5)
    tokens = [
        word if kind == 3 else word[2:] if word.startswith("##") else f"▁{word}"
        for word, kind in zip(WORDS, types, strict=True)
    ]
    fill = 61 - len(tokens)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"▁[PAD{i}]" for i in range(fill))])
    writer.add_token_types([*types, *([5] * fill)])
    for name, token in (("pad", 0), ("unk", 1), ("bos", 2), ("sep", 3), ("mask", 4)):
        getattr(writer, f"add_{name}_token_id")(token)
