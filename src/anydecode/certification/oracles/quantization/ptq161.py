"""Oracle test of ptq161 (arXiv:2502.13179): the format bit by bit, the rule by loops, the learned
scales, the packed kernel, and the loss on tasks with checkable answers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.kernels.formats import dequantize
from anydecode.kernels.interface import Weight
from anydecode.kernels.library import load_library
from anydecode.kernels.packing import Packer
from anydecode.models.families import load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import check_torch
from anydecode.quantization import ptq161
from anydecode.tasks.tasks import TASKS, examples

MODEL = "tiny-autoregressive"
_SHARE = 0.2  # of the inputs that have four bits
_EPOCHS = 4
_TEXTS = 8  # per task
_RESTORED_TEXTS, _HELD_OUT, _STEPS = 16, 4, 60  # per task; windows; steps


def textbook(matrix: np.ndarray, activations: np.ndarray) -> np.ndarray:
    """The dense matrix of the paper before its scales are learned, one number at a time."""
    rows, columns = matrix.shape
    ranked = sorted(range(columns), key=lambda i: (-max(float(activations[i]), 1e-5), i))
    salient = set(ranked[: round(columns * _SHARE)])
    out = np.zeros((rows, columns))
    for o in range(rows):
        others = [float(matrix[o, i]) for i in range(columns) if i not in salient]
        mean = sum(others) / len(others)
        spread = sum(map(abs, others)) / len(others)
        chosen = [float(matrix[o, i]) for i in salient]
        low, high = min(chosen), max(chosen)
        for i in range(columns):
            value = float(matrix[o, i])
            if i in salient:
                step = (high - low) / 15
                out[o, i] = low + step * min(15, max(0, math.floor((value - low) / step + 0.5)))
            else:
                out[o, i] = mean + (spread if value >= mean else -spread)
    return out


def read_bits(weight: Weight) -> np.ndarray:
    """The dense matrix of stored bytes, float64, read bit by bit."""
    assert weight.columns is not None
    scales = weight.columns.astype(np.float64)
    out = np.zeros((weight.out_features, weight.in_features))
    for o, row in enumerate(weight.data):
        spread, mean, step, middle = row[:8].view(np.float16).astype(np.float64)
        bit, nibble = 64, 2 * (8 + -(-int((scales != 0).sum()) // 8))
        for i, scale in enumerate(scales):
            if scale:
                sign = 2 * (int(row[bit // 8]) >> bit % 8 & 1) - 1
                out[o, i] = (sign * spread + mean) * scale
                bit += 1
            else:
                code = int(row[nibble // 2]) >> 4 * (nibble % 2) & 15
                out[o, i] = (2 * code - 15) * step + middle
                nibble += 1
    return out


@oracle_test(ptq161.KEY)
def sub_two_bits() -> Iterator[Check]:
    """The rule, the format, the kernel and the learning."""
    check_torch(f"the certificate of {ptq161.KEY}")
    import torch

    from anydecode.models.ptq161_blocks import Binarized, distance

    draw = np.random.default_rng(4)
    matrix = draw.normal(size=(21, 130)).astype(np.float32)
    activations = draw.uniform(0.1, 9, size=130).astype(np.float32)
    module = Binarized(torch.from_numpy(matrix), torch.from_numpy(activations))
    weight = module.packed("x")
    expected, stored = textbook(matrix, activations), read_bits(weight)
    # Numbers of rows are float16; a code may be rounded the other way where it is half-way.
    error = np.abs(stored - expected) > 3e-3
    yield Check("signs, codes and scales begin as in the paper", error.mean() < 0.002)
    yield Check("bytes mean the dense matrix", np.allclose(dequantize(weight), stored, atol=1e-6))
    bits = 8 * weight.data.shape[1] / 130 - 64 / 130
    yield Check("1.6 bits per weight, and 64 per row", abs(bits - 1.6) < 0.1, f"{bits:.3f}")
    yield from _kernel(weight, stored)

    with torch.no_grad():
        module.output_scale.mul_(torch.linspace(0.5, 2, 21)[:, None])
        module.input_scale.mul_(torch.linspace(0.5, 2, module.input_scale.shape[1]))
    changed, found = read_bits(module.packed("x")), module().detach().double().numpy()
    yield Check("learned scales are stored", np.allclose(changed, found, rtol=0.01, atol=1e-3))
    one, other = draw.normal(size=(2, 5, 7))
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    total = float(np.square(one - other).mean() - np.log(np.abs(cosines)).mean())
    measured = float(distance(torch.from_numpy(one), torch.from_numpy(other)))
    yield Check("the distance has squared errors and angles", abs(measured - total) < 1e-9)
    yield from _learned()
    yield from _restored()


def _kernel(weight: Weight, stored: np.ndarray) -> Iterator[Check]:
    """The packed product against the dense one in float64."""
    library = load_library()
    if library is None:
        yield Check("the packed product is the dense one", None, "needs the native kernels")
        return
    packer = Packer(library, 1)
    packed = packer.pack(weight)
    x = np.random.default_rng(5).normal(size=(7, weight.in_features)).astype(np.float32)

    def product(rows: np.ndarray) -> np.ndarray:
        y = np.zeros((len(rows), weight.out_features), np.float32)
        rows = np.ascontiguousarray(rows)
        reference = ctypes.byref(packed)
        library.linear(reference, rows.ctypes.data, len(rows), None, y.ctypes.data, None)
        return y

    exact, together = x.astype(np.float64) @ stored.T, product(x)
    error = float(np.abs(together - exact).max() / np.abs(exact).max())
    yield Check("the packed product is the dense one", error < 1e-6, f"{error:.1e}")
    parts = np.concatenate([product(x[a:b]) for a, b in ((0, 1), (1, 3), (3, 7))])
    yield Check("rows have the same bits in every batch", np.array_equal(parts, together))


def _learned() -> Iterator[Check]:
    """Learned scales lower the error of the first layer's outputs, which the exact layer has."""
    checkpoint = load_checkpoint(MODEL)
    assert checkpoint.tokenizer is not None
    texts = _texts(2)
    errors = []
    for epochs in (0, _EPOCHS):
        quantized = ptq161.quantize_network(checkpoint, texts, epochs)
        errors.append(_state_error(quantized, texts))
    is_lower = errors[1] < 0.9 * errors[0]
    yield Check("learned scales are closer", is_lower, f"{errors[0]:.4f} {errors[1]:.4f}")


