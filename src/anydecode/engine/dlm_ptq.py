"""Diffusion models in fewer bits (Gupta, Deshpande and Chakraborty, "On the Quantization Robustness
of Diffusion Language Models in Coding Benchmarks", arXiv:2604.20079): the engine's number formats,
and four bits whose codes GPTQ chooses for what the matrices see of masked canvases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from anydecode.catalogue import Card, register
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.families import build_model, spec_from_config
from anydecode.models.families.weights import DTYPES
from anydecode.models.gptq import CalibrationStatistics, quantize_checkpoint
from anydecode.models.interface import Model
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import WeightFormat, open_checkpoint
from anydecode.models.tokenizer import Tokenizer

KEY = "dlm-ptq"
#: Four bits, calibrated on masked canvases.
GPTQ = "int4-gptq"
FORMATS = (*(name for name in DTYPES if name), GPTQ)

#: A prompt, which is never masked, and an answer, which is.
Pair = tuple[str, str]


def masked(
    tokenizer: Tokenizer, pairs: Sequence[Pair], share: float | None, seed: int
) -> dict[tuple[int, ...], list[int]]:
    """Canvases of prompts and answers, end of text included, where a `share` of the answer's tokens
    is masked (None: any share), at least one; and the tokens as they were."""
    if tokenizer.mask_id is None or not tokenizer.eos_ids:
        raise InvalidRequestError("this model's tokenizer has no mask token or no end of text")
    made = {}
    for number, (asked, said) in enumerate(pairs):
        random = Random(f"{seed}/{share}/{number}")
        rate = random.random() if share is None else share
        prompt = list(tokenizer.encode(asked))
        answer = [*tokenizer.encode(said, special=False), min(tokenizer.eos_ids)]
        hidden = [random.random() < rate for _ in answer]
        hidden[random.randrange(len(answer))] |= not any(hidden)
        canvas = [
            tokenizer.mask_id if hide else token for token, hide in zip(answer, hidden, strict=True)
        ]
        made[tuple(prompt + canvas)] = prompt + answer
    return made


def observe(
    checkpoint: Checkpoint, pairs: Sequence[Pair], seed: int
) -> tuple[Network, CalibrationStatistics]:
    """The network in float32, and what its matrices see of masked canvases of `pairs`."""
    from anydecode.engine.llm import LLM

    inputs = CalibrationStatistics()
    model = build_model(checkpoint, "float32", inputs)
    with LLM(model, tokenizer=checkpoint.tokenizer) as llm:
        canvases = [list(canvas) for canvas in masked(llm.tokenizer, pairs, None, seed)]
        options = {"max_tokens": max(map(len, canvases)), "ignore_eos": True}
        llm.generate(canvases, decoder="llada:block=0,steps=1", **options)
    return model.network, inputs


def calibrate(checkpoint: Checkpoint, pairs: Sequence[Pair], seed: int = 0) -> Checkpoint:
    """The checkpoint, rounded for what its matrices see of masked canvases of `pairs`; open it as
    "int4"."""
    return quantize_checkpoint(checkpoint, *observe(checkpoint, pairs, seed))


@dataclass(frozen=True)
class PostTraining(WeightFormat):
    """A format for a diffusion model's weights, and the texts that calibrate it."""

    format: str
    texts: Path | None = None
    seed: int = 0

    @property
    def dtype(self) -> str:
        return "int4" if self.format == GPTQ else self.format

    def open(self, model: Any, **options: Any) -> tuple[Model, Tokenizer | None]:
        """As `WeightFormat.open`. Raises `UnsupportedCombinationError` for causal models."""
        if not isinstance(model, str | os.PathLike):
            raise InvalidRequestError(f"{KEY} wants the name or the file of a model")
        checkpoint = load_checkpoint(model if isinstance(model, str) else Path(model))
        if spec_from_config(checkpoint.config).causal:
            raise UnsupportedCombinationError(
                f"{KEY} is for diffusion models; for a causal one say dtype={self.dtype}"
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
            raise InvalidRequestError(f"{self.texts} has no line of prompt, tab and answer")
        return pairs


@register(
    Card(
        KEY,
        "diffusion",
        paper="On the Quantization Robustness of Diffusion Language Models in Coding Benchmarks"
        " (arXiv:2604.20079)",
        exactness="lossy",
        summary="A diffusion model's weights in fewer bits, its loss measured format by format.",
        needs=("diffusion model",),
        works_with=("every diffusion decoder",),
        deviations=(
            "a dtype, not a decoder: LLM(model, dtype='dlm-ptq:format=int8')",
            "the engine's formats: eight or four bits in blocks of 32 with a scale, no fewer",
            "GPTQ rounds into blocks of Q4_0 where the paper has groups of 128, and is calibrated"
            " on masked canvases, the share that is masked drawn uniformly",
            "no mixed precision by Hessian traces (HAWQ): the embedding and the head are kept in"
            " eight bits where the layers have four",
        ),
    )
)
def dlm_ptq(format: str = "int4", texts: str | Path | None = None, seed: int = 0) -> PostTraining:
    """`format` is a dtype, or "int4-gptq", which is calibrated on the lines of `texts` (a file with
    a prompt, a tab and its answer per line), masked by `seed`."""
    if format not in FORMATS:
        raise InvalidRequestError(f"no format {format!r}: there are {', '.join(FORMATS)}")
    if (format == GPTQ) != (texts is not None):
        raise InvalidRequestError(f"texts= belongs to format={GPTQ}, and that wants texts=")
    return PostTraining(format, None if texts is None else Path(texts), seed)
