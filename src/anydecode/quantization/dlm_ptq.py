"""Diffusion models in fewer bits (Gupta, Deshpande and Chakraborty, "On the Quantization Robustness
of Diffusion Language Models in Coding Benchmarks", arXiv:2604.20079): the engine's weight formats,
and four bits with GPTQ, calibrated on the matrices' inputs for masked canvases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model, spec_from_config
from anydecode.models.families.weights import DTYPES
from anydecode.models.files import untrusted
from anydecode.models.gptq import quantize_checkpoint
from anydecode.models.interface import Model
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import WeightFormat, check_torch, open_checkpoint, torch_executor
from anydecode.models.tokenizer import Tokenizer

KEY = "dlm-ptq"
#: Four bits, calibrated on masked canvases.
GPTQ = "int4-gptq"
FORMATS = (*(name for name in DTYPES if name), GPTQ)

#: A prompt, which is not masked, and an answer, which is.
Pair = tuple[str, str]


def masked(
    tokenizer: Tokenizer, pairs: Sequence[Pair], share: float | None, seed: int
) -> dict[tuple[int, ...], list[int]]:
    """Calibration canvases: prompts with partly masked answers, end of text included.

    Args:
        tokenizer: Must have a mask token and an end of text.
        pairs: Prompts and answers.
        share: Fraction of the answer's tokens to mask, at least one; None for a random fraction.
        seed: Seed of the random masks.

    Returns:
        The unmasked tokens by masked canvas.
    """
    if tokenizer.mask_id is None or not tokenizer.eos_ids:
        raise InvalidRequestError("this model's tokenizer has no mask token or no end of text")
    canvases = {}
    for number, (prompt_text, answer_text) in enumerate(pairs):
        random = Random(f"{seed}/{share}/{number}")
        rate = random.random() if share is None else share
        prompt = list(tokenizer.encode(prompt_text))
        answer = [*tokenizer.encode(answer_text, special=False), min(tokenizer.eos_ids)]
        mask = [random.random() < rate for _ in answer]
        mask[random.randrange(len(answer))] |= not any(mask)
        canvas = [
            tokenizer.mask_id if is_masked else token
            for token, is_masked in zip(answer, mask, strict=True)
        ]
        canvases[tuple(prompt + canvas)] = prompt + answer
    return canvases


def observe(
    checkpoint: Checkpoint, pairs: Sequence[Pair], seed: int
) -> tuple[Network, dict[str, np.ndarray]]:
    """The network in float32, and the Hessians of its matrices for masked canvases of `pairs`.

    Raises:
        MissingPackageError: torch is not installed.
    """
    from anydecode.api.llm import LLM

    check_torch("calibration with GPTQ")
    from anydecode.kernels.calibration import CalibrationBackend

    backend = CalibrationBackend()
    model = build_model(checkpoint, "float32", executor=torch_executor(backend=backend))
    with LLM(model, tokenizer=checkpoint.tokenizer) as llm:
        canvases = [list(canvas) for canvas in masked(llm.tokenizer, pairs, None, seed)]
        options: dict[str, Any] = {"max_tokens": max(map(len, canvases)), "ignore_eos": True}
        llm.generate(canvases, decoder="llada:block=0,steps=1", **options)
    return model.network, backend.hessians


def calibrate(checkpoint: Checkpoint, pairs: Sequence[Pair], seed: int = 0) -> Checkpoint:
    """The checkpoint with weights rounded by GPTQ, calibrated on masked canvases of `pairs`. Open
    it as "int4"."""
    return quantize_checkpoint(checkpoint, *observe(checkpoint, pairs, seed))


@dataclass(frozen=True)
class PostTraining(WeightFormat):
    """A weight format for diffusion models, with the texts to calibrate it."""

    format: str
    texts: Path | None = None
    seed: int = 0

    @property
    def dtype(self) -> str:
        return "int4" if self.format == GPTQ else self.format

    def open(self, model: Any, **options: Any) -> tuple[Model, Tokenizer | None]:
        """As `WeightFormat.open`. Raises `UnsupportedCombinationError` for causal models."""
        if not isinstance(model, str | os.PathLike):
            raise InvalidRequestError(f"{KEY} needs the name or the file of a model")
        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        with untrusted(checkpoint.path):
            spec = spec_from_config(checkpoint.config)
        if spec.causal:
            raise UnsupportedCombinationError(
                f"{KEY} is for diffusion models; for a causal model use dtype={self.dtype}"
            )
        if self.format == GPTQ:
            checkpoint = calibrate(checkpoint, self._pairs(), self.seed)
        return open_checkpoint(checkpoint, dtype=self.dtype, **options)

    def _pairs(self) -> list[Pair]:
        assert self.texts is not None
        try:
            lines = self.texts.expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{self.texts} cannot be read: {error}") from None
        pairs = [line.partition("\t")[::2] for line in lines if "\t" in line]
        if not pairs:
            raise InvalidRequestError(
                f"{self.texts} has no line with a prompt, a tab and an answer"
            )
        return pairs


@register(
    Card(
        KEY,
        "diffusion",
        paper="On the Quantization Robustness of Diffusion Language Models in Coding Benchmarks"
        " (arXiv:2604.20079)",
        exactness="lossy",
        use="LLM(model, dtype='dlm-ptq:format=int8')",
        summary="Weights of diffusion models in fewer bits; the loss is measured for each format.",
        needs=("diffusion model",),
        works_with=("every diffusion decoder",),
        deviations=(
            "the engine's formats: eight or four bits in blocks of 32 with a scale, not fewer",
            "GPTQ rounds into blocks of Q4_0 instead of groups of 128, and is calibrated on masked"
            " canvases with a uniformly random masked fraction",
            "no mixed precision by Hessian traces (HAWQ): with four-bit layers, the embedding and"
            " the head have eight bits",
        ),
    )
)
def dlm_ptq(format: str = "int4", texts: str | Path | None = None, seed: int = 0) -> PostTraining:
    """A weight format for diffusion models.

    Args:
        format: A dtype, or "int4-gptq", which is calibrated on `texts`.
        texts: A file with a prompt, a tab and its answer per line.
        seed: Seed of the masks.
    """
    if format not in FORMATS:
        raise InvalidRequestError(f"no format {format!r}; allowed are {', '.join(FORMATS)}")
    if (format == GPTQ) != (texts is not None):
        raise InvalidRequestError(f"format={GPTQ} needs texts=, and other formats do not take it")
    return PostTraining(format, None if texts is None else Path(texts), seed)
