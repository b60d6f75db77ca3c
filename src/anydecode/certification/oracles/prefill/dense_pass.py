"""A dense forward pass over a prompt, and what the cache of an engine holds after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, Restarts
from anydecode.certification.oracles.transformer import gated_mlp, rms_norm, rotate, softmax
from anydecode.certification.tiny import tiny_model
from anydecode.decoders.prefill.prefilled import Prefilled
from anydecode.memory.sequence_cache import SequenceCache
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds

DEPTH = 6


TEXT = "it was the best of times, it was the worst of times, it was the age of wisdom"


def deep_model() -> Transformer:
    return tiny_model(layers=DEPTH)


def open_llm(model: Transformer) -> LLM:
    return LLM(model, tokenizer=ByteTokenizer(), cache_positions=1024)


def dense_pass(model: Transformer, rows: np.ndarray, seen: dict[int, np.ndarray]) -> Any:
    """A plain forward pass in float64 over the embeddings `rows`. Returns, per layer, the input
    states, the keys and values `[positions, kv_heads, head_dim]`, and the attention `[heads,
    queries, keys]`. Layer l computes only the positions `seen[l]`."""
    weights, spec = model.network.weights, model.spec
    states, keys, values, shares = [], [], [], []
    state, positions = rows.astype(np.float64), np.arange(len(rows))
    for index, layer in enumerate(weights.layers):
        here = np.isin(positions, seen[index])
        state, positions = state[here], positions[here]
        shape, rope = spec.layers[index].attention, spec.layers[index].rope
        assert rope and shape and layer.query and layer.key and layer.value
        assert layer.output is not None and layer.mlp is not None
        states.append(state)
        y = rms_norm(state, layer.attention_norm, spec.norm_eps)
        q, k, v = (
            (y @ linear.weight.data.T).reshape(len(y), -1, shape.head_dim)
            for linear in (layer.query, layer.key, layer.value)
        )
        q, k = (rotate(x, positions, rope.frequencies) for x in (q, k))
        group = shape.num_heads // shape.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1)) * shape.scale
        share = softmax(np.where(np.triu(np.ones(scores.shape[1:]), 1), -np.inf, scores))
        mixed = np.einsum("hqk,khd->qhd", share, v.repeat(group, 1)).reshape(len(y), -1)
        state = state + mixed @ layer.output.weight.data.T
        state = state + gated_mlp(rms_norm(state, layer.mlp_norm, spec.norm_eps), layer.mlp)
        keys.append(k)
        values.append(v)
        shares.append(share)
    return states, keys, values, shares


def after_prefill(
    model: Transformer, decoder: Prefilled, prompt: str, prompt_embeds: PromptEmbeds | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer the cached keys and values when decoding begins."""
    layers: list[tuple[np.ndarray, np.ndarray]] = []
    inner = decoder.inner.decode

    def recording(sequence: Any) -> Any:
        kv_cache: SequenceCache = sequence.kv_cache()
        slots, cache = kv_cache.table[kv_cache.table >= 0], kv_cache.pool.cache
        layers.extend((k[slots], v[slots]) for k, v in zip(cache.keys, cache.values, strict=True))
        yield from inner(sequence)

    decoder.inner.decode = recording
    with open_llm(model) as llm:
        llm.generate(
            prompt, decoder=decoder, max_tokens=2, ignore_eos=True, prompt_embeds=prompt_embeds
        )
        llm.engine.check_integrity()
    return layers


def prompt_rows(model: Transformer, prompt: str) -> np.ndarray:
    return model.embed(np.array(list(prompt.encode())[:-1])).copy()


def is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return actual.shape == expected.shape and bool(np.abs(actual - expected).max() < 1e-3)


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
