"""PTQ1.61: weights of causal models in 1.61 bits (Zhao et al., arXiv:2502.13179). A fifth of the
input columns, those with the largest activations, have four bits; the others have a sign, and
scales that are learned layer by layer on calibration texts."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.interface import Weight
from anydecode.kernels.ptq161 import FORMAT
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import load_network
from anydecode.models.interface import Model
from anydecode.models.loading import load_checkpoint
from anydecode.models.loading.gguf import matrix_tensors, open_gguf
from anydecode.models.loading.gguf_file import GGUFFile
from anydecode.models.network import Experts, Network
from anydecode.models.opening import WeightFormat, check_torch, open_checkpoint
from anydecode.models.tokenizer import Tokenizer
from anydecode.quantization.gguf import (
    Progress,
    Summary,
    check_source,
    check_target,
    quantize_file,
)
from anydecode.tasks.prompts import PROMPTS

KEY = "ptq161"
#: Tokens per calibration text, and the largest number of texts.
LENGTH, MAX_TEXTS = 128, 128
EPOCHS = 20


def calibration_texts(path: Path | None) -> list[str]:
    """The paragraphs of a file; without one, the package's own prompts.

    Raises:
        InvalidRequestError: The file cannot be read.
    """
    if path is None:
        return [prompt.text for prompt in PROMPTS]
    try:
        content = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from None
    return [part for part in content.split("\n\n") if part.strip()]


def calibration_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Texts one after the other, cut into windows, int64 `[windows, LENGTH]`. A text that is
    shorter than a window is repeated.

    Raises:
        InvalidRequestError: There is no text.
    """
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    if not tokens:
        raise InvalidRequestError("there is no text to calibrate with")
    count = max(1, min(MAX_TEXTS, len(tokens) // LENGTH))
    return np.resize(np.array(tokens, np.int64), (count, LENGTH))


def quantize_network(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    epochs: int = EPOCHS,
    restore: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Weight]:
    """The matrices of the layers of a checkpoint in PTQ161.

    Args:
        checkpoint: A causal model.
        texts: Texts to calibrate with.
        epochs: How often scales are learned from all texts; 0: they stay as they begin.
        restore: Steps of the training that restores the quantised model, after which it is
            quantised again; 0: it is quantised once.
        progress: Called with the layers and steps that are done and those in all.

    Returns:
        The weights by name (`model.layers.0.mlp.up_proj`).

    Raises:
        MissingPackageError: torch is not installed.
        UnsupportedCombinationError: The model is not causal, or has other layers than attention and
            a dense MLP.
    """
    check_torch("calibration with PTQ1.61")
    from anydecode.models import ptq161_blocks

    if checkpoint.tokenizer is None:
        raise InvalidRequestError(f"{checkpoint.name} has no tokenizer for the calibration texts")
    network = load_network(checkpoint, "float32")
    _check_layers(checkpoint, network)
    tokens = calibration_tokens(checkpoint.tokenizer, texts)
    depth = network.spec.num_layers
    total = depth + restore + (depth if restore else 0)

    def quantize(done: int) -> dict[str, Weight]:
        weights = ptq161_blocks.quantize_layers(
            network, tokens, epochs, lambda layers: progress(done + layers, total)
        )
        return {weight.name: weight for weight in weights}

    weights = quantize(0)
    if not restore:
        return weights
    ptq161_blocks.restore(
        network, [*weights.values()], tokens, restore, lambda n: progress(depth + n, total)
    )
    return quantize(depth + restore)


def _check_layers(checkpoint: Checkpoint, network: Network) -> None:
    spec, weights = network.spec, network.weights
    is_plain = spec.causal and spec.num_streams == 1 and weights.per_layer is None
    for shape, layer in zip(spec.layers, weights.layers, strict=True):
        is_plain &= shape.attention is not None and shape.recurrence is None
        is_plain &= shape.cache_layer is None and not isinstance(layer.mlp, Experts)
    if not is_plain:
        raise UnsupportedCombinationError(
            f"{KEY} is for causal models whose layers have attention and a dense MLP;"
            f" {checkpoint.name} has others"
        )
    for layer in weights.layers:
        for weight in layer.matrices:
            if f"{weight.name}.weight" not in checkpoint.tensors:
                raise UnsupportedCombinationError(
                    f"{KEY} cannot quantise {weight.name}, which is part of another tensor"
                )


def quantize_gguf(
    source: Path | GGUFFile,
    target: Path,
    texts: Sequence[str],
    *,
    epochs: int = EPOCHS,
    restore: int = 0,
    overwrite: bool = False,
    threads: int = 1,
    progress: Progress = lambda done, total, name: None,
) -> Summary:
    """Write the model of a GGUF file, or of a folder that is read as one, to another file in
    PTQ161. See `quantize_network` and `quantize_file`; the embedding and the head are written in
    Q6_K, or in Q8_0 if their rows are no multiple of 256."""
    check_target(source.path if isinstance(source, GGUFFile) else source, target, overwrite)
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    check_source(file)
    names = matrix_tensors(file)
    quantized = quantize_network(
        open_gguf(file),
        texts,
        epochs,
        restore,
        lambda done, total: progress(done, total, "layers and steps"),
    )
    given = {}
    for name, weight in quantized.items():
        tensor, order = names[f"{name}.weight"]
        data = np.empty_like(weight.data)
        data[order] = weight.data
        given[tensor] = replace(weight, data=data)
    summary = quantize_file(file, target, "Q6_K", overwrite=overwrite, threads=threads, given=given)
    return replace(summary, format=FORMAT)


@dataclass(frozen=True)
class SubTwoBits(WeightFormat):
    """The format of PTQ1.61, with the texts to calibrate it."""

    texts: Path | None = None
    epochs: int = EPOCHS
    restore: int = 0

    @property
    def dtype(self) -> None:
        return None

    def open(self, model: Any, **options: Any) -> tuple[Model, Tokenizer | None]:
        """As `WeightFormat.open`."""
        if not isinstance(model, str | os.PathLike):
            raise InvalidRequestError(f"{KEY} needs the name or the file of a model")
        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        texts = calibration_texts(self.texts)
        quantized = quantize_network(checkpoint, texts, self.epochs, self.restore)
        tensors: ChainMap[str, np.ndarray | Weight] = ChainMap(
            {f"{name}.weight": weight for name, weight in quantized.items()},
            dict(checkpoint.tensors),
        )
        return open_checkpoint(replace(checkpoint, tensors=tensors), **options)


@register(
    Card(
        KEY,
        "serving",
        paper="PTQ1.61: Push the Real Limit of Extremely Low-Bit Post-Training Quantization Methods"
        " for Large Language Models (arXiv:2502.13179)",
        exactness="lossy",
        use="LLM(model, dtype='ptq161:texts=FILE') or anydecode quantize --format ptq161",
        summary="Weights of causal models in 1.61 bits: four bits for salient input columns, a sign"
        " for the others.",
        needs=("calibration texts", "torch to quantise"),
        works_with=("every decoder", "the native kernels and the torch reference"),
        deviations=(
            "exactly a fifth of the columns, rounded to nearest, is salient; the released code"
            " takes those from the 80 % quantile on",
            "a sign of 0 is 1; in the released code it is 0",
            "packed kernels: the released code simulates. Scales of outputs are float16 and include"
            " the outputs' factor of the rank-one scale; scales of inputs are bfloat16",
            "up to 128 texts of 128 tokens, not 128 of 2,048; the package's own prompts by default",
            "the restorative LoRA (restore=STEPS) is off by default: on few texts, it raised the"
            " loss of a small model's answers. Its learning rate is 1e-3, on the texts of the"
            " calibration; the released code takes 20,000 steps with 1e-4 on RedPajama. As there,"
            " it is merged into the weights of the first quantisation",
            "the embedding and the head are not in this format; models with experts, recurrent"
            " layers, windows, soft caps or latent attention are refused",
        ),
    )
)
def ptq161(texts: str | Path | None = None, epochs: int = EPOCHS, restore: int = 0) -> SubTwoBits:
    """Weights in 1.61 bits.

    Args:
        texts: A file of calibration texts, separated by empty lines; by default the package's own
            prompts.
        epochs: How often the scales of a layer are learned from all texts.
        restore: Steps of the restorative LoRA, after which the model is quantised again; 0: none.
    """
    for name, value in (("epochs", epochs), ("restore", restore)):
        if value < 0:
            raise InvalidRequestError(f"{name} is {value}; allowed are 0 and more")
    return SubTwoBits(None if texts is None else Path(texts), epochs, restore)
