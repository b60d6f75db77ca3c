"""Random drafters that predict blocks, in the layouts in which such drafters are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.tiny import (
    drafter_config,
    eagle3_checkpoint,
    eagle_checkpoint,
    layer_tensors,
    random_matrices,
    with_drafter,
)
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.network import Network

_HEADS = 4


def dflash_checkpoint(
    target: Network, *, seed: int = 0, layers: int = 2, window: int = 0, **options: Any
) -> Checkpoint:
    """A random drafter in the layout of z-lab and SpecForge, which reads the outputs of three
    layers. `window` is that of its first layer, 0 for none; `options` are keys of `dflash_config`.

    The first layer's values are embeddings, so that with a small window the first mask row often
    agrees with a target of small `residual`.
    """
    random, hidden = np.random.default_rng(seed + 2000), target.spec.hidden_size
    depth, mask = target.spec.num_layers, target.spec.vocab_size - 1
    tensors = {
        "fc.weight": _matrix(random, hidden, 3 * hidden),
        "hidden_norm.weight": 0.3 + _vector(random, hidden),
        "norm.weight": 1 + _vector(random, hidden),
    }
    for layer in range(layers):
        tensors |= _layer_tensors(random, f"layers.{layer}", hidden)
    attention, one = "layers.0.self_attn", np.eye(hidden, dtype=np.float32)
    embedding = target.weights.embedding.data[mask].astype(np.float32)
    others = one - np.outer(embedding, embedding) / (embedding @ embedding)
    value = tensors[f"{attention}.v_proj.weight"]
    tensors |= {
        f"{attention}.v_proj.weight": others + 0.1 * value,
        f"{attention}.o_proj.weight": 20 * one,
    }
    own = {"mask_token_id": mask, "target_layer_ids": [0, 1, depth - 2], **options}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.spec.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": hidden // _HEADS,
        "max_position_embeddings": target.spec.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "num_target_layers": depth,
        "block_size": 8,
        "dflash_config": own,
    }
    if window:
        types = ["sliding_attention"] + ["full_attention"] * (layers - 1)
        config |= {"layer_types": types, "sliding_window": window}
    return Checkpoint("dflash", Path("dflash"), config, tensors)


def dspark_checkpoint(target: Network, *, seed: int = 0, kind: str = "vanilla") -> Checkpoint:
    """A random drafter in the layout of SpecForge's DSpark, with a Markov head of this kind and a
    confidence head. The product of the Markov head's matrices is that of the target's embedding and
    head, so that the drafts often agree with a target of small `residual`."""
    base, random = dflash_checkpoint(target, seed=seed), np.random.default_rng(seed + 3000)
    hidden, weights = target.spec.hidden_size, target.weights
    tensors = {
        **base.tensors,
        "markov_head.markov_w1.weight": weights.embedding.data.astype(np.float32),
        "markov_head.markov_w2.weight": weights.head.data.astype(np.float32),
        "confidence_head.proj.weight": _matrix(random, 1, 2 * hidden),
        "confidence_head.proj.bias": np.array([0.7], np.float32),
    }
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = _matrix(random, hidden, 2 * hidden)
        tensors["markov_head.gate_proj.bias"] = 1 + _vector(random, hidden)
    if kind == "rnn":  # its output is little more than the embedding of the token before
        joint, bias = _matrix(random, 3 * hidden, 3 * hidden), _vector(random, 3 * hidden)
        joint[2 * hidden :] *= 0.3
        joint[2 * hidden :, hidden : 2 * hidden] += np.eye(hidden, dtype=np.float32)
        tensors["markov_head.joint_proj.weight"] = joint
        tensors["markov_head.joint_proj.bias"] = bias
    dspark = {
        "projector_type": "dspark",
        "markov_rank": hidden,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = {**base.config, "architectures": ["DSparkDraftModel"]}
    config["dflash_config"] = {**base.config["dflash_config"], **dspark}
    return Checkpoint("dspark", Path("dspark"), config, tensors)


def domino_checkpoint(
    target: Network, *, seed: int = 0, shifted: bool = False, num_free: int = 0
) -> Checkpoint:
    """A random drafter in the layout of SpecForge's Domino, whose recurrent unit has 24 numbers.
    With `shifted` its first slot predicts too, and `num_free` drafted tokens have no correction."""
    base = dflash_checkpoint(target, seed=seed, shift_label=shifted)
    random, hidden = np.random.default_rng(seed + 7000), target.spec.hidden_size
    width, rank = 24, 16
    tensors = {
        **base.tensors,
        "prefix_gru.weight_ih_l0": _matrix(random, 3 * width, hidden),
        "prefix_gru.weight_hh_l0": 3 * _matrix(random, 3 * width, width),
        "embed_proj.0.weight": 2 * _matrix(random, rank, hidden + width),
        "embed_proj.2.weight": 2 * _matrix(random, target.spec.vocab_size, rank),
    }
    domino = {
        "projector_type": "domino",
        "emb_dim": rank,
        "gru_hidden_dim": width,
        "pure_draft_prefix_len": num_free,
    }
    config = {**base.config, "architectures": ["DominoDraftModel"]}
    config["dflash_config"] = {**base.config["dflash_config"], **domino}
    return Checkpoint("domino", Path("domino"), config, tensors)


def dflash2_checkpoint(
    target: Network, *, seed: int = 0, top_k: int = 16, has_factors: bool = True
) -> Checkpoint:
    """A random drafter in the layout of z-lab's DFlash2, with convolutions of three rows around its
    sublayers and a selector among `top_k` tokens. The selector's codebooks are the target's
    embedding and head. With `has_factors`, logits are scaled and capped."""
    base = dflash_checkpoint(target, seed=seed, window=4)
    random = np.random.default_rng(seed + 8000)
    hidden, weights, taps, group = target.spec.hidden_size, target.weights, 3, 16
    tensors = dict(base.tensors)
    for layer in range(base.config["num_hidden_layers"]):
        for part in ("attention", "mlp"):
            name = f"layers.{layer}.{part}_conv"
            kernel = 0.3 * random.standard_normal((2, taps, hidden), np.float32)
            kernel[:, 0] += 1
            changes = 0.3 * _matrix(random, 2 * taps * hidden // group, hidden)
            tensors |= {f"{name}.base_kernel": kernel, f"{name}.kernel_projection.weight": changes}
    selector = "candidate_selector"
    tensors |= {
        f"{selector}.predecessor_codebook": weights.embedding.data.astype(np.float32),
        f"{selector}.successor_codebook": weights.head.data.astype(np.float32),
        f"{selector}.hidden_projection.weight": 2 * _matrix(random, hidden, hidden),
    }
    own: dict[str, float] = {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": hidden,
        "selector_top_k": top_k,
    }
    if has_factors:
        own |= {"output_multiplier": 0.8, "final_logit_softcapping": 30.0}
    config = {**base.config, "architectures": ["DFlash2DraftModel"], "is_causal": False}
    config["dflash_config"] = {**base.config["dflash_config"], **own}
    return Checkpoint("dflash2", Path("dflash2"), config, tensors)


def peagle_checkpoint(target: Network, *, seed: int = 0) -> Checkpoint:
    """A random drafter in the layout of P-EAGLE (speculators): that of EAGLE-3 with a second layer,
    an embedding of its own and the state of mask tokens, which drafts six tokens."""
    base, random = eagle3_checkpoint(target, seed=seed), np.random.default_rng(seed + 4000)
    hidden = target.spec.hidden_size
    second = _layer_tensors(random, "layers.1", hidden)
    tensors = {
        **{name.replace("midlayer", "layers.0"): tensor for name, tensor in base.tensors.items()},
        **{name: tensor for name, tensor in second.items() if "self_attn.q_norm" not in name},
        "embed_tokens.weight": target.weights.embedding.data.astype(np.float32),
        "mask_hidden": random.standard_normal((1, 1, 3 * hidden), np.float32),
    }
    del tensors["layers.1.self_attn.k_norm.weight"]
    layers = {**base.config, "num_hidden_layers": 2}
    config = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "draft_vocab_size": layers.pop("draft_vocab_size"),
        **layers.pop("eagle_config"),
        "transformer_layer_config": layers,
        "mask_token_id": target.spec.vocab_size - 1,
        "norm_before_residual": True,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 6}]},
    }
    return Checkpoint("peagle", Path("peagle"), config, tensors)


def parallelspec_checkpoint(
    target: Network, *, seed: int = 0, masks: int = 4, layers: int = 1
) -> Checkpoint:
    """A random drafter in the layout of ParallelSpec: that of EAGLE with states of mask tokens."""
    base, random = (
        eagle_checkpoint(target, seed=seed, layers=layers),
        np.random.default_rng(seed + 5000),
    )
    hidden = target.spec.hidden_size
    tensors = {**base.tensors, "mask_states": random.standard_normal((masks, hidden), np.float32)}
    config = {**base.config, "mask_token_id": target.spec.vocab_size - 1}
    return Checkpoint("parallelspec", Path("parallelspec"), config, tensors)


def pard_checkpoint(target: Network, *, seed: int = 0, kind: str = "pard") -> Checkpoint:
    """A random parallel draft model in the layout of PARD: a language model, with its mask token in
    the config. It has the target's embedding and head, and layers that add little, so that its
    first draft often agrees with a target of small `residual`."""
    matrix, hidden = random_matrices(seed + 6000), target.spec.hidden_size
    tensors: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": target.weights.embedding.data.copy(),
        "model.norm.weight": 1 + 0.1 * matrix(1, hidden)[0],
        "lm_head.weight": target.weights.head.data.copy(),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        tensors |= layer_tensors(name, hidden, hidden, lambda *shape: 0.6 * matrix(*shape))
        tensors[f"{name}.input_layernorm.weight"] = 1 + 0.1 * matrix(1, hidden)[0]
    config = {
        **drafter_config(target),
        "num_hidden_layers": 2,
        "pard_token": target.spec.vocab_size - 1,
        "spd_type": kind,
    }
    return Checkpoint("pard", Path("pard"), config, tensors)


def block_drafting_model() -> LLM:
    """An engine over a tiny model and `dspark_checkpoint`."""
    return with_drafter(dspark_checkpoint, cache_positions=4096)


def as_deepspec(checkpoint: Checkpoint, target: Network) -> Checkpoint:
    """A drafter of DSpark in the layout of DeepSpec: all keys of the config are on one level, and
    the target's embedding and head are there as copies."""
    config = {**checkpoint.config, **checkpoint.config["dflash_config"]}
    del config["dflash_config"], config["projector_type"]
    tensors = {
        **checkpoint.tensors,
        "embed_tokens.weight": target.weights.embedding.data.copy(),
        "lm_head.weight": target.weights.head.data.copy(),
    }
    config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    return Checkpoint(checkpoint.name, checkpoint.path, config, tensors)


