"""Encoders and embedding models in GGUF files: their configs, poolings and classifiers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from anydecode.errors import CheckpointError
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.models.limits import MAX_COUNT, MAX_EXPERTS, refusal
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.loading.gguf_keys import Keys
from anydecode.models.loading.lazy import Reader
from anydecode.models.pooling import DenseModule, Pooling

#: The poolings by their numbers in `pooling_type`. 0 is none.
POOLINGS = {1: "mean", 2: "cls", 3: "last"}
#: The number of a classifier's.
RANK = 4
_OTHER_POOLINGS = (0, RANK)
#: The dense modules behind the pooling.
_DENSE = ("dense_2", "dense_3")
#: The tensors of classifiers, by the names that `models.classification` reads.
CLASSIFIER = {"cls": "dense", "cls.norm": "norm", "cls.output": "output"}
#: The labels of the two rows of a Qwen3-Reranker's classifier.
_ANSWERS = ["yes", "no"]


def bert(keys: Keys, config: dict[str, Any]) -> None:
    """BERT, RoBERTa, XLM-RoBERTa and DistilBERT, whose files store position embeddings from that of
    the first position on, and Jina's third model."""
    tensors = keys.file.tensors
    config["hidden_act"] = "gelu"
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    _segments(keys, config)


def nomic_bert(keys: Keys, config: dict[str, Any]) -> None:
    """Nomic BERT."""
    _segments(keys, config)


def nomic_bert_moe(keys: Keys, config: dict[str, Any]) -> None:
    """Nomic BERT with experts in one of every `moe_every_n_layers` layers."""
    _segments(keys, config)
    config["hidden_act"] = "gelu"
    config["mlp_bias"] = "blk.0.ffn_up.bias" in keys.file.tensors
    config["num_experts"] = keys.count("expert_count", high=MAX_EXPERTS)
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    every = keys.count("moe_every_n_layers")
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [layer for layer in layers if layer % every != 1]


def jina_bert(keys: Keys, config: dict[str, Any]) -> None:
    """Jina BERT. Old files have a matrix of gates, others have its rows before those of up."""
    tensors = keys.file.tensors
    for name in ("blk.0.attn_q_norm.weight", "blk.0.attn_norm_2.weight"):
        if name in tensors:
            raise CheckpointError(
                f"{keys.file.path}: tensor {name!r} is one of jina-embeddings-v2-base-code, whose"
                " additional norms are not supported"
            )
    _segments(keys, config)
    config["hidden_act"] = "gelu"
    config["has_gate_up"] = "blk.0.ffn_gate.weight" not in tensors


def modern_bert(keys: Keys, config: dict[str, Any]) -> None:
    """ModernBERT: full attention in the first of every `sliding_window_pattern` layers."""
    key = "attention.sliding_window_pattern"
    period, count = keys.get(key, 3), config["num_hidden_layers"]
    if isinstance(period, list):  # whether each layer has a window
        has_window = [bool(entry) for entry in period]
    else:
        step = keys.count(key, 3)
        has_window = [layer % step != 0 for layer in range(count)]
    config["layer_types"] = [
        "sliding_attention" if windowed else "full_attention" for windowed in has_window
    ]
    # A token attends to as many tokens on each side as half the window, and to itself.
    config["sliding_window"] = keys.count("attention.sliding_window", 128) // 2 + 1
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": keys.number("rope.freq_base", 160_000.0)},
        "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
    }
    config["hidden_activation"] = keys.get("hidden_activation", "gelu")


def _segments(keys: Keys, config: dict[str, Any]) -> None:
    """The number of token types."""
    types = keys.file.tensors.get("token_types.weight")
    config["type_vocab_size"] = 0 if types is None else types.shape[0]


