"""Tiny random models of families that `transformers` does not have: as published, as GGUF files,
and as `plain_decoders.Decoder`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny import random_matrices
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import gpt, plamo
from anydecode.models.scripted import BYTE_VOCABULARY
from gguf_models import finish, interleave, writer_with
from plain_decoders import HEAD, HEADS, HIDDEN, INNER, KV_HEADS, Decoder, random_tensors

Tensors = dict[str, np.ndarray]
SLOPES = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)
#: Config keys of most families.
SIZES: dict[str, Any] = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
#: Metadata of most families.
METADATA: dict[str, Any] = {
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
#: The names in GGUF files.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.gate_proj": "attn_gate",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
}


@dataclass(frozen=True)
class PlainFamily:
    """A family of plain decoders.

    Attributes:
        config: Config keys beside `SIZES`; those that are None are left out.
        metadata: Metadata beside `METADATA`; those that are None are left out.
        decoder: Makes the reference, from a seed.
        published: The tensors of a checkpoint from those of the reference.
        stored: The tensors of a GGUF file, with usual names and experts as stacks, from those of
            the reference.
    """

    config: dict[str, Any]
    metadata: dict[str, Any]
    decoder: Callable[[int], Decoder]
    published: Callable[[Tensors], Tensors]
    stored: Callable[[Tensors], Tensors]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The config of a family's model."""
    config = {**SIZES, "model_type": name, **FAMILIES[name].config, **changes}
    return {key: value for key, value in config.items() if value is not None}


def checkpoint(name: str, seed: int = 0, **changes: Any) -> Checkpoint:
    """The model of a family, as a loader returns it."""
    family, config = FAMILIES[name], config_of(name, **changes)
    tensors = family.published(dict(family.decoder(seed).tensors))
    if gpt.is_gpt(config):
        readers = {key: (lambda tensor=tensor: tensor) for key, tensor in tensors.items()}
        config, converted = gpt.to_hf_layout(config, readers)
        tensors = {key: np.asarray(reader()) for key, reader in converted.items()}
    if plamo.is_plamo(config):
        readers = {key: (lambda tensor=tensor: tensor) for key, tensor in tensors.items()}
        tensors = {k: np.asarray(one()) for k, one in plamo.to_hf_layout(readers).items()}
    return Checkpoint(name, Path(name), config, tensors)