def _restored() -> Iterator[Check]:
    """A low-rank update of the quantised matrices, trained on texts, is what is quantised again:
    other texts of that kind are then predicted better."""
    from anydecode.models import ptq161_blocks

    checkpoint = load_checkpoint(MODEL)
    assert checkpoint.tokenizer is not None
    tokens = ptq161.calibration_tokens(checkpoint.tokenizer, _texts(_RESTORED_TEXTS))
    learned, held_out = tokens[:-_HELD_OUT], tokens[-_HELD_OUT:]
    network = load_network(checkpoint, "float32")
    first = list(ptq161_blocks.quantize_layers(network, learned, 0))
    losses = [_text_loss(network, first, held_out)]
    ptq161_blocks.restore(network, first, learned, _STEPS)
    matrices = [weight for layer in network.weights.layers for weight in layer.matrices]
    ranks = {}
    for weight, stored in zip(matrices, first, strict=True):
        change = weight.data.astype(np.float64) - read_bits(stored)
        ranks[weight.name] = int(np.linalg.matrix_rank(change, 1e-4))
    is_low = (rank == 0 if "o_proj" in name else 0 < rank <= 64 for name, rank in ranks.items())
    detail = f"ranks {sorted(set(ranks.values()))}"
    yield Check("the update has rank 64, and leaves the attention's outputs", all(is_low), detail)
    losses.append(_text_loss(network, [], held_out))
    second = list(ptq161_blocks.quantize_layers(network, learned, 0))
    same = [
        np.mean(_signs(one) == _signs_of(w, one)) for w, one in zip(matrices, second, strict=True)
    ]
    yield Check("its sum with the matrices is quantised", min(same) > 0.999, f"{min(same):.4f}")
    losses.append(_text_loss(network, second, held_out))
    detail = "nats per token: " + ", ".join(f"{loss:.2f}" for loss in losses)
    yield Check("other texts are predicted better", max(losses[1:]) < losses[0] - 0.3, detail)
    once, twice = (
        ptq161.quantize_network(checkpoint, _texts(1), 0, restore=steps) for steps in (0, 2)
    )
    moved = sum(not np.array_equal(once[name].data, twice[name].data) for name in once)
    yield Check("a model is quantised twice", moved > len(once) / 2, f"{moved} matrices")


