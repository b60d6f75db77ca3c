"""Tiny random models of Nanbeige: a Llama of `transformers` that runs several times."""

from __future__ import annotations

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
