"""Folders in layouts of their own: of diffusion models, encoders and RWKV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.certification.tiny_blockffn import blockffn_checkpoint
from anydecode.certification.tiny_sambay import sambay_checkpoint
from anydecode.models.checkpoint import Checkpoint
from gguf_models import write_folder
from rwkv_models import CONFIG as RWKV_CONFIG
from rwkv_models import rwkv_tensors

Shape = tuple[int, ...]
Tensors = dict[str, np.ndarray]
HIDDEN, INNER, KV, VOCAB, MASK, LAYERS = 64, 128, 32, 40, 39, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_OUTER: dict[str, Shape] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
MATRICES: dict[str, Shape] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYER: dict[str, Shape] = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    **{f"{name}.weight": shape for name, shape in MATRICES.items()},
}
_BIASES = {f"{name}.bias": MATRICES[name][:1] for name in list(MATRICES)[:3]}
_QK: dict[str, Shape] = {f"self_attn.{part}_norm.weight": (16,) for part in "qk"}
_SEPARATE = {f"self_attn.{part}_proj.weight" for part in "qkv"}
_NO_MLP = {name: shape for name, shape in LAYER.items() if not name.startswith("mlp.")}
_EXPERTS: dict[str, Shape] = {
    "mlp.gate.weight": (4, HIDDEN),
    **{
        f"mlp.experts.{expert}.{part}_proj.weight": (HIDDEN, 32) if part == "down" else (32, HIDDEN)
        for expert in range(4)
        for part in ("gate", "up", "down")
    },
}
_EXPERT_SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
#: The layout of Llama with other names: of the outer modules, of the layers, and in them.
_LLADA = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA2 = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}
_NEMOTRON = {"model": "encoder", "lm_head": "diffusion_head"}
_BD3LM: dict[str, Shape] = {
    **{f"norm{number}.weight": (HIDDEN,) for number in (1, 2)},
    "attn_qkv.weight": (3 * HIDDEN, HIDDEN),
    "attn_out.weight": (HIDDEN, HIDDEN),
    "mlp.0.weight": (4 * HIDDEN, HIDDEN),
    "mlp.0.bias": (4 * HIDDEN,),
    "mlp.2.weight": (HIDDEN, 4 * HIDDEN),
    "mlp.2.bias": (HIDDEN,),
    "adaLN_modulation.weight": (6 * HIDDEN, 16),
    "adaLN_modulation.bias": (6 * HIDDEN,),
}
_BD3LM_OUTER: dict[str, Shape] = {
    "backbone.vocab_embed.embedding": (VOCAB, HIDDEN),
    "backbone.sigma_map.mlp.0.weight": (16, 8),
    "backbone.sigma_map.mlp.0.bias": (16,),
    "backbone.sigma_map.mlp.2.weight": (16, 16),
    "backbone.sigma_map.mlp.2.bias": (16,),
    "backbone.output_layer.norm_final.weight": (HIDDEN,),
    "backbone.output_layer.linear.weight": (VOCAB, HIDDEN),
    "backbone.output_layer.linear.bias": (VOCAB,),
    "backbone.output_layer.adaLN_modulation.weight": (2 * HIDDEN, 16),
    "backbone.output_layer.adaLN_modulation.bias": (2 * HIDDEN,),
}
_DIT_OUTER: dict[str, Shape] = {
    name.removeprefix("backbone."): shape for name, shape in _BD3LM_OUTER.items()
} | {"sigma_map.mlp.0.weight": (16, 256)}


def shapes_of(
    layers: tuple[dict[str, Shape], ...],
    outer: dict[str, Shape] = _OUTER,
    blocks: str = "model.layers",
    names: dict[str, str] | None = None,
) -> dict[str, Shape]:
    """The shapes of all tensors; `names` replaces the names of modules."""
    shapes = dict(outer)
    for number, layer in enumerate(layers):
        shapes |= {f"{blocks}.{number}.{name}": shape for name, shape in layer.items()}
    if names is None:
        return shapes
    # Longer names first: one may be the start of another.
    ordered = sorted(names.items(), key=lambda item: -len(item[0]))
    renamed = {}
    for name, shape in shapes.items():
        for old, new in ordered:
            if name.startswith(f"{old}.") or f".{old}." in name:
                name = name.replace(old, new, 1)
        renamed[name] = shape
    return renamed


def _twice(*parts: dict[str, Shape]) -> tuple[dict[str, Shape], ...]:
    layer = {name: shape for part in parts for name, shape in part.items()}
    return (layer,) * LAYERS


#: Diffusion models by model type: their configs beside `SIZES`, and the shapes of their tensors.
_DIFFUSION: dict[str, tuple[dict[str, Any], dict[str, Shape]]] = {
    "Dream": (
        {"architectures": ["DreamModel"], "mask_token_id": MASK},
        shapes_of(_twice(LAYER, _BIASES)),
    ),
    "llada": (
        {
            "architectures": ["LLaDAModelLM"], "d_model": HIDDEN, "embedding_size": VOCAB,
            "n_heads": 4, "n_kv_heads": 2, "n_layers": LAYERS, "mlp_hidden_size": INNER,
            "max_sequence_length": 64, "activation_type": "silu", "block_type": "llama",
            "layer_norm_type": "rms", "mask_token_id": MASK, "weight_tying": False, "alibi": False,
            "include_bias": False, "include_qkv_bias": False, "rope": True, "block_group_size": 1,
        },
        shapes_of(_twice(LAYER), names=_LLADA),
    ),
    "lladamoe": (
        {
            "architectures": ["LLaDAMoEModelLM"], "dense_intermediate_size": INNER,
            "expert_intermediate_size": 32, "moe_layer_freq": [1, 1], "qk_layernorm": True,
            "partial_rotary_factor": 1, "mask_token_id": MASK, **_EXPERT_SIZES,
        },
        shapes_of(_twice(_NO_MLP, _QK, _EXPERTS)),
    ),
    "llada2_moe": (
        {
            "architectures": ["LLaDA2MoeModelLM"], "first_k_dense_replace": 1, "n_group": 2,
            "topk_group": 1, "num_shared_experts": 1, "norm_topk_prob": True, "block_size": 8,
            "moe_router_enable_expert_bias": True, "partial_rotary_factor": 0.5,
            "routed_scaling_factor": 2.5, "score_function": "sigmoid", "use_qk_norm": True,
            "mask_token_id": MASK, **_EXPERT_SIZES,
        },
        shapes_of(
            tuple(
                {
                    "attention.query_key_value.weight": (HIDDEN + 2 * KV, HIDDEN),
                    **{name: shape for name, shape in layer.items() if name not in _SEPARATE},
                }
                for layer in (
                    {**LAYER, **_QK},
                    {
                        **_NO_MLP, **_QK, **_EXPERTS, "mlp.gate.expert_bias": (4,),
                        "mlp.shared_experts.gate_proj.weight": (32, HIDDEN),
                        "mlp.shared_experts.up_proj.weight": (32, HIDDEN),
                        "mlp.shared_experts.down_proj.weight": (HIDDEN, 32),
                    },
                )
            ),
            names=_LLADA2,
        ),
    ),
    "sdar": (
        {"architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": MASK},
        shapes_of(_twice(LAYER, _QK)),
    ),
    "sdar_moe": (
        {
            "architectures": ["SDARMoeForCausalLM"], "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mask_token_id": MASK, **_EXPERT_SIZES,
        },
        shapes_of(_twice(_NO_MLP, _QK, _EXPERTS)),
    ),
    "Fast_dLLM_Qwen": (
        {
            "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8, "mask_token_id": MASK,
            "use_sliding_window": False,
        },
        shapes_of(_twice(LAYER, _BIASES)),
    ),
    "nemotron_labs_diffusion": (
        {
            "architectures": ["NemotronLabsDiffusionModel"], "block_size": 8,
            "dlm_paradigm": "bidirectional", "mask_token_id": MASK, "sliding_window": None,
            "rope_parameters": {
                "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
                "rope_theta": 10000.0, "rope_type": "yarn",
            },
        },
        shapes_of(_twice(LAYER), names=_NEMOTRON),
    ),
    "WeDLM": (
        {"architectures": ["WeDLMForCausalLM"], "qk_norm": True, "mask_token_id": MASK},
        shapes_of(_twice(LAYER, _QK)),
    ),
    "bd3lm": (
        {
            "architectures": ["BD3LM"], "hidden_dim": HIDDEN, "n_blocks": LAYERS, "n_heads": 4,
            "model_length": 64, "block_size": 4, "cond_dim": 16, "cross_attn": True,
            "num_key_value_heads": None, "head_dim": None,
            "time_conditioning": False, "mask_token_id": MASK,
        },
        shapes_of((_BD3LM,) * LAYERS, _BD3LM_OUTER, "backbone.blocks"),
    ),
    "dit": (
        {
            "architectures": ["DIT"], "max_seq_len": 64, "timestep_cond_dim": 16,
            "p_uniform": 0.1, "t_eps": 1e-4, "num_key_value_heads": None, "head_dim": None,
            "mask_token_id": MASK,
        },
        shapes_of((_BD3LM,) * LAYERS, _DIT_OUTER, "blocks"),
    ),
}  # fmt: skip
_NORM_LEAVES = ("weight", "bias")


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str) -> dict[str, Shape]:
    return {f"{name}.{leaf}": (HIDDEN,) for leaf in _NORM_LEAVES}


def _embeddings(**rows: int) -> dict[str, Shape]:
    return {f"embeddings.{name}.weight": (count, HIDDEN) for name, count in rows.items()}


#: Encoders by model type, as diffusion models.
_ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Shape]]] = {
    "bert": (
        {
            "architectures": ["BertForSequenceClassification"], "type_vocab_size": 2,
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "pad_token_id": 0, "num_labels": 1,
            "id2label": {"0": "LABEL_0"}, "num_key_value_heads": None, "head_dim": None,
        },
        shapes_of(
            (
                {
                    **_linear("attention.self.query", HIDDEN, HIDDEN),
                    **_linear("attention.self.key", HIDDEN, HIDDEN),
                    **_linear("attention.self.value", HIDDEN, HIDDEN),
                    **_linear("attention.output.dense", HIDDEN, HIDDEN),
                    **_norm("attention.output.LayerNorm"),
                    **_linear("intermediate.dense", INNER, HIDDEN),
                    **_linear("output.dense", HIDDEN, INNER),
                    **_norm("output.LayerNorm"),
                },
            )
            * LAYERS,
            {
                **_embeddings(word_embeddings=VOCAB, token_type_embeddings=2),
                "embeddings.position_embeddings.weight": (64, HIDDEN),
                **_norm("embeddings.LayerNorm"),
                **_linear("pooler.dense", HIDDEN, HIDDEN),
            },
            "encoder.layer",
            {"embeddings": "bert.embeddings", "encoder": "bert.encoder", "pooler": "bert.pooler"},
        )
        | _linear("classifier", 1, HIDDEN),
    ),
    "modernbert": (
        {
            "architectures": ["ModernBertModel"], "hidden_activation": "gelu", "norm_eps": 1e-5,
            "norm_bias": False, "attention_bias": False, "mlp_bias": False, "local_attention": 12,
            "global_attn_every_n_layers": 2, "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0, "pad_token_id": 0, "num_key_value_heads": None,
        },
        shapes_of(
            tuple(
                {
                    **({"attn_norm.weight": (HIDDEN,)} if number else {}),
                    "attn.Wqkv.weight": (3 * HIDDEN, HIDDEN),
                    "attn.Wo.weight": (HIDDEN, HIDDEN),
                    "mlp.Wi.weight": (2 * INNER, HIDDEN),
                    "mlp.Wo.weight": (HIDDEN, INNER),
                    "mlp_norm.weight": (HIDDEN,),
                }
                for number in range(LAYERS)
            ),
            {
                **_embeddings(tok_embeddings=VOCAB),
                "embeddings.norm.weight": (HIDDEN,),
                "final_norm.weight": (HIDDEN,),
            },
            "layers",
        ),
    ),
    "nomic_bert": (
        {
            "architectures": ["NomicBertModel"], "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4,
            "n_inner": INNER, "n_positions": 64, "type_vocab_size": 2, "layer_norm_epsilon": 1e-5,
            "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
            "prenorm": False, "qkv_proj_bias": False, "pad_token_id": 0,
            "num_key_value_heads": None, "head_dim": None,
        },
        shapes_of(
            (
                {
                    "attn.Wqkv.weight": (3 * HIDDEN, HIDDEN),
                    "attn.out_proj.weight": (HIDDEN, HIDDEN),
                    "mlp.fc11.weight": (INNER, HIDDEN),
                    "mlp.fc12.weight": (INNER, HIDDEN),
                    "mlp.fc2.weight": (HIDDEN, INNER),
                    **_norm("norm1"),
                    **_norm("norm2"),
                },
            )
            * LAYERS,
            {
                **_embeddings(word_embeddings=VOCAB, token_type_embeddings=2),
                **_norm("emb_ln"),
            },
            "encoder.layers",
        ),
    ),
}  # fmt: skip


def random_tensors(shapes: dict[str, Shape], seed: int = 0) -> Tensors:
    generator = np.random.default_rng(seed)
    return {
        name: 0.3 * generator.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


def _write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    tensors = {name: np.ascontiguousarray(x) for name, x in checkpoint.tensors.items()}
    return write_folder(folder, tensors, **checkpoint.config)


def _write_rwkv(folder: Path) -> Path:
    """RWKV-7 with its own kind of vocabulary."""
    write_folder(folder, rwkv_tensors(RWKV_CONFIG), **RWKV_CONFIG)
    pieces = [
        *(bytes([byte]) for byte in range(97, 123)),
        b"ab",
        b"'",
        "ö".encode(),
        b"\xff",
        b"\n",
    ]
    lines = []
    for token, piece in enumerate(pieces, 1):
        literal = repr(piece) if piece == b"\xff" else repr(piece.decode())
        lines.append(f"{token} {literal} {len(piece)}\n")
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines), encoding="utf-8")
    end = {"40": {"content": "<end>", "special": True}}
    settings = {"eos_token": "<end>", "added_tokens_decoder": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _write_slow_tokenizer(folder: Path) -> Path:
    """A model whose tokenizer is that of the slow class of Qwen2."""
    config, shapes = _DIFFUSION["Dream"]
    write_folder(folder, random_tensors(shapes), **{**SIZES, "model_type": "Dream", **config})
    vocab = {text: token for token, text in enumerate([*map(chr, range(97, 123)), "Ġ", "ab", "Ġc"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nĠ c\n")
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "added_tokens_decoder": {str(MASK): {"content": "<|mask|>", "special": True}},
        "mask_token": "<|mask|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _write_encoder(folder: Path, name: str) -> Path:
    """An encoder with the files of sentence-transformers."""
    config, shapes = _ENCODERS[name]
    write_folder(folder, random_tensors(shapes), **{**SIZES, "model_type": name, **config})
    if name != "bert":
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {
                "idx": index,
                "path": f"{index}_{kind}",
                "type": f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": HIDDEN}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        limits = {"max_seq_length": 32, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    return folder


def write_layouts(root: Path) -> dict[str, Path]:
    """Write a folder of every layout; the folders by name."""
    folders = {
        "sambay": _write_checkpoint(root / "sambay", sambay_checkpoint(layers=4)),
        "blockffn": _write_checkpoint(root / "blockffn", blockffn_checkpoint()),
        "rwkv vocabulary": _write_rwkv(root / "rwkv vocabulary"),
        "slow tokenizer": _write_slow_tokenizer(root / "slow tokenizer"),
    }
    for name, (config, shapes) in _DIFFUSION.items():
        whole = {**SIZES, "model_type": name, **config}
        folders[name] = write_folder(root / name, random_tensors(shapes), **whole)
    for name in _ENCODERS:
        folders[name] = _write_encoder(root / name, name)
    return folders
