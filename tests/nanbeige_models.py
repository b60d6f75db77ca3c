"""Tiny random models of Nanbeige and Ouro: models of `transformers` that run several times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anydecode.models.checkpoint import Checkpoint
from anydecode.models.scripted import BYTE_VOCABULARY
from tiny_models import checkpoint_of, hf_model


def nanbeige_checkpoint(seed: int = 0, **config: Any) -> Checkpoint:
    """A model with the config keys of the published one."""
    return as_nanbeige(nanbeige_llama(seed), **config)


def nanbeige_llama(seed: int = 0) -> Any:
    """The Llama. With larger matrices, rounding errors would grow in every run."""
    model = hf_model("Llama", seed, vocab_size=BYTE_VOCABULARY, head_dim=16, num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter.data *= 0.5
    return model


def as_nanbeige(model: Any, **config: Any) -> Checkpoint:
    """The checkpoint of a Llama that runs twice."""
    names = {"model_type": "nanbeige", "architectures": ["NanbeigeForCausalLM"]}
    own = {"num_loops": 2, "skip_loop_final_norm": False, "enable_mhc": False}
    return checkpoint_of(model, **{**names, **own, **config})


def ouro_base(seed: int = 0) -> Any:
    """A model with norms on both sides of each sublayer."""
    model = hf_model("HyperCLOVAX", seed, vocab_size=BYTE_VOCABULARY, num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter.data *= 0.5
    return model


def as_ouro(model: Any, **config: Any) -> Checkpoint:
    """The checkpoint of such a model that runs three times, with the config keys of Ouro."""
    sizes = model.config.to_dict()
    names = {"post_norm1": "input_layernorm_2", "post_norm2": "post_attention_layernorm_2"}
    tensors = {}
    for name, tensor in model.state_dict().items():
        for usual, own in names.items():
            name = name.replace(usual, own)
        tensors[name] = tensor.numpy()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    kept += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    own = {key: sizes[key] for key in kept}
    own |= {"model_type": "ouro", "architectures": ["OuroForCausalLM"], "total_ut_steps": 3}
    own |= {"rope_theta": sizes["rope_parameters"]["rope_theta"], "use_sliding_window": False}
    return Checkpoint("ouro", Path("ouro"), {**own, **config}, tensors)


def forward(model: Any, tokens: list[int], loops: int = 2, has_norms: bool = True) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]` of a Llama whose layers run `loops` times, with the final
    norm after each run or after the last alone."""
    import torch

    norm = model.model.norm
    with torch.inference_mode():
        x = model.model.embed_tokens(torch.tensor([tokens]))
        for loop in range(loops):
            is_last = loop == loops - 1
            model.model.norm = norm if has_norms or is_last else torch.nn.Identity()
            x = model.model(inputs_embeds=x).last_hidden_state
        model.model.norm = norm
        found: np.ndarray = model.lm_head(x)[0].numpy()
    return found
