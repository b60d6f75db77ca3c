"""Quantised diffusion models: GPTQ against the textbook's recursion, what it is calibrated on, and
what each format loses on tasks whose answers can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import torch

from anydecode.engine import dlm_ptq
from anydecode.engine.dlm_ptq import GPTQ
from anydecode.engine.llm import LLM
from anydecode.evaluation import quantization
from anydecode.evaluation.certify import Check, measure, mechanism
from anydecode.evaluation.parallelbench.tasks import TASKS, examples
from anydecode.kernels.formats import dequantize, quantize
from anydecode.models import gptq
from anydecode.models.loading import load_checkpoint

MODEL = "tiny-diffusion"
_BLOCK = 32


def textbook(matrix: np.ndarray, seen: np.ndarray, damping: float = 0.01) -> np.ndarray:
    """What GPTQ makes of `matrix`, one column after the other: the error goes to the columns left
    by the inverse of what the inputs have in common, from which the column is then eliminated."""
    left = matrix.astype(np.float64).copy()
    made: np.ndarray = np.empty_like(left)
    columns = left.shape[1]
    inverse = np.linalg.inv(seen + damping * np.mean(np.diag(seen)) * np.eye(columns))
    for column in range(columns):
        if column % _BLOCK == 0:
            block = left[:, column : column + _BLOCK]
            largest = block[np.arange(len(block)), np.abs(block).argmax(1)].astype(np.float32)
            scale = (largest / np.float32(-8)).astype(np.float16).astype(np.float64)
        codes = np.clip(np.floor(left[:, column] / scale + 8.5), 0, 15)
        made[:, column] = (codes - 8) * scale
        error = (left[:, column] - made[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return made


@mechanism(dlm_ptq.KEY)
def ptq() -> Iterator[Check]:
    """Codes, calibration, and that a format is the engine's own."""
    draw = np.random.default_rng(3)
    matrix = torch.from_numpy(draw.normal(size=(24, 96)).astype(np.float32))
    inputs = draw.normal(size=(300, 20)) @ draw.normal(size=(20, 96)) + draw.normal(size=(300, 96))
    seen = inputs.T @ inputs
    found = dequantize(gptq.quantize_matrix(matrix, torch.from_numpy(seen))).numpy()
    same = bool(np.abs(found - textbook(matrix.numpy(), seen)).max() < 1e-5)
    yield Check("GPTQ's codes are the textbook's", same)
    plain = dequantize(quantize(matrix, "Q4_0")).numpy()
    lost = [float(np.square((one - matrix.numpy()) @ inputs.T).mean()) for one in (plain, found)]
    yield Check(
        "they lose less on the inputs", lost[1] < 0.8 * lost[0], f"{lost[0]:.3f} {lost[1]:.3f}"
    )

    checkpoint = load_checkpoint(MODEL)
    assert checkpoint.tokenizer is not None
    pairs = quantization.pairs([*examples("reverse", 4, seed=5, held_out=False)])
    canvases = dlm_ptq.masked(checkpoint.tokenizer, pairs, None, 0)
    prompts = [len(checkpoint.tokenizer.encode(prompt)) for prompt, _ in pairs]
    mask = checkpoint.tokenizer.mask_id
    hidden = [np.flatnonzero(np.array(canvas) == mask) for canvas in canvases]
    kept = all(len(h) and h.min() >= p for h, p in zip(hidden, prompts, strict=True))
    yield Check("answers are masked, prompts are not", kept)
    _, common = dlm_ptq.observe(checkpoint, pairs, 0)
    name = "model.layers.0.self_attn.q_proj"
    told = [_first_inputs(texts) for texts in (canvases, canvases.values())]
    near = [bool(torch.allclose(common.hessians[name], one, rtol=1e-4, atol=1e-4)) for one in told]
    yield Check("GPTQ sees masked canvases, not clean texts", near == [True, False])

    held = {}
    for dtype in ("int4", f"{dlm_ptq.KEY}:format=int4", "int8"):
        with LLM(MODEL, dtype=dtype, backend="torch") as llm:
            held[dtype] = [one.data for one in llm.model.network.matrices()]  # type: ignore[attr-defined]
    plain_ones, named, others = held.values()
    alike = [
        all(map(torch.equal, plain_ones, them)) if len(them) == len(plain_ones) else False
        for them in (named, others)
    ]
    yield Check("a format by name is the engine's", alike == [True, False])


def _first_inputs(canvases: Iterable[Sequence[int]]) -> torch.Tensor:
    """x xᵀ over the rows that the first layer's matrices see: embeddings after the norm."""
    tensors = load_checkpoint(MODEL).tensors
    tokens = torch.tensor([token for canvas in canvases for token in canvas])
    x = tensors["model.embed_tokens.weight"].double()[tokens]  # type: ignore[union-attr]
    x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
    x = x * tensors["model.layers.0.input_layernorm.weight"].double()  # type: ignore[union-attr]
    return x.T @ x


@cache
def losses(samples: int) -> dict[str, quantization.Loss]:
    """By format, over `samples` held-out questions of every task, at eight passes each."""
    groups = [list(examples(task, samples // len(TASKS), seed=7)) for task in TASKS]
    learned = [one for task in TASKS for one in examples(task, 8, seed=7, held_out=False)]
    formats = ("float32", *FORMATS)
    method = "llada:block=0,steps=8"
    found = quantization.measure(MODEL, formats, method, groups, learned, threads=1, max_tokens=32)
    return {one.format: one for one in found}


def accuracy_lost(format: str, samples: int) -> float:
    """Share of the questions that are answered wrongly because of the format."""
    found = losses(samples)
    return found["float32"].accuracy - found[format].accuracy


def nats_lost(format: str, samples: int) -> float:
    """Cross-entropy that a masked token costs more, over shares masked of 1/4, 1/2 and 3/4."""
    found = losses(samples)
    return found[format].bound - found["float32"].bound


#: By format: the accuracy it may lose, and the nats per masked token.
FORMATS = {
    "bfloat16": (0.0, 0.0),  # as the model is stored
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
