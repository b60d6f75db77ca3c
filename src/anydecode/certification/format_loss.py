"""The loss of a diffusion model in the engine's number formats, at the same number of passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anydecode.api.llm import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.models.families import build_model, load_network
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import choose_executor
from anydecode.quantization.dlm_ptq import GPTQ, Pair, calibrate, masked
from anydecode.scoring.sequence import Sequence as Text
from anydecode.tasks.tasks import Example

#: Shares of an answer's tokens that are masked.
SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class FormatLoss:
    """Results of one number format.

    Attributes:
        format: Name of the format.
        bytes: Bytes of all weight matrices.
        entropy: Cross-entropy in nats per masked token, by masked share.
        bound: Mean of `entropy`.
        accuracy: Share of questions answered correctly.
        passes: Mean number of forward passes per question.
        differing: Share of tokens that differ from the first format's.
    """

    format: str
    bytes: int
    entropy: dict[str, float]
    bound: float
    accuracy: float
    passes: float
    differing: float


class CrossEntropyProbe(Denoiser):
    """Measures cross-entropy: runs one forward pass on each canvas of `answers` (the answer's
    tokens by canvas), and appends the loss of each masked token, in nats, to `losses`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.answers = answers
        self.losses: list[float] = []

    def unmask_step(self, sequence: Text, canvas: Canvas, predictions: Predictions) -> None:
        answer_tokens = self.answers[tuple(canvas.tokens.tolist())]
        for position in canvas.masks:
            logits = predictions.logits(int(position)).astype(np.float64)
            self.losses.append(float(np.logaddexp.reduce(logits) - logits[answer_tokens[position]]))
        canvas.open(canvas.frontier, len(canvas))
        self.commit(sequence, canvas, predictions, canvas.masks)


def entropy(llm: LLM, canvases: dict[tuple[int, ...], list[int]]) -> float:
    """Mean cross-entropy of the masked tokens of `canvases`, in nats."""
    probe = CrossEntropyProbe(canvases)
    prompts = [list(canvas) for canvas in canvases]
    llm.generate(prompts, decoder=probe, max_tokens=max(map(len, prompts)), ignore_eos=True)
    return float(np.mean(probe.losses))


def weight_bytes(network: Network) -> int:
    """Stored bytes of all weight matrices, shared ones once, without norms and biases."""
    return sum({id(one): one.num_bytes for one in network.matrices()}.values())


def pairs(all_examples: Sequence[Example]) -> list[Pair]:
    """Questions with their reference answers."""
    return [(example.prompt, example.answer) for example in all_examples]


def measure(
    model: str,
    formats: Sequence[str],
    method: str,
    groups: Sequence[Sequence[Example]],
    calibration: Sequence[Example],
    *,
    threads: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Iterator[FormatLoss]:
    """Yield the results of each format, in order. The first format is the reference. `options` are
    passed to `LLM.generate`."""
    all_examples = [example for group in groups for example in group]
    source = load_checkpoint(model)
    reference: list[list[int]] = []
    for name in formats:
        checkpoint, dtype = source, name
        if name == GPTQ:
            checkpoint, dtype = calibrate(source, pairs(calibration), seed), "int4"
        size = weight_bytes(load_network(checkpoint, dtype))
        built = build_model(checkpoint, dtype, executor=choose_executor(threads=threads))
        with LLM(built, tokenizer=checkpoint.tokenizer) as llm:
            masked_canvases = {
                t: masked(llm.tokenizer, pairs(all_examples), t, seed) for t in SHARES
            }
            losses = {str(t): entropy(llm, canvases) for t, canvases in masked_canvases.items()}
            prompts = [example.prompt for example in all_examples]
            answers = llm.generate(prompts, decoder=method, seed=seed, ignore_eos=True, **options)
            eos_ids = llm.tokenizer.eos_ids
            texts = [llm.tokenizer.decode(_before_end(one.tokens, eos_ids)) for one in answers]
        outputs = [answer.tokens for answer in answers]
        reference = reference or outputs
        token_pairs = [
            p for a, b in zip(outputs, reference, strict=True) for p in zip(a, b, strict=False)
        ]
        yield FormatLoss(
            name,
            size,
            losses,
            float(np.mean([*losses.values()])),
            float(np.mean([e.is_right(t) for e, t in zip(all_examples, texts, strict=True)])),
            float(np.mean([answer.stats.passes for answer in answers])),
            float(np.mean([a != b for a, b in token_pairs])),
        )


def _before_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The tokens before the first end-of-sequence token."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in eos_ids), len(tokens))]