def as_gguf(name: str, path: Path, tokenizer: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The file that llama.cpp's converter makes of the model, with the metadata of a tokenizer, to
    which its vocabulary is fitted, if there is one."""
    family = FAMILIES[name]
    decoder = family.decoder(0)
    count = {"block_count": len(decoder.bases)}
    metadata = {**METADATA, **count, **family.metadata, **changes, **(tokenizer or {})}
    writer = writer_with(path, name, metadata, 0 if tokenizer else BYTE_VOCABULARY)
    for key, tensor in family.stored(dict(decoder.tensors)).items():
        for usual, other in NAMES.items():
            key = (
                key.replace(f"{usual}.", f"{other}.")
                if usual[-1] != "."
                else key.replace(usual, other)
            )
        if tokenizer and key == "token_embd.weight":
            tensor = np.resize(tensor, (len(tokenizer["tokenizer.ggml.tokens"]), HIDDEN))
        writer.add_tensor(key, np.ascontiguousarray(tensor, np.float32))
    finish(writer)
    return path


def _renamed(names: dict[str, str]) -> Callable[[Tensors], Tensors]:
    """Other names of tensors."""

    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for key, tensor in tensors.items():
            for usual, other in names.items():
                key = key.replace(usual, other)
            found[key] = tensor
        return found

    return rename


def _fused(tensors: Tensors, target: str = "self_attn.qkv_proj") -> Tensors:
    """Queries, keys and values as one tensor."""
    found = dict(tensors)
    for key in tensors:
        if ".self_attn.q_proj." in key:
            parts = [found.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            found[key.replace("self_attn.q_proj", target)] = np.concatenate(parts)
    return found


def _stacked(tensors: Tensors) -> Tensors:
    """Experts as stacks, with their names in GGUF files."""
    found: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for key, tensor in tensors.items():
        if "experts." not in key:
            found[key] = tensor
            continue
        layer, part = key.split(".mlp.")[0], key.split(".")[-2].removesuffix("_proj")
        kind = "chexps" if ".chunk_experts." in key else "exps"
        stacks.setdefault(f"{layer}.ffn_{part}_{kind}.weight", []).append(tensor)
    return found | {key: np.stack(stack) for key, stack in stacks.items()}


def _pairs(tensors: Tensors) -> Tensors:
    """Queries and keys whose rotary pairs are next to each other, norms included."""
    found = dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            found[key] = interleave(tensor, len(tensor) // HEAD)
    return found


def _smallthinker(seed: int) -> Decoder:
    """Five layers, of which the first and the last have neither a window nor positions: with four,
    llama.cpp has positions in every layer."""
    tensors = random_tensors(seed, 5, experts=6)
    for key in tensors:
        if ".mlp." in key or "embed" in key:
            tensors[key] *= 0.3
    return Decoder(
        tensors,
        bases=[None, 500.0, 500.0, 500.0, None],
        windows=[None, 300, 300, 300, None],
        activation="relu",
        experts=2,
        router="sigmoid",
        routes_inputs=True,
    )


def _smallthinker_config(tensors: Tensors) -> Tensors:
    names = {
        "mlp.gate.": "block_sparse_moe.primary_router.",
        "mlp.experts": "block_sparse_moe.experts",
        **{f".{part}_proj.weight": f".{part}.weight" for part in ("gate", "up", "down")},
    }
    return _renamed(names)(tensors)


def _maincoder(seed: int) -> Decoder:
    return Decoder(random_tensors(seed, head_norms=True), [500.0] * 3, norms_last=True)


def _jais(seed: int) -> Decoder:
    """Embeddings and head are those before their factors."""
    tensors = random_tensors(seed, kv_heads=HEADS, biases=True)
    tensors["model.embed_tokens.weight"] /= 4
    tensors["model.norm.weight"] *= np.sign(np.arange(HIDDEN) % 2 - 0.5)  # no token repeats itself
    return Decoder(
        tensors,
        [None] * 3,
        slopes=SLOPES,
        scale=1 / HEAD,
        embedding_scale=4.0,
        logit_scale=0.6,
        has_layer_norms=True,
        eps=1e-5,
    )


def _jais_layout(tensors: Tensors) -> Tensors:
    """That of GPT-2, whose matrices are stored as [in, out]."""
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers.": "transformer.h.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.gate_proj": "mlp.c_fc2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    found = _renamed(names)(_fused(tensors, "attn.c_attn"))
    return {
        key: np.ascontiguousarray(x.T) if ".c_" in key and x.ndim == 2 else x
        for key, x in found.items()
    }


def _jais_stored(tensors: Tensors) -> Tensors:
    """The converter multiplies embeddings and head by their factors."""
    found = _fused(tensors)
    found["lm_head.weight"] = 0.6 * tensors["model.embed_tokens.weight"]
    found["model.embed_tokens.weight"] = 4.0 * tensors["model.embed_tokens.weight"]
    return found


def _spark(seed: int) -> Decoder:
    """Its logits are small, since the GELU of files is not that of the reference."""
    tensors = random_tensors(seed, head=True, head_gates=True)
    tensors["lm_head.weight"] *= 0.4
    return Decoder(
        tensors,
        bases=[500.0, 5e4, 500.0],
        windows=[9, None, 9],
        rotary=[12, 6, 12],
        activation="gelu",
    )


def _spark_layout(tensors: Tensors) -> Tensors:
    names = {"self_attn.gate_proj": "self_attn.g_proj"}
    return _renamed(names)(_fused(tensors, "self_attn.q_k_v_proj"))


def _maple(seed: int) -> Decoder:
    tensors = random_tensors(seed, experts=6, head=True, head_norms=True)
    for key in tensors:
        if ".experts." in key and "down" not in key:
            tensors[key] *= 4  # so that some numbers are beyond the limit
    return Decoder(
        tensors,
        bases=[500.0, None, 500.0],
        windows=[9, None, 9],
        rotary=[6] * 3,
        experts=2,
        limit=7.0,
    )


#: The norms of PLaMo: their names, those of files, and what the weights lack.
PLAMO_NORMS = {
    "input_layernorm.weight": ("pre_mixer_norm.weight", "attn_norm.weight", 1.0),
    "post_attention_layernorm.weight": ("post_mixer_norm.weight", "post_attention_norm", 0.2),
    "pre_feedforward_layernorm.weight": ("pre_mlp_norm.weight", "ffn_norm.weight", 1.0),
    "post_feedforward_layernorm.weight": ("post_mlp_norm.weight", "post_ffw_norm", 5**-1.5),
}
PLAMO_RECURRENCE, PLAMO_STATE = 3, 8


def _plamo(seed: int, is_hybrid: bool) -> Decoder:
    """Of PLaMo 2, the first and the last layer are recurrent, and each head has norms of its
    own."""
    tensors, matrix = random_tensors(seed, head_norms=True), random_matrices(seed + 100)
    tensors["model.norm.weight"] *= np.sign(np.arange(HIDDEN) % 2 - 0.5)  # no token repeats itself
    inner = PLAMO_RECURRENCE * HEAD
    for layer in range(3):
        name = f"model.layers.{layer}"
        for norm, (*_, constant) in PLAMO_NORMS.items():
            tensors[f"{name}.{norm}"] = (0.5 + constant) * (1 + 0.1 * matrix(1, HIDDEN)[0])
        if not is_hybrid:
            continue
        if layer == 1:
            for part, heads in (("q", HEADS), ("k", KV_HEADS)):
                norms = 1 + 0.5 * matrix(heads, HEAD)
                tensors[f"{name}.self_attn.{part}_norm.weight"] = norms
            continue
        for key in [key for key in tensors if key.startswith(f"{name}.self_attn")]:
            del tensors[key]
        shapes = {
            "in_proj": (2 * inner, HIDDEN),
            "x_proj": (2 * PLAMO_STATE + 64, inner),
            "dt_proj": (PLAMO_RECURRENCE, 64),
            "out_proj": (HIDDEN, inner),
        }
        own = {f"{part}.weight": 2 * matrix(*shape) for part, shape in shapes.items()}
        own["conv1d.weight"] = matrix(inner, 4)[:, None]
        for part, size in (("b", PLAMO_STATE), ("c", PLAMO_STATE), ("dt", 64)):
            own[f"{part}_layernorm.weight"] = 1 + 0.1 * matrix(1, size)[0]
        for part in ("dt_proj.bias", "A_log", "D"):
            own[part] = matrix(1, PLAMO_RECURRENCE)[0]
        tensors |= {f"{name}.mamba.{part}": tensor for part, tensor in own.items()}
    windows = [None] * 3 if is_hybrid else [9, None, 9]
    bases: list[float | None] = [1e4] * 3 if is_hybrid else [500.0, 5e4, 500.0]
    return Decoder(tensors, bases, windows)


def _mixer(is_hybrid: bool) -> dict[str, str]:
    names = {
        "mamba.x_proj": "mixer.bcdt_proj",
        "mamba.dt_proj.bias": "mixer.dt_bias",
        **{f"mamba.{part}_layernorm.": f"mixer.{part.upper()}_norm_" for part in "bc"},
        "mamba.dt_layernorm.": "mixer.dt_norm_",
        "mamba.": "mixer.",
        "self_attn.": "mixer.",
        "model.layers.": "model.layers.layers.",
        **{f"self_attn.{part}_norm.": f"mixer.{part}_" for part in "qk" if is_hybrid},
    }
    return dict(sorted(names.items(), key=lambda pair: -len(pair[0])))


def _plamo_layout(tensors: Tensors) -> Tensors:
    is_hybrid = any(".mamba." in key for key in tensors)
    found = {}
    for key, tensor in _gate_up(_fused(tensors)).items():
        for norm, (own, _, constant) in PLAMO_NORMS.items():
            if key.endswith(f".{norm}"):
                key, tensor = key.replace(norm, own), tensor - constant
        if key == "model.norm.weight" or ("self_attn" in key and "_norm" in key and not is_hybrid):
            tensor = tensor - 1.0
        found[key] = tensor
    return _renamed(_mixer(is_hybrid))(found)


def _plamo_stored(tensors: Tensors) -> Tensors:
    found = {}
    for key, tensor in _gate_up(_fused(tensors)).items():
        for norm, (_, own, _) in PLAMO_NORMS.items():
            key = key.replace(norm, own)
        if key.endswith("A_log"):
            key, tensor = key.replace("A_log", "A"), -np.exp(tensor)
        found[key] = tensor[:, 0] if "conv1d" in key else tensor
    names = {
        "mlp.gate_up_proj": "ffn_up",
        **{f"mamba.{part}_layernorm.weight": f"ssm_{part}_norm" for part in ("b", "c", "dt")},
        **{f"mamba.{part}_proj": f"ssm_{part}" for part in ("in", "x", "dt", "out")},
        "mamba.conv1d": "ssm_conv1d",
        "mamba.A": "ssm_a",
        "mamba.D": "ssm_d",
    }
    return _renamed(names)(found)


def _gate_up(tensors: Tensors) -> Tensors:
    """Gate and up as one tensor."""
    found = dict(tensors)
    for key in tensors:
        if key.endswith("mlp.gate_proj.weight"):
            parts = [found.pop(key), found.pop(key.replace("gate", "up"))]
            found[key.replace("gate", "gate_up")] = np.concatenate(parts)
    return found


def _grok(seed: int) -> Decoder:
    """Grok 2. Its logits are small, since they are capped."""
    tensors, matrix = random_tensors(seed, experts=6, head=True), random_matrices(seed + 100)
    tensors["model.embed_tokens.weight"] /= 4
    for layer in range(3):
        name = f"model.layers.{layer}"
        for part, shape in (
            *((part, (INNER // 2, HIDDEN)) for part in ("gate", "up")),
            ("down", (HIDDEN, INNER // 2)),
        ):
            tensors[f"{name}.mlp.{part}_proj.weight"] = 2 * matrix(*shape)
        for norm in ("pre_feedforward", "post_feedforward"):
            weights = 1 + 0.1 * matrix(1, HIDDEN)[0]
            tensors[f"{name}.{norm}_layernorm.weight"] = weights
    return Decoder(
        tensors,
        [500.0] * 3,
        activation="gelu",
        experts=2,
        softcaps=(3.0, 2.0, 9.0),
        scale=0.4,
        embedding_scale=4.0,
        logit_scale=0.3,
        eps=1e-5,
    )


def _grok_layout(tensors: Tensors) -> Tensors:
    names = {
        "post_attention_layernorm": "post_attn_norm",
        "input_layernorm": "pre_attn_norm",
        **{f"{part}_feedforward_layernorm": f"{part}_moe_norm" for part in ("pre", "post")},
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.experts": "block_sparse_moe.experts",
    }
    found = _renamed(names)(tensors)
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {
        _renamed(parts)({key: x}).popitem()[0] if ".experts." in key else key: x
        for key, x in found.items()
    }


def _grok_stored(tensors: Tensors) -> Tensors:
    names = {
        "post_attention_layernorm": "attn_output_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    return _renamed(names)(_stacked(tensors))


def _codeshell(seed: int) -> Decoder:
    tensors = random_tensors(seed, head=True, biases=True)
    tensors["lm_head.weight"] *= 0.3
    for key in [key for key in tensors if ".mlp.gate_proj." in key]:
        del tensors[key]
    bases: list[float | None] = [1e4] * 3
    return Decoder(tensors, bases, activation="gelu", has_layer_norms=True, eps=1e-5)


def _codeshell_layout(tensors: Tensors) -> Tensors:
    names = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers.": "transformer.h.",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    return _renamed(names)(_fused(tensors, "attn.c_attn"))


GROUP_INNER = 24


def _grove(seed: int) -> Decoder:
    tensors, matrix = random_tensors(seed, experts=6, head_norms=True), random_matrices(seed + 100)
    tensors["model.embed_tokens.weight"] /= 6
    for layer in range(3):
        for group in range(3):
            name = f"model.layers.{layer}.mlp.chunk_experts.{group}"
            for part, shape in (("gate", (1, 0)), ("up", (1, 0)), ("down", (0, 1))):
                sizes = [(HIDDEN, GROUP_INNER)[axis] for axis in shape]
                tensors[f"{name}.{part}_proj.weight"] = 4 * matrix(*sizes)
    return Decoder(tensors, [500.0] * 3, experts=3, group=(2, 0.3))


def _arctic(seed: int) -> Decoder:
    tensors, matrix = random_tensors(seed, experts=6, head=True), random_matrices(seed + 100)
    for layer in range(3):
        name = f"model.layers.{layer}"
        tensors[f"{name}.residual_layernorm.weight"] = 1 + 0.3 * matrix(1, HIDDEN)[0]
        for part in ("gate", "up", "down"):
            weight = 2 * matrix(HIDDEN, HIDDEN)
            tensors[f"{name}.mlp.residual_mlp.{part}_proj.weight"] = weight
    return Decoder(tensors, [500.0] * 3, experts=2, eps=1e-5)


def _arctic_layout(tensors: Tensors) -> Tensors:
    names = {
        "mlp.residual_mlp": "residual_mlp",
        "mlp.gate.": "block_sparse_moe.gate.",
        "mlp.experts": "block_sparse_moe.experts",
    }
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {
        _renamed(parts)({key: x}).popitem()[0] if "self_attn" not in key else key: x
        for key, x in _renamed(names)(tensors).items()
    }


def _arctic_stored(tensors: Tensors) -> Tensors:
    names = {
        "post_attention_layernorm": "ffn_norm_exps",
        "residual_layernorm": "ffn_norm",
        **{f"mlp.residual_mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }
    return _renamed(names)(_stacked(_pairs(tensors)))


PLM_RANK, PLM_ROTARY, PLM_VALUE = 20, 4, 8


def _plm(seed: int) -> Decoder:
    tensors, matrix = random_tensors(seed), random_matrices(seed + 100)
    tensors["model.embed_tokens.weight"] /= 4
    for key in [key for key in tensors if any(f".{x}_proj." in key for x in ("k", "v", "o"))]:
        del tensors[key]
    for key in [key for key in tensors if ".mlp.gate_proj." in key]:
        del tensors[key]
    for layer in range(3):
        for module, shape in (
            ("kv_a_proj_with_mqa", (PLM_RANK + PLM_ROTARY, HIDDEN)),
            ("kv_b_proj", (HEADS * (HEAD - PLM_ROTARY + PLM_VALUE), PLM_RANK)),
            ("o_proj", (HIDDEN, HEADS * PLM_VALUE)),
        ):
            tensors[f"model.layers.{layer}.self_attn.{module}.weight"] = 2 * matrix(*shape)
        norm = 1 + 0.1 * matrix(1, PLM_RANK)[0]
        tensors[f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"] = norm
    return Decoder(tensors, [500.0] * 3, rotary=[PLM_ROTARY] * 3, activation="relu2")


def _plm_pairs(tensors: Tensors) -> Tensors:
    """Rotary pairs of queries and of the key are next to each other."""
    found = dict(tensors)
    for key, tensor in tensors.items():
        if key.endswith("q_proj.weight"):
            heads = tensor.reshape(HEADS, HEAD, -1)
            first, last = np.split(heads, [HEAD - PLM_ROTARY], 1)
            last = np.stack([interleave(head, 1) for head in last])
            found[key] = np.concatenate([first, last], 1).reshape(tensor.shape)
        elif "kv_a_proj" in key:
            first, last = np.split(tensor, [PLM_RANK])
            found[key] = np.concatenate([first, interleave(last, 1)])
    return found


def _plm_stored(tensors: Tensors) -> Tensors:
    names = {
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
    }
    return _renamed(names)(_plm_pairs(tensors))


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "smallthinker": PlainFamily(
        {
            "architectures": ["SmallThinkerForCausalLM"],
            "intermediate_size": None,
            "num_hidden_layers": 5,
            "moe_num_primary_experts": 6,
            "moe_num_active_primary_experts": 2,
            "moe_ffn_hidden_size": INNER,
            "moe_primary_router_apply_softmax": False,
            "sliding_window_layout": [0, 1, 1, 1, 0],
            "sliding_window_size": 300,
            "rope_layout": [0, 1, 1, 1, 0],
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
        {
            "rope.freq_base": 500.0,
            "rope.dimension_count": HEAD,
            "attention.sliding_window": 300,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": INNER,
            "expert_gating_func": 2,
        },
        _smallthinker,
        _smallthinker_config,
        _stacked,
    ),
    "maincoder": PlainFamily(
        {
            "architectures": ["MaincoderForCausalLM"],
            "num_hidden_layers": 3,
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
        {"rope.freq_base": 500.0, "rope.dimension_count": HEAD},
        _maincoder,
        _pairs,
        _pairs,
    ),
    "jais": PlainFamily(
        {
            **dict.fromkeys(SIZES),
            "architectures": ["JAISLMHeadModel"],
            "vocab_size": BYTE_VOCABULARY,
            "n_embd": HIDDEN,
            "n_head": HEADS,
            "n_layer": 3,
            "n_inner": INNER,
            "n_positions": 512,
            "activation_function": "swiglu",
            "position_embedding_type": "alibi",
            "layer_norm_epsilon": 1e-5,
            "mup_embeddings_scale": 4.0,
            "mup_output_alpha": 2.0,
            "mup_width_scale": 0.3,
            "mup_scale_qk_dot_by_d": True,
        },
        {
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.max_alibi_bias": 8.0,
        },
        _jais,
        _jais_layout,
        _jais_stored,
    ),
    "spark2_5": PlainFamily(
        {
            "architectures": ["Spark2_5ForCausalLM"],
            "num_hidden_layers": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "gate_attn_act_mode": "sigmoid",
            "headwise_attn_output_gate": True,
            "layer_types": SLIDING,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
            },
        },
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base": 5e4,
            "rope.freq_base_swa": 500.0,
            "rope.dimension_count": 6,
            "rope.dimension_count_swa": 12,
        },
        _spark,
        _spark_layout,
        _fused,
    ),
    "maple": PlainFamily(
        {
            "architectures": ["MapleForCausalLM"],
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
            "nope_on_global_attention": True,
            "layer_types": SLIDING,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
            },
        },
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base": 500.0,
            "rope.dimension_count": 6,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": INNER,
            "swiglu_clamp_exp": [7.0] * 3,
        },
        _maple,
        dict,
        _stacked,
    ),
    "grovemoe": PlainFamily(
        {
            "model_type": "grove_moe",
            "architectures": ["modeling_grove_moe.GroveMoeForCausalLM"],
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": INNER,
            "norm_topk_prob": False,  # which the published code does not read
            "group_expert_size": GROUP_INNER,
            "group_scale": 0.3,
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
        {
            "rope.freq_base": 500.0,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": INNER,
            "expert_chunk_feed_forward_length": GROUP_INNER,
            "experts_per_group": 2,
            "expert_group_scale": 0.3,
        },
        _grove,
        dict,
        _stacked,
    ),
    "arctic": PlainFamily(
        {
            "architectures": ["ArcticForCausalLM"],
            "num_hidden_layers": 3,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layer_frequency": 1,
            "parallel_attn_mlp_res": True,
            "use_residual": True,
            "rope_theta": 500.0,
            "rms_norm_eps": 1e-5,
        },
        {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 500.0,
            "rope.dimension_count": HEAD,
            "expert_count": 6,
            "expert_used_count": 2,
        },
        _arctic,
        _arctic_layout,
        _arctic_stored,
    ),
    "grok": PlainFamily(
        {
            "architectures": ["Grok1ForCausalLM"],
            "num_hidden_layers": 3,
            "intermediate_size": INNER // 2,
            "moe_intermediate_size": INNER,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "residual_moe": True,
            "rope_theta": 500.0,
            "rms_norm_eps": 1e-5,
            "attn_logit_softcapping": 3.0,
            "router_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
            "attn_output_multiplier": 0.4,
            "embedding_multiplier_scale": 4.0,
            "output_multiplier_scale": 0.3,
        },
        {
            "feed_forward_length": INNER // 2,
            "expert_feed_forward_length": INNER,
            "expert_count": 6,
            "expert_used_count": 2,
            "rope.freq_base": 500.0,
            "rope.dimension_count": HEAD,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.output_scale": 0.4,
            "attn_logit_softcapping": 3.0,
            "router_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
            "embedding_scale": 4.0,
            "logit_scale": 0.3,
        },
        _grok,
        _grok_layout,
        _grok_stored,
    ),
    "codeshell": PlainFamily(
        {
            **dict.fromkeys(SIZES),
            "architectures": ["CodeShellForCausalLM"],
            "vocab_size": BYTE_VOCABULARY,
            "n_embd": HIDDEN,
            "n_head": HEADS,
            "n_layer": 3,
            "n_inner": INNER,
            "n_positions": 512,
            "num_query_groups": KV_HEADS,
            "group_query_attention": True,
            "position_embedding_type": "rope",
            "activation_function": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
        },
        {
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 1.0,
        },
        _codeshell,
        _codeshell_layout,
        _fused,
    ),
    "plm": PlainFamily(
        {
            "architectures": ["PLMForCausalLM"],
            "num_hidden_layers": 3,
            "num_key_value_heads": HEADS,
            "head_dim": None,
            "kv_lora_rank": PLM_RANK,
            "q_lora_rank": None,
            "qk_nope_head_dim": HEAD - PLM_ROTARY,
            "qk_rope_head_dim": PLM_ROTARY,
            "v_head_dim": PLM_VALUE,
            "rope_theta": 500.0,
        },
        {
            "attention.head_count_kv": HEADS,
            "attention.value_length": PLM_VALUE,
            "attention.kv_lora_rank": PLM_RANK,
            "rope.freq_base": 500.0,
            "rope.dimension_count": PLM_ROTARY,
        },
        _plm,
        _plm_pairs,
        _plm_stored,
    ),
    "plamo2": PlainFamily(
        {
            "architectures": ["Plamo2ForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": None,
            "hidden_size_per_head": HEAD,
            "mamba_num_heads": PLAMO_RECURRENCE,
            "mamba_d_state": PLAMO_STATE,
            "mamba_step": 2,
            "attention_window_size": 512,
            "full_attention_idx": [],
        },
        {
            "attention.head_count": [0, HEADS, 0],
            "attention.head_count_kv": [0, KV_HEADS, 0],
            "ssm.state_size": PLAMO_STATE,
            "ssm.conv_kernel": 4,
            "ssm.time_step_rank": PLAMO_RECURRENCE,
            "ssm.inner_size": PLAMO_RECURRENCE * HEAD,
            "ssm.group_count": 0,
            "rope.freq_base": 1e4,
        },
        functools.partial(_plamo, is_hybrid=True),
        _plamo_layout,
        _plamo_stored,
    ),
    "plamo3": PlainFamily(
        {
            "architectures": ["Plamo3ForCausalLM"],
            "num_hidden_layers": 3,
            "window_size": 9,
            "sliding_window_pattern": 2,
            "rope_theta": 5e4,
            "rope_local_theta": 500.0,
        },
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 5e4,
            "rope.freq_base_swa": 500.0,
        },
        functools.partial(_plamo, is_hybrid=False),
        _plamo_layout,
        _plamo_stored,
    ),
}  # fmt: skip