def _signs(weight: Weight) -> np.ndarray:
    """Whether each number of the columns with signs is above the others' mean of its row."""
    assert weight.columns is not None
    dense = read_bits(weight)[:, weight.columns != 0] / weight.columns[weight.columns != 0]
    return dense > (dense.min(1, keepdims=True) + dense.max(1, keepdims=True)) / 2


def _signs_of(matrix: Weight, stored: Weight) -> np.ndarray:
    """The same of the matrix that is quantised."""
    assert stored.columns is not None
    signed = matrix.data[:, stored.columns != 0].astype(np.float64)
    return signed >= signed.mean(1, keepdims=True)


def _text_loss(network: Network, weights: list[Weight], tokens: np.ndarray) -> float:
    """The mean cross-entropy of texts with these weights, in nats per token."""
    import torch

    from anydecode.kernels.blocks import BlockBackend

    backend = BlockBackend(tokens.shape[1])
    backend.matrices = {weight.name: torch.from_numpy(dequantize(weight)) for weight in weights}
    x = torch.from_numpy(dequantize(network.weights.embedding)[tokens.ravel()])
    with torch.no_grad():
        for index in range(network.spec.num_layers):
            x = network.layer(backend, x, index)
        shares = network.head(backend, x).double().log_softmax(-1).numpy()
    shares = shares.reshape(*tokens.shape, -1)[:, :-1]
    return -float(np.take_along_axis(shares, tokens[:, 1:, None], -1).mean())


def _state_error(quantized: dict[str, Weight], texts: list[str]) -> float:
    """The mean squared error of the last layer's states."""
    import torch

    from anydecode.kernels.blocks import BlockBackend

    checkpoint = load_checkpoint(MODEL)
    assert checkpoint.tokenizer is not None
    network = load_network(checkpoint, "float32")
    tokens = ptq161.calibration_tokens(checkpoint.tokenizer, texts)
    states = []
    for matrices in ({}, {name: torch.from_numpy(dequantize(w)) for name, w in quantized.items()}):
        backend = BlockBackend(tokens.shape[1])
        backend.matrices = matrices
        x = torch.from_numpy(dequantize(network.weights.embedding)[tokens.ravel()])
        for index in range(network.spec.num_layers):
            x = network.layer(backend, x, index)
        states.append(x.detach().numpy())
    return float(np.square(states[0] - states[1]).mean())


def _texts(count: int) -> list[str]:
    learned = (examples(task, count, seed=7, held_out=False) for task in TASKS)
    return [f"{one.prompt}{one.answer}" for task in learned for one in task]


@cache
def nats(epochs: int | None, samples: int) -> float:
    """The cross-entropy of the answers of held-out questions, in nats per token; None: of the model
    as it is."""
    questions = [
        (one.prompt, one.answer)
        for task in TASKS
        for one in examples(task, samples // len(TASKS), seed=7)
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "texts.txt"
        path.write_text("\n\n".join(_texts(_TEXTS)))
        dtype = None if epochs is None else ptq161.ptq161(path, epochs)
        with LLM(MODEL, dtype=dtype, threads=1) as llm:
            results = llm.scores(questions)
    total = sum(result.total for result in results)
    return -total / sum(len(result.tokens) for result in results)


@measure(ptq161.KEY, "nats lost per token", samples=128, margin=0.8)
def lost(samples: int) -> float:
    """The paper reports perplexity: its logarithm is this loss."""
    return nats(_EPOCHS, samples) - nats(None, samples)


@measure(ptq161.KEY, "nats per token over scales that are not learned", samples=128, margin=-0.1)
def lost_without_learning(samples: int) -> float:
    """Learned scales have to be better."""
    return nats(_EPOCHS, samples) - nats(0, samples)