def as_speculators(checkpoint: Checkpoint, target: Network, **options: Any) -> Checkpoint:
    """A drafter in the layout of speculators, with an embedding of its own and a head for four of
    five tokens (DFlash2: for all). `options` are keys of its config."""
    layers = dict(checkpoint.config)
    is_causal = layers.pop("is_causal", True)
    own: dict[str, Any] = dict(layers.pop("dflash_config"))
    kind = own.pop("projector_type", "dflash2" if "selector_rank" in own else "dflash")
    taps = [layer + 1 for layer in own.pop("target_layer_ids")]
    vocabulary = np.arange(target.spec.vocab_size)
    is_kept = (vocabulary % 5 > 0) | (kind == "dflash2")  # which has a head for all tokens
    kept = vocabulary[is_kept]
    tensors = {
        **checkpoint.tensors,
        "embed_tokens.weight": target.weights.embedding.data.copy(),
        "lm_head.weight": target.weights.head.data[kept].copy(),
    }
    if len(kept) < len(vocabulary):
        tensors |= {"d2t": kept - np.arange(len(kept)), "t2d": is_kept}
    for second in ("markov_head.markov_w2.weight", "embed_proj.2.weight"):
        if second in tensors:
            tensors[second] = np.asarray(tensors[second])[kept]
    if kind == "domino":
        for name in [name for name in tensors if name.startswith(("prefix_gru.", "embed_proj."))]:
            tensors[f"logits_correction.{name}"] = tensors.pop(name)
        own["logits_correction_emb_dim"] = own.pop("emb_dim")
        options = {"sample_from_anchor": own.pop("shift_label"), **options}
    names = {
        "dspark": "DSparkSpeculator",
        "domino": "DominoDraftModel",
        "dflash2": "DFlash2DraftModel",
    }
    config = {
        "architectures": [names.get(kind, "DFlashSpeculator")],
        "speculators_model_type": kind,
        "transformer_layer_config": layers,
        "draft_vocab_size": len(kept),
        "block_size": layers.pop("block_size"),
        "aux_hidden_state_layer_ids": taps,
        "target_hidden_size": None,
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": not is_causal,
        **own,
        **options,
    }
    return Checkpoint(checkpoint.name, checkpoint.path, config, tensors)


