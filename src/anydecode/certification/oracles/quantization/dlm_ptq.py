"""Oracle test of dlm-ptq (arXiv:2604.20079): GPTQ against the textbook recursion, its calibration
data, and the loss of each format on tasks with checkable answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from anydecode.api.llm import LLM
from anydecode.certification import format_loss
from anydecode.certification.checks import Check, measure, oracle_test
from anydecode.certification.oracles.transformer import rms_norm
from anydecode.kernels.formats import dequantize, quantize
from anydecode.models import gptq
from anydecode.models.loading import load_checkpoint
from anydecode.quantization import dlm_ptq
from anydecode.quantization.dlm_ptq import GPTQ
from anydecode.tasks.tasks import TASKS, examples

MODEL = "tiny-diffusion"


_BLOCK = 32


def textbook(matrix: np.ndarray, gram: np.ndarray, damping: float = 0.01) -> np.ndarray:
    """`matrix` quantized by GPTQ, one column at a time: the quantization error is distributed over
    the remaining columns with the inverse of `gram` (x xᵀ of the inputs), from which the column is
    then eliminated."""
    remaining = matrix.astype(np.float64).copy()
    quantized: np.ndarray = np.empty_like(remaining)
    columns = remaining.shape[1]
    inverse = np.linalg.inv(gram + damping * np.mean(np.diag(gram)) * np.eye(columns))
    for column in range(columns):
        if column % _BLOCK == 0:
            block = remaining[:, column : column + _BLOCK]
            largest = block[np.arange(len(block)), np.abs(block).argmax(1)].astype(np.float32)
            scale = (largest / np.float32(-8)).astype(np.float16).astype(np.float64)
        codes = np.clip(np.floor(remaining[:, column] / scale + 8.5), 0, 15)
        quantized[:, column] = (codes - 8) * scale
        error = (remaining[:, column] - quantized[:, column]) / inverse[column, column]
        remaining -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return quantized


@oracle_test(dlm_ptq.KEY)
def ptq() -> Iterator[Check]:
    """Codes, calibration, and equality of formats with the engine's own."""
    draw = np.random.default_rng(3)
    matrix = draw.normal(size=(24, 96)).astype(np.float32)
    inputs = draw.normal(size=(300, 20)) @ draw.normal(size=(20, 96)) + draw.normal(size=(300, 96))
    seen = inputs.T @ inputs
    actual = dequantize(gptq.quantize_matrix(matrix, seen))
    same = bool(np.abs(actual - textbook(matrix, seen)).max() < 1e-5)
    yield Check("GPTQ's codes equal the textbook's", same)
    plain = dequantize(quantize(matrix, "Q4_0"))
    lost = [float(np.square((one - matrix) @ inputs.T).mean()) for one in (plain, actual)]
    yield Check(
        "smaller error on the inputs than plain rounding",
        lost[1] < 0.8 * lost[0],
        f"{lost[0]:.3f} {lost[1]:.3f}",
    )

    checkpoint = load_checkpoint(MODEL)
    assert checkpoint.tokenizer is not None
    pairs = format_loss.pairs([*examples("reverse", 4, seed=5, held_out=False)])
    canvases = dlm_ptq.masked(checkpoint.tokenizer, pairs, None, 0)
    prompts = [len(checkpoint.tokenizer.encode(prompt)) for prompt, _ in pairs]
    mask = checkpoint.tokenizer.mask_id
    hidden = [np.flatnonzero(np.array(canvas) == mask) for canvas in canvases]
    is_masked = all(len(h) and h.min() >= p for h, p in zip(hidden, prompts, strict=True))
    yield Check("answers are masked, prompts are not", is_masked)
    _, hessians = dlm_ptq.observe(checkpoint, pairs, 0)
    name = "model.layers.0.self_attn.q_proj"
    grams = [_first_inputs(texts) for texts in (canvases, canvases.values())]
    is_close = [np.allclose(hessians[name], one, rtol=1e-4, atol=1e-4) for one in grams]
    yield Check(
        "GPTQ is calibrated on masked canvases, not on clean texts", is_close == [True, False]
    )

    matrices = {}
    for dtype in ("int4", f"{dlm_ptq.KEY}:format=int4", "int8"):
        with LLM(MODEL, dtype=dtype, backend="torch") as llm:
            matrices[dtype] = [one.data for one in llm.model.network.matrices()]  # type: ignore[attr-defined]
    plain_ones, by_name, others = matrices.values()
    equal = [
        all(map(np.array_equal, plain_ones, them)) if len(them) == len(plain_ones) else False
        for them in (by_name, others)
    ]
    yield Check("a format selected by name equals the engine's", equal == [True, False])


def _first_inputs(canvases: Iterable[Sequence[int]]) -> np.ndarray:
    """x xᵀ over the inputs of the first layer's matrices: normalized embeddings."""
    tensors = load_checkpoint(MODEL).tensors
    embedding, norm = (
        np.asarray(tensors[f"model.{name}.weight"], np.float64)
        for name in ("embed_tokens", "layers.0.input_layernorm")
    )
    tokens = [token for canvas in canvases for token in canvas]
    inputs = rms_norm(embedding[tokens], norm, 1e-5)
    gram: np.ndarray = inputs.T @ inputs
    return gram


@cache
def loss(format: str, samples: int) -> format_loss.FormatLoss:
    """The loss of a format over `samples` held-out questions of all tasks, with eight passes per
    answer."""
    groups = [list(examples(task, samples // len(TASKS), seed=7)) for task in TASKS]
    learned = [one for task in TASKS for one in examples(task, 8, seed=7, held_out=False)]
    method = "llada:block=0,steps=8"
    [result] = format_loss.measure(
        MODEL, (format,), method, groups, learned, threads=1, max_tokens=32
    )
    return result


def accuracy_lost(format: str, samples: int) -> float:
    """The accuracy of float32 minus that of the format."""
    return loss("float32", samples).accuracy - loss(format, samples).accuracy


def nats_lost(format: str, samples: int) -> float:
    """The increase of the cross-entropy of a masked token, averaged over masking ratios of 1/4, 1/2
    and 3/4."""
    return loss(format, samples).bound - loss("float32", samples).bound


#: By format: the accuracy it may lose, and the nats per masked token.
FORMATS = {
    "bfloat16": (0.0, 0.0),  # the model's stored format
    "float16": (0.02, 0.001),
    "int8": (0.02, 0.005),
    "int4": (0.05, 0.02),
    GPTQ: (0.05, 0.02),
}

for _format, (_accuracy, _nats) in FORMATS.items():
    measure(dlm_ptq.KEY, f"accuracy lost, {_format}", samples=80, margin=_accuracy)(
        partial(accuracy_lost, _format)
    )
    measure(dlm_ptq.KEY, f"nats lost per masked token, {_format}", samples=80, margin=_nats)(
        partial(nats_lost, _format)
    )
