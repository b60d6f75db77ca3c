"""Tiny random models of `transformers`, the same models in anydecode, and rows to run them on."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anydecode.kernels.host import to_host
from anydecode.kernels.interface import OutputSpec, Rows
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model
from anydecode.models.loading import gpt
from anydecode.models.opening import torch_executor
from anydecode.models.transformer import Transformer

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: The sizes of latent attention (DeepSeek).
LATENT_SIZES = {
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
#: LongCat-Flash of two layers of two halves each.
LONGCAT_SIZES = {
    **LATENT_SIZES,
    "num_layers": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": LATENT_SIZES["qk_rope_head_dim"],
    "n_routed_experts": 6,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "expert_ffn_hidden_size": 24,
}
#: Prompts with repeated text, for drafts, and with common beginnings, for caches.
PROMPTS = [
    "the cat sat on the mat, the cat sat on the mat, the cat sat on",
    "the cat sat on the mat, the dog",
    "abcabcabcabc",
    "one two three one two three one two",
]


def hf_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A random float32 model of `transformers`; `family` is the prefix of its classes.

    Norm weights and biases are random too: their initial ones and zeros would hide errors.
    The test is skipped without torch and `transformers`.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # With matrices this small, synchronisation of threads takes longer than the work.
    torch.set_num_threads(1)
    text = getattr(transformers, f"{family}TextConfig", None)
    config_class = text or getattr(transformers, f"{family}Config")
    # A configuration changes the dictionaries that it is given.
    config = config_class(**{**BASE, "attn_implementation": "eager", **deepcopy(settings)})
    torch.manual_seed(seed)
    suffix = "LMHeadModel" if family in ("GPT2", "OpenAIGPT") else "ForCausalLM"
    causal = getattr(transformers, f"{family}{suffix}", None)
    model = (_with_head(family, config) if causal is None else causal(config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "_proj" in name or ".gate." in name or "_compress_" in name:
                torch.nn.init.normal_(parameter, std=0.25)
            elif "rg_lru" in name or "conv_1d" in name or "ple.conv1d" in name:
                torch.nn.init.normal_(parameter, std=0.5)
            elif name.endswith("position_bias"):
                torch.nn.init.normal_(parameter, std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar", "alpha")):
                buffer.add_(torch.randn_like(buffer) * 0.2)
            elif name.endswith("tid2eid"):  # without repetition
                scores = torch.rand(len(buffer), config.num_local_experts)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)
    return model


def _with_head(family: str, config: Any) -> Any:
    """The language model of a multimodal model that `transformers` has no class of its own for,
    with its head."""
    import torch
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class WithHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.model = getattr(transformers, f"{family}TextModel")(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            torch.nn.init.normal_(self.lm_head.weight, std=config.initializer_range)

        def forward(self, tokens: Any, **options: Any) -> Any:
            found = self.model(tokens, **options)
            logits = self.lm_head(found.last_hidden_state) * getattr(
                config, "output_multiplier", 1.0
            )
            cap = getattr(config, "final_logit_softcapping", None)
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)

    return WithHead()


def hf_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits float32 `[len(tokens), vocab_size]` of a model of `transformers`."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def checkpoint_of(model: Any, **config: Any) -> Checkpoint:
    """The checkpoint that a loader would return: the model's config and weights."""
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    merged = {**model.config.to_dict(), **config}
    if gpt.is_gpt(merged):
        readers = {name: partial(tensors.get, name) for name in tensors}
        merged, converted = gpt.to_hf_layout(merged, readers)
        tensors = {name: reader() for name, reader in converted.items()}
    return Checkpoint("tiny", Path("tiny"), merged, tensors)


def with_fused_qkv(tensors: Mapping[str, np.ndarray], shards: int) -> dict[str, np.ndarray]:
    """The tensors with queries, keys and values in one matrix, as MiMo-V2.5 stores them: some rows
    of each, one after the other, in each of `shards` equal parts."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith("q_proj.weight"):
            parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            split = zip(*(np.split(part, shards) for part in parts), strict=True)
            rows = [part for shard in split for part in shard]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(rows)
    return found


def own_model(model: Any, dtype: str | None = None, **options: Any) -> Transformer:
    """The same model in anydecode, in torch unless `executor` is given."""
    return built(checkpoint_of(model), dtype, **options)


def built(checkpoint: Checkpoint, dtype: str | None = None, **options: Any) -> Transformer:
    """The model of a checkpoint, in torch unless `executor` is given."""
    executor = options.pop("executor", None) or torch_executor()
    return build_model(checkpoint, dtype, executor=executor, **options)


def chain(tokens: list[int], first: int = 0, slots: np.ndarray | None = None) -> Rows:
    """Rows of one sequence from position `first` on; `slots` has the slots of all its positions."""
    count = len(tokens)
    table = np.arange(first + count, dtype=np.int32) if slots is None else slots.astype(np.int32)
    return make_rows(
        tokens,
        range(first, first + count),
        table[first : first + count],
        [table],
        [0] * count,
        range(first + 1, first + count + 1),
    )


def make_rows(
    tokens: Any,
    positions: Any,
    slots: Any,
    tables: list[np.ndarray],
    table: Any,
    prefix: Any,
    tails: list[list[int]] | None = None,
    layers: tuple[int, int] | None = None,
) -> Rows:
    """Rows from plain lists; `tails` has one list of slots per row.

    Without `layers`, rows start at layer 0, and `whole` sets their last layer.
    """

    def ints(values: Any) -> np.ndarray:
        return np.array(list(values), np.int32)

    tails = tails if tails is not None else [[] for _ in tokens]
    lengths = ints(len(tail) for tail in tails)
    start, stop = layers or (0, -1)
    return Rows(
        tokens=ints(tokens),
        positions=ints(positions),
        slots=ints(slots),
        tables=[np.ascontiguousarray(t, np.int32) for t in tables],
        table=ints(table),
        prefix=ints(prefix),
        tails=ints(slot for tail in tails for slot in tail),
        tail_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        tail_length=lengths,
        start=ints([start] * len(tokens)),
        stop=ints([stop] * len(tokens)),
    )


def whole(rows: Rows, model: Transformer) -> Rows:
    """The rows, set to run through all layers."""
    rows.start[:] = 0
    rows.stop[:] = model.spec.num_layers
    return rows


def logits(model: Transformer, rows: Rows, cache: Any = None) -> np.ndarray:
    """Logits of every row, through all layers."""
    cache = cache if cache is not None else model.new_cache(256)
    output_spec = OutputSpec(np.arange(len(rows), dtype=np.int32))
    return to_host(model.run(whole(rows, model), cache, output_spec).logits).copy()


def greedy(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Generate `count` greedy tokens after `prompt`."""
    cache, tokens = model.new_cache(len(prompt) + count), list(prompt)
    step, first = prompt, 0
    for _ in range(count):
        row = logits(model, chain(step, first), cache)[-1]
        first += len(step)
        step = [int(row.argmax())]
        tokens += step
    return tokens[len(prompt) :]
