"""A tiny model with random maps of hidden states, at which pseudo states start."""

from __future__ import annotations

from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.tiny import readable_executor, tiny_network
from anydecode.certification.tiny_future import SmallTokenizer, small_future_network
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.hidden_transfer import HiddenTransfer
from anydecode.models.network import Network
from anydecode.models.scripted import ByteTokenizer
from anydecode.models.transformer import Transformer

#: The likely tokens.
LETTERS = list(range(97, 109))
#: How often the token of each pseudo state is the candidate of each rank.
ACCURACIES = np.array([[0.5, 0.2, 0.1], [0.35, 0.3, 0.05], [0.3, 0.1, 0.02]], np.float32)


def transfer_network() -> Network:
    """A random Llama over bytes whose next token depends mostly on the last. 12 letters are likely
    behind every token."""
    network = tiny_network(layers=5, residual=0.25)
    network.weights.embedding.data[:, 0] = 2.0
    network.weights.head.data[LETTERS, 0] += 3.0
    return network


def transfer_maps(network: Network, layers: tuple[int, ...] = (1, 2, 2)) -> HiddenTransfer:
    """Maps, with errors, from the embedding of a letter to those of the letters that follow if the
    layers add nothing, so that they often agree with `transfer_network`."""
    embedding, hidden = network.weights.embedding.data, network.spec.hidden_size
    letters = np.array(LETTERS) % len(embedding)
    states = embedding / np.sqrt((embedding**2).mean(-1, keepdims=True))
    following = (states @ network.weights.head.data.T).argmax(-1)
    inverse, tokens = np.linalg.pinv(embedding[letters].astype(np.float64)), letters
    random, maps = np.random.default_rng(4), []
    for _ in layers:
        tokens = following[tokens]
        error = 0.3 * random.standard_normal((hidden, hidden)) * hidden**-0.5
        maps.append((inverse @ embedding[tokens]).T + error)
    accuracies = ACCURACIES[: len(layers)]
    fingerprint = model_fingerprint(network)
    return HiddenTransfer(np.array(maps, np.float32), layers, accuracies, fingerprint)


def with_maps(network: Network, layers: tuple[int, ...], backend: str | None = None) -> Transformer:
    """The model of `network` with maps at these layers."""
    model = Transformer(network, name="tiny", executor=readable_executor(backend))
    model.hidden_transfer = transfer_maps(network, layers)
    return model


def transfer_model(layers: tuple[int, ...] = (1, 2, 2), **options: Any) -> LLM:
    """An engine over `transfer_network` with maps; `options` are those of `LLM`."""
    model = with_maps(transfer_network(), layers, options.pop("backend", None))
    return LLM(
        model,
        tokenizer=ByteTokenizer(),
        **{"cache_positions": 4096, "drafting": "fixed", **options},
    )


def small_transfer_model() -> LLM:
    """An engine over `small_future_network` with maps."""
    model = with_maps(small_future_network(), (1, 1))
    return LLM(model, tokenizer=SmallTokenizer(), cache_positions=8192)
