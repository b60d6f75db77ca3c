"""Tiny random checkpoints of diffusion models in their published layouts, and a forward pass of
them in plain torch that shares no code with the package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file

from anydecode import LLM
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import BlockCausalCache, NoCache
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.scoring.sequence import Sequence

#: The vocabulary, and the mask token.
V, MASK = 64, 61
#: The sizes of all checkpoints.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": V,
    "max_position_embeddings": 128,
}
#: The keys that all layouts of Qwen's kind have.
LAYERS: dict[str, Any] = {
    **SIZES,
    "eos_token_id": 60,
    "hidden_act": "silu",
    "mask_token_id": MASK,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}

#: Roles of tensors, and their names in the Hugging Face layout of Qwen.
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "n1": "input_layernorm",
    "n2": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "bias": "mlp.expert_bias",
    "expert": "mlp.experts.{}.",
    "shared": "mlp.shared_experts.",
}
#: Their names in the layout of LLaDA.
LLADA_NAMES = {
    "embed": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.{}.",
    "n1": "attn_norm",
    "n2": "ff_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}

Router = Callable[[torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass
class Tiny:
    """A tiny checkpoint of a family.

    Attributes:
        config: Its config.json: the published keys with small sizes.
        block: The size of the blocks in which its rows see each other; None: all see all.
        has_causal_context: Whether rows before the block that is being filled see what is before
            them only, and blocks are counted from the end of the prompt.
        has_prompt_block: Whether the prompt is one block, and the others are counted from its end.
        shift: 1 if row r predicts position r + 1.
        mask_text: The mask token in its tokenizer.
        names: The names of tensors that differ from `NAMES`.
        biases: Whether q, k and v have biases.
        qk_norm: Whether queries and keys are normed.
        fused: The name of a matrix that holds q, k and v, in this order.
        rotary: How many numbers of a head rotate; None: all.
        experts: The number of experts; 0 for none.
        inner: The inner size of an expert.
        router: From the router's logits `[rows, experts]`, and the biases of experts if there are
            some, to the weight of each expert.
        has_bias: Whether experts have biases.
        dense: The layers without experts.
        shared: The inner size of the shared expert; 0 for none.
        query_factor: A factor of the queries by position.
        frequencies: Of the rotary embedding; None: powers of the config's theta.
        decoder: The published decoder; None: that of all models with such rows.
    """

    config: dict[str, Any]
    block: int | None = None
    has_causal_context: bool = False
    has_prompt_block: bool = False
    shift: int = 0
    mask_text: str = "<|mask|>"
    names: Mapping[str, str] = field(default_factory=dict)
    biases: bool = False
    qk_norm: bool = False
    fused: str | None = None
    rotary: int | None = None
    experts: int = 0
    inner: int = 24
    router: Router | None = None
    has_bias: bool = False
    dense: tuple[int, ...] = ()
    shared: int = 0
    query_factor: Callable[[torch.Tensor], torch.Tensor] | None = None
    frequencies: torch.Tensor | None = None
    decoder: str | None = None

    def name(self, role: str, layer: int | None = None) -> str:
        """The name of a tensor without its suffix."""
        prefix = "" if layer is None else self._named("layer").format(layer)
        return prefix + self._named(role)

    def _named(self, role: str) -> str:
        return self.names.get(role, NAMES[role])


def write(tiny: Tiny, folder: Path, seed: int = 3) -> dict[str, torch.Tensor]:
    """Write a random checkpoint, and return its tensors."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = SIZES["hidden_size"], SIZES["head_dim"]
    heads, kv = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    wide = SIZES["intermediate_size"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.35

    tensors = {f"{tiny.name('embed')}.weight": random(V, hidden) * 2}
    tensors[f"{tiny.name('norm')}.weight"] = 1 + random(hidden)
    if not tiny.config.get("tie_word_embeddings"):
        tensors[f"{tiny.name('head')}.weight"] = random(V, hidden)

    def add_mlp(prefix: str, inner: int) -> None:
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
            tensors[f"{prefix}{part}_proj.weight"] = random(*shape)
        tensors[f"{prefix}down_proj.weight"] = random(hidden, inner)

    for layer in range(SIZES["num_hidden_layers"]):
        sizes = {"q": heads * head, "k": kv * head, "v": kv * head}
        if tiny.fused:
            prefix = tiny.name("layer").format(layer)
            tensors[f"{prefix}{tiny.fused}.weight"] = random(sum(sizes.values()), hidden)
        else:
            for part, size in sizes.items():
                tensors[f"{tiny.name(part, layer)}.weight"] = random(size, hidden)
                if tiny.biases:
                    tensors[f"{tiny.name(part, layer)}.bias"] = random(size)
        tensors[f"{tiny.name('o', layer)}.weight"] = random(hidden, heads * head)
        for norm in ("n1", "n2"):
            tensors[f"{tiny.name(norm, layer)}.weight"] = 1 + random(hidden)
        if tiny.qk_norm:
            for norm in ("q_norm", "k_norm"):
                tensors[f"{tiny.name(norm, layer)}.weight"] = 1 + random(head)
        if tiny.experts and layer not in tiny.dense:
            tensors[f"{tiny.name('router', layer)}.weight"] = random(tiny.experts, hidden) * 2
            if tiny.has_bias:
                tensors[tiny.name("bias", layer)] = random(tiny.experts)
            for expert in range(tiny.experts):
                add_mlp(tiny.name("expert", layer).format(expert), tiny.inner)
            if tiny.shared:
                add_mlp(tiny.name("shared", layer), tiny.shared)
        else:
            for part, shape in (
                ("gate", (wide, hidden)),
                ("up", (wide, hidden)),
                ("down", (hidden, wide)),
            ):
                tensors[f"{tiny.name(part, layer)}.weight"] = random(*shape)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny.config))
    write_tokenizer(folder, tiny.mask_text)
    return tensors


