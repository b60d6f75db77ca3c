"""A tiny model with random mask tokens, an adapter for their rows and a head that reads the token
before."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.chi_square import VOCABULARY
from anydecode.certification.tiny import readable_executor, tiny_network
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.future_masks import FutureMasks, SamplerLayer
from anydecode.models.lora import Factors
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer


class SmallTokenizer(ByteTokenizer):
    """The tokenizer of models over five tokens."""

    vocab_size = VOCABULARY


def future_network(*, seed: int = 0) -> Network:
    """A random Llama over bytes whose next token depends mostly on the last. 32 letters are likely
    behind every token and mask."""
    network = tiny_network(layers=4, residual=0.15, seed=seed)
    network.weights.embedding.data[:, 0] = 2.0
    network.weights.head.data[96:128, 0] += 2.0
    return network


def future_masks(network: Network, *, seed: int = 0, count: int = 4) -> FutureMasks:
    """Random masks, an adapter of rank 2 for every matrix, and a head that passes the embedding of
    the token before on, so that it often agrees with `future_network`. The biases are such that
    the activation changes the candidates, but few of them."""
    random = np.random.default_rng(seed + 7)
    hidden = network.spec.hidden_size

    def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) * (spread * columns**-0.5)

    def layer(columns: int) -> SamplerLayer:
        weight = matrix(hidden, columns, 0.3)
        weight[:, :hidden] += np.eye(hidden, dtype=np.float32)
        bias = 3 + 0.1 * matrix(1, hidden)[0]
        return SamplerLayer(weight, bias, 1 + matrix(1, hidden)[0], matrix(1, hidden)[0])

    masks = random.standard_normal((count, hidden), np.float32)
    masks[:, 0] = 2.0
    factors = {
        weight.name: Factors(matrix(2, weight.in_features), matrix(weight.out_features, 2), 0.7)
        for weights in network.weights.layers
        for weight in weights.matrices
    }
    return FutureMasks(masks, layer(2 * hidden), layer(hidden), factors, model_fingerprint(network))


def with_masks(network: Network, backend: str | None = None, **masks: Any) -> Transformer:
    """The model of `network` with the `future_masks` of these options."""
    model = Transformer(network, name="tiny", executor=readable_executor(backend))
    model.future_masks = future_masks(network, **masks)
    return model


def future_model(**options: Any) -> LLM:
    """An engine over `future_network` with masks; `options` are those of `LLM`."""
    model = with_masks(future_network(), options.pop("backend", None))
    return LLM(
        model,
        tokenizer=ByteTokenizer(),
        **{"cache_positions": 4096, "drafting": "fixed", **options},
    )


def small_future_network() -> Network:
    """A network over five tokens whose layers add nothing, so that its logits depend on the last
    token alone."""
    network = tiny_network(residual=0.0, vocabulary=VOCABULARY, seed=2)
    network.weights.head.data *= 0.5
    return network


def small_future_model() -> LLM:
    """An engine over `small_future_network` with masks."""
    model = with_masks(small_future_network())
    return LLM(model, tokenizer=SmallTokenizer(), cache_positions=8192)