def _matrix(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return random.standard_normal((rows, columns), np.float32) * columns**-0.5


def _vector(random: np.random.Generator, size: int) -> np.ndarray:
    return 0.1 * random.standard_normal(size, np.float32)


def _layer_tensors(random: np.random.Generator, name: str, hidden: int) -> dict[str, np.ndarray]:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return {
        f"{attention}.q_proj.weight": _matrix(random, hidden, hidden),
        f"{attention}.k_proj.weight": _matrix(random, hidden, hidden),
        f"{attention}.v_proj.weight": _matrix(random, hidden, hidden),
        f"{attention}.o_proj.weight": 0.5 * _matrix(random, hidden, hidden),
        f"{attention}.q_norm.weight": 2 + _vector(random, hidden // _HEADS),
        f"{attention}.k_norm.weight": 1 + _vector(random, hidden // _HEADS),
        f"{mlp}.gate_proj.weight": _matrix(random, 2 * hidden, hidden),
        f"{mlp}.up_proj.weight": _matrix(random, 2 * hidden, hidden),
        f"{mlp}.down_proj.weight": 0.5 * _matrix(random, hidden, 2 * hidden),
        f"{name}.input_layernorm.weight": 1 + _vector(random, hidden),
        f"{name}.post_attention_layernorm.weight": 1 + _vector(random, hidden),
    }
