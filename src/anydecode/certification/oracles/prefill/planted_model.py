"""A model for which the premise of prompt pruning holds by construction, and what a method changes
of its next token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.oracles.prefill.dense_pass import DEPTH, open_llm
from anydecode.certification.tiny import readable_executor, tiny_network
from anydecode.decoders.prefill.prefilled import Prefilled
from anydecode.decoders.prefill.quickprefill import QuickPrefill
from anydecode.models.transformer import Transformer
from anydecode.scoring.prompt_embeds import PromptEmbeds


def _planted_model() -> Transformer:
    """A model for which the papers' premise holds by construction: all heads attend less to
    lower-case letters, whose keys have larger norms. No layer overwrites the dimensions that encode
    this."""
    network = tiny_network(layers=DEPTH)
    weights, size = network.weights, 16
    table = weights.embedding.data
    table[:, 0], table[:, 1] = 0.0, 4.0
    table[97:123, 0] = 4.0
    slow = size // 2 - 1  # per head, the dimension with the lowest rotary frequency
    for layer in weights.layers:
        assert layer.output and layer.query and layer.key
        layer.output.weight.data[:2] = 0.0
        layer.mlp.down.weight.data[:2] = 0.0  # type: ignore[union-attr]
        for matrix, source, factor in ((layer.key, 0, -2.0), (layer.query, 1, 2.0)):
            rows = matrix.weight.data.reshape(-1, size, matrix.weight.in_features)
            rows[:, slow] = 0.0
            rows[:, slow, source] = factor
    return Transformer(network, executor=readable_executor())


def distance(decoder: Callable[[], Prefilled], samples: int, media: bool = False) -> float:
    """The mean total variation distance between the next-token distributions of the pruned and the
    whole prompt. Capitals come in runs of ten; a third of the embeddings are like capitals."""
    moved, random = 0.0, np.random.default_rng(7)
    with open_llm(_planted_model()) as llm:
        for _ in range(samples):
            capitals = np.repeat(random.random(15) < 1 / 3, 10)
            prompt = random.integers(97, 123, 150) - 32 * capitals
            rows = random.normal(size=(100, 64)).astype(np.float32)
            rows[:, 0], rows[:, 1] = 4.0 * (random.random(100) < 2 / 3), 4.0
            prompt_embeds = PromptEmbeds(10, rows) if media else None
            whole, thinned = (
                _next_distribution(llm, prompt.tolist(), method, prompt_embeds)
                for method in (QuickPrefill(keep=1.0), decoder())
            )
            moved += 0.5 * float(np.abs(whole - thinned).sum())
    return moved / samples


def _next_distribution(
    llm: LLM, prompt: list[int], method: Prefilled, prompt_embeds: PromptEmbeds | None
) -> np.ndarray:
    """The distribution of the token after `prompt`."""
    seen: list[np.ndarray] = []
    request = llm.request(
        prompt, decoder=method, max_tokens=1, logprobs=0, prompt_embeds=prompt_embeds
    )
    request.jobs[0].sequence.compute_logprobs = lambda logits, *_: seen.append(logits.astype(float))
    llm._run([request])
    weights = np.exp(seen[0] - seen[0].max())
    shares: np.ndarray = weights / weights.sum()
    return shares