def pooling_of(keys: Keys) -> Pooling | None:
    """The pooling that a file names; None if it names none.

    Raises:
        CheckpointError: The pooling is unknown, or a dense module has the wrong shape.
    """
    number = keys.get("pooling_type", 0)
    if type(number) is not int or number not in (*POOLINGS, *_OTHER_POOLINGS):
        allowed = f"one of {', '.join(map(str, sorted((*POOLINGS, *_OTHER_POOLINGS))))}"
        raise refusal(keys.name("pooling_type"), number, allowed)
    dense = _dense_modules(keys)
    if number not in POOLINGS:
        return None
    return Pooling(POOLINGS[number], dense=dense)


def _dense_modules(keys: Keys) -> tuple[DenseModule, ...]:
    """The linear maps behind the pooling."""
    file, found = keys.file, []
    size = width = keys.count("embedding_length")
    for name in _DENSE:
        info = file.tensors.get(f"{name}.weight")
        if info is None:
            continue
        bias = file.tensors.get(f"{name}.bias")
        if len(info.shape) != 2 or info.shape[1] != width or info.shape[0] > MAX_COUNT:
            raise CheckpointError(
                f"{file.path}: {info.name!r} has shape {list(info.shape)}; allowed is a matrix of"
                f" {width} inputs"
            )
        width = info.shape[0]
        if bias is not None and bias.shape != (width,):
            raise CheckpointError(
                f"{file.path}: {bias.name!r} has shape {list(bias.shape)}; allowed is [{width}]"
            )
        found.append(
            DenseModule(_plain(file, info.name), None if bias is None else _plain(file, bias.name))
        )
    if width != size:
        raise CheckpointError(
            f"{file.path}: the dense modules have {width} outputs; allowed are {size}, and vectors"
            " of single tokens (late interaction) are not supported"
        )
    return tuple(found)


def is_beside_network(name: str) -> bool:
    """Whether a tensor is that of a dense module or of a classifier."""
    module = name.rpartition(".")[0]
    return module in _DENSE or module in CLASSIFIER


def classifier_of(keys: Keys) -> tuple[dict[str, Any], dict[str, Reader]]:
    """How a file's classifier is used (`classifier` of the config), and its tensors by the names
    that `models.classification` reads; both are empty if it has none.

    Raises:
        CheckpointError: A tensor has the wrong shape.
    """
    file = keys.file
    readers: dict[str, Reader] = {}
    for module, name in CLASSIFIER.items():
        for leaf in ("weight", "bias"):
            if f"{module}.{leaf}" in file.tensors:
                readers[f"classifier.{name}.{leaf}"] = partial(_plain, file, f"{module}.{leaf}")
    if not readers:
        return {}, {}
    if "cls.output.weight" not in file.tensors:  # one matrix, as of jina-reranker-v1
        readers = {name.replace(".dense.", ".output."): read for name, read in readers.items()}
    is_causal = keys.get("attention.causal", True)
    options = {"activation": "tanh", "pooling": "last" if is_causal else "cls"}
    if keys.architecture == "modern-bert":  # llama.cpp pools all states of its rerankers
        options = {"activation": "gelu", "pooling": "mean"}
    info = file.tensors.get("cls.output.weight")
    if info and is_causal and keys.get("classifier.output_labels", None) == _ANSWERS:
        if len(info.shape) != 2 or info.shape[0] != 2:
            raise CheckpointError(
                f"{file.path}: {info.name!r} has shape {list(info.shape)}; allowed are 2 rows, for"
                " yes and no"
            )
        # The probability of "yes" against "no" is the sigmoid of the difference.
        readers = {"classifier.output.weight": partial(_difference, file, info.name)}
        options["prompt"] = "qwen3-reranker"
    return options, readers


def _difference(file: GGUFFile, name: str) -> np.ndarray:
    rows = _plain(file, name)
    return rows[:1] - rows[1:]


def _plain(file: GGUFFile, name: str) -> np.ndarray:
    """A small tensor in float32."""
    tensor = file.read(name)
    if isinstance(tensor, Weight):
        return dequantize(tensor)
    return np.asarray(tensor, np.float32)
