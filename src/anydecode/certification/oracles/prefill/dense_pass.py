"""A dense forward pass over a prompt, and what the cache of an engine holds after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, Restarts
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.prefilled import Prefilled
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds

DEPTH = 6


TEXT = "it was the best of times, it was the worst of times, it was the age of wisdom"


def deep_model() -> Transformer:
    return tiny_model(layers=DEPTH, backend="torch")


def open_llm(model: Transformer) -> LLM:
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024)


def dense_pass(model: Transformer, rows: torch.Tensor, seen: dict[int, torch.Tensor]) -> Any:
    """A plain forward pass over the embeddings `rows`. Returns, per layer, the input states, the
    keys and values `[positions, kv_heads, head_dim]`, and the attention `[heads, queries, keys]`.
    Layer l computes only the positions `seen[l]`."""
    weights, spec = model.network.weights, model.spec
    states, keys, values, shares = [], [], [], []
    state, positions = rows, torch.arange(len(rows))
    for index, layer in enumerate(weights.layers):
        here = torch.isin(positions, seen[index])
        state, positions = state[here], positions[here]
        shape, rope = spec.layers[index].attention, spec.layers[index].rope
        assert rope is not None and layer.attention_norm is not None and layer.mlp_norm is not None

        def rotated(x: torch.Tensor, heads: int, at: torch.Tensor = positions) -> torch.Tensor:
            x = x.view(len(x), heads, -1)
            half = x.shape[2] // 2
            angle = (at[:, None] * rope.frequencies)[:, None]  # noqa: B023
            a, b = x[..., :half], x[..., half:]
            return torch.cat(
                [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 2
            )

        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).mean(1, keepdim=True) + spec.norm_eps).sqrt() * weight

        states.append(state)
        y = normed(state, layer.attention_norm)
        q = rotated(y @ layer.query.weight.data.T, shape.num_heads)
        k = rotated(y @ layer.key.weight.data.T, shape.num_kv_heads)
        v = (y @ layer.value.weight.data.T).view(len(y), shape.num_kv_heads, -1)
        group = shape.num_heads // shape.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * shape.scale
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        share = scores.masked_fill(hidden, -torch.inf).softmax(2)
        mixed = torch.einsum("hqk,khd->qhd", share, v.repeat_interleave(group, 1)).flatten(1)
        state = state + mixed @ layer.output.weight.data.T
        y, mlp = normed(state, layer.mlp_norm), layer.mlp
        gate, up = y @ mlp.gate.weight.data.T, y @ mlp.up.weight.data.T  # type: ignore[union-attr]
        state = state + (torch.nn.functional.silu(gate) * up) @ mlp.down.weight.data.T  # type: ignore[union-attr]
        keys.append(k)
        values.append(v)
        shares.append(share)
    return states, keys, values, shares


def after_prefill(
    model: Transformer, decoder: Prefilled, prompt: str, prompt_embeds: PromptEmbeds | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer the cached keys and values when decoding begins."""
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    inner = decoder.inner.decode

    def recording(sequence: Any) -> Any:
        context: SequenceCache = sequence.context()
        slots = torch.from_numpy(context.table[context.table >= 0].astype(np.int64))
        cache = context.pool.cache
        layers.extend((k[slots], v[slots]) for k, v in zip(cache.keys, cache.values, strict=True))
        yield from inner(sequence)

    decoder.inner.decode = recording  # type: ignore[method-assign]
    with open_llm(model) as llm:
        llm.generate(
            prompt, decoder=decoder, max_tokens=2, ignore_eos=True, prompt_embeds=prompt_embeds
        )
        llm.engine.check_integrity()
    return layers


def prompt_rows(model: Transformer, prompt: str) -> torch.Tensor:
    return model.embed(np.array(list(prompt.encode())[:-1])).clone()


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).abs().max() < 1e-3)


def same_text(decoder: str, prompt_embeds: PromptEmbeds | None = None) -> Iterator[Check]:
    """Checks that the text is the same alone, in a batch, with restarts and with another
    decoder."""
    model = deep_model()
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0.8, "seed": 2, "ignore_eos": True}
    options["prompt_embeds"] = prompt_embeds
    prompts = [TEXT, TEXT[::-1], TEXT[3:] + "abc"]
    with open_llm(model) as llm:
        alone = [llm.generate(p, decoder=decoder, **options).tokens for p in prompts]
    with open_llm(model) as llm, Restarts(llm.engine, seed=4):
        batch = llm.generate(prompts, decoder=decoder, **options)
        drafted = llm.generate(prompts, decoder=f"{decoder},decoder=prompt-lookup", **options)
        llm.engine.check_integrity()
    yield Check("a batch with restarts gives the same text", [one.tokens for one in batch] == alone)
    yield Check("drafting after it gives the same text", [one.tokens for one in drafted] == alone)