def write_tokenizer(folder: Path, mask_text: str) -> None:
    """Write a tokenizer.json whose token `MASK` has this text."""
    vocab = {f"w{token}": token for token in range(V) if token != MASK} | {mask_text: MASK}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([mask_text])
    tokenizer.save(str(folder / "tokenizer.json"))


def hidden_positions(tiny: Tiny, tokens: Any, prompt: int) -> torch.Tensor:
    """Which positions each row does not see, bool `[rows, positions]`; the prompt has `prompt`
    tokens."""
    starts_at_end = tiny.has_causal_context or tiny.has_prompt_block
    at, origin = torch.arange(len(tokens)), prompt if starts_at_end else 0
    block = (at - origin).div(tiny.block or len(tokens), rounding_mode="floor")
    if tiny.has_prompt_block:
        block = block.clamp(min=-1)
    hidden = block[:, None] < block[None, :]
    if tiny.has_causal_context:
        assert tiny.block is not None
        first = [int(token) for token in tokens].index(MASK)
        start = origin + (first - origin) // tiny.block * tiny.block
        hidden[:start] = at[:start, None] < at
    return hidden


def forward(
    tiny: Tiny, tensors: dict[str, torch.Tensor], tokens: Any, prompt: int = 0
) -> torch.Tensor:
    """The logits of all rows of a canvas, float64 `[rows, vocab]`."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    config, silu = tiny.config, torch.nn.functional.silu
    head, heads, kv = (
        SIZES[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    eps, count = config["rms_norm_eps"], len(tokens)
    at = torch.arange(count)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def mlp(x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = linear(x, f"{prefix}gate_proj"), linear(x, f"{prefix}up_proj")
        return linear(silu(gate) * up, f"{prefix}down_proj")

    rotary = tiny.rotary or head
    frequencies = tiny.frequencies
    if frequencies is None:
        steps = torch.arange(0, rotary, 2).double() / rotary
        frequencies = float(config["rope_theta"]) ** -steps
    angles = at[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        turned = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat([*turned, x[..., rotary:]], -1)

    hidden = hidden_positions(tiny, tokens, prompt)
    x = weights[f"{tiny.name('embed')}.weight"][torch.tensor([int(token) for token in tokens])]
    for layer in range(SIZES["num_hidden_layers"]):
        y = norm(x, tiny.name("n1", layer))
        if tiny.fused:
            whole = linear(y, tiny.name("layer").format(layer) + tiny.fused)
            q, k, v = torch.split(whole, [heads * head, kv * head, kv * head], -1)
        else:
            q, k, v = (linear(y, tiny.name(part, layer)) for part in "qkv")
        q, k, v = q.view(count, heads, head), k.view(count, kv, head), v.view(count, kv, head)
        if tiny.qk_norm:
            q, k = norm(q, tiny.name("q_norm", layer)), norm(k, tiny.name("k_norm", layer))
        q, k = rotated(q), rotated(k)
        if tiny.query_factor is not None:
            q = q * tiny.query_factor(at)[:, None, None]
        k, v = (part.repeat_interleave(heads // kv, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / head**0.5
        attention = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", attention, v).flatten(1)
        x = x + linear(mixed, tiny.name("o", layer))
        y = norm(x, tiny.name("n2", layer))
        if tiny.experts and layer not in tiny.dense:
            assert tiny.router is not None
            bias = weights.get(tiny.name("bias", layer))
            shares = tiny.router(linear(y, tiny.name("router", layer)), bias)
            prefixes = [tiny.name("expert", layer).format(e) for e in range(tiny.experts)]
            outputs = torch.stack([mlp(y, prefix) for prefix in prefixes], 1)
            z = (shares[..., None] * outputs).sum(1)
            if tiny.shared:
                z = z + mlp(y, tiny.name("shared", layer))
        else:
            gate, up = linear(y, tiny.name("gate", layer)), linear(y, tiny.name("up", layer))
            z = linear(silu(gate) * up, tiny.name("down", layer))
        x = x + z
    name = tiny.name("embed" if config.get("tie_word_embeddings") else "head")
    return norm(x, tiny.name("norm")) @ weights[f"{name}.weight"].T


class RecordingDenoiser(Denoiser):
    """Records the canvas and the logits by position of every pass."""

    passes: list[tuple[np.ndarray, dict[int, np.ndarray]]]

    def banned(self, sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
        return ()

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        logits = {int(p): predictions.logits(p).copy() for p in predictions.positions}
        self.passes.append((canvas.tokens.copy(), logits))
        super().unmask_step(sequence, canvas, predictions)


def recorded(
    folder: Path, prompt: list[int], backend: str = "torch", length: int = 9, **options: Any
) -> list[tuple[np.ndarray, dict[int, np.ndarray]]]:
    """The passes of the checkpoint in `folder`, with the cache that its blocks allow."""
    with LLM(str(folder), cache_positions=256, backend=backend, threads=1, **options) as llm:
        spec = llm.model.spec
        cache = BlockCausalCache() if spec.block_size else NoCache()
        recorder = RecordingDenoiser(FixedBlocks(0), unmask=TopKUnmasking(2), cache=cache)
        recorder.passes = []
        llm.generate(prompt, decoder=recorder, max_tokens=length, ignore_eos=True)
    return recorder.passes


def largest_difference(
    tiny: Tiny,
    tensors: dict[str, torch.Tensor],
    passes: list[tuple[np.ndarray, dict[int, np.ndarray]]],
    prompt: int = 0,
) -> float:
    """The largest difference of the recorded logits from those of `forward`."""
    largest = 0.0
    for tokens, logits in passes:
        reference = forward(tiny, tensors, tokens, prompt).numpy()
        for position, row in logits.items():
            difference = np.abs(row - reference[position - tiny.shift])
            largest = max(largest, float(np.delete(difference, MASK).max()))
    return largest


def assert_decodes_as_published(tiny: Tiny, folder: Path, **options: Any) -> None:
    """Check every pass of a few prompts, on both backends, against `forward`, and that the default
    decoder of the model ends."""
    from anydecode.kernels.library import load_library

    tensors = write(tiny, folder)
    block = tiny.block or 4
    lengths = {block, block + 1, 2 * block - 1}
    backends = ["torch", "native"] if load_library() is not None else ["torch"]
    for number, length in enumerate(sorted(lengths)):
        prompt = [(7 * index + 3) % (MASK - 1) for index in range(length)]
        backend = backends[number % len(backends)]
        passes = recorded(folder, prompt, backend, **options)
        difference = largest_difference(tiny, tensors, passes, length)
        assert passes and difference < 2e-4, (length, backend)
    with LLM(str(folder), cache_positions=256, threads=1, **options) as llm:
        spec = llm.model.spec
        assert (spec.block_size, spec.logit_shift, spec.causal) == (tiny.block, tiny.shift, False)
        assert llm.tokenizer.mask_id == MASK
        decoder = "sdar" if tiny.block else "dream" if tiny.shift else "llada"
        assert llm.default_decoder == (tiny.decoder or decoder)
        answer = llm.generate([5, 6, 7], max_tokens=6, ignore_eos=True)
        assert len(answer.tokens) == 6 and MASK not in answer.tokens


def softmax_router(count: int, normalise: bool) -> Router:
    """The `count` largest of a softmax over all experts."""

    def route(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scores = logits.softmax(-1)
        best = scores.topk(count, -1)
        values = best.values / best.values.sum(-1, keepdim=True) if normalise else best.values
        return torch.zeros_like(scores).scatter(-1, best.indices, values)

    return route
