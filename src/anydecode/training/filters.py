"""The commit filter of Learn2PD (Bao et al., arXiv:2509.25188): predicts from the confidences of a
block which predictions are final.

Reference answers are decoded one token per pass. In a second decoding every prediction that agrees
with the reference is committed. The filter is trained on the confidences of that decoding and on
which predictions agreed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from anydecode.api.llm import LLM
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.learn2pd import model_facts
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import InvalidRequestError
from anydecode.scoring.sequence import Sequence
from anydecode.training.data import sample_texts

FILE = "learn2pd.safetensors"


@dataclass(frozen=True)
class FilterExamples:
    """Training data, one row per block and pass: `confidences[rows, block]` (1 where committed),
    `agrees[rows, block]`, and `masked[rows, block]`, the only positions that are trained on."""

    confidences: torch.Tensor
    agrees: torch.Tensor
    masked: torch.Tensor


class Filter(nn.Module):
    """Two layers, from `[rows, block]` confidences to `[rows, block]` logits of being final."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(block, block)
        self.output = nn.Linear(block, block)

    def forward(self, confidences: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(torch.relu(self.hidden(confidences)))
        return logits


class OracleDenoiser(Denoiser):
    """Commits all predictions of a block that agree with a reference answer, and the reference
    itself where none does or no prediction has changed. Records every pass.

    Args:
        references: The reference answer of each prompt.
        block: Positions per block.
    """

    def __init__(self, references: dict[tuple[int, ...], list[int]], block: int) -> None:
        super().__init__(FixedBlocks(block))
        self.references = references
        self.block = block
        #: Of every pass: the block's confidences (1 where committed), which predictions agree with
        #: the reference, and which positions are masked.
        self.rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def unmask_step(self, sequence: Sequence, canvas: Canvas, predictions: Predictions) -> None:
        state = canvas.policy_state
        if canvas.block is None:
            canvas.open(canvas.frontier, self.blocks.block_end(canvas, predictions))
            state["previous"] = None
        assert canvas.block is not None
        masks = canvas.masked(*canvas.block)
        tokens = predictions.tokens(masks)
        prompt = tuple(canvas.tokens[: state["start"]].tolist())
        expected = np.array(self.references[prompt])[masks - state["start"]]
        confidence = predictions.confidence(masks)
        agrees = tokens == expected
        row = np.ones(self.block), np.ones(self.block, bool), np.zeros(self.block, bool)
        for values, found in zip(row, (confidence, agrees, True), strict=True):
            values[masks - canvas.block[0]] = found
        self.rows.append(row)
        previous, state["previous"] = state["previous"], dict(zip(masks, tokens, strict=True))
        is_stuck = previous is not None and all(
            previous[position] == token for position, token in zip(masks, tokens, strict=True)
        )
        chosen = np.full(len(masks), True) if is_stuck or not agrees.any() else agrees
        canvas.commit(masks[chosen], expected[chosen], confidence[chosen])
        self.finish_step(sequence, canvas, predictions, masks[chosen])


def collect_examples(llm: LLM, prompts: list[list[int]], canvas: int, block: int) -> FilterExamples:
    """Decode `prompts` one token per pass for reference, then block by block with an oracle."""
    options: dict[str, Any] = {"max_tokens": canvas, "ignore_eos": True, "temperature": 0.0}
    answers = llm.generate(prompts, decoder="llada:block=0", **options)
    references = {
        tuple(prompt): answer.tokens for prompt, answer in zip(prompts, answers, strict=True)
    }
    oracle = OracleDenoiser(references, block)
    llm.generate(prompts, decoder=oracle, **options)
    confidences, agreed, masks = (
        torch.from_numpy(np.array(column)).float() for column in zip(*oracle.rows, strict=True)
    )
    return FilterExamples(confidences, agreed, masks)


def train_filter(
    model: str | Path,
    out: Path,
    *,
    prompts: int = 600,
    canvas: int = 32,
    block: int = 32,
    epochs: int = 4000,
    rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda *_: None,
) -> dict[str, Any]:
    """Train a filter for a diffusion model and write it to `out`.

    Args:
        model: The model, as `LLM` opens it.
        out: The file to write.
        prompts: The number of questions to learn from.
        canvas: The length of an answer in tokens.
        block: Positions per block; it divides `canvas`.
        epochs: The number of passes over all training rows.
        rate: The learning rate.
        seed: Of the questions and of the initial weights.
        report: Called with the epoch and the loss.

    Returns:
        The number of training rows and, on a held-out tenth: `precision` and `recall` at threshold
            0.96, and `agreeing`, the fraction of predictions that agree with the reference.

    Raises:
        InvalidRequestError: A number is out of range, or the model does not denoise whole canvases.
    """
    if not 1 <= block <= canvas or canvas % block:
        raise InvalidRequestError(f"blocks of {block} do not divide a canvas of {canvas}")
    if prompts < 10 or epochs < 1:
        raise InvalidRequestError("a filter needs prompts >= 10 and epochs >= 1")
    with LLM(model) as llm:
        spec, mask = llm.model.spec, llm.tokenizer.mask_id
        if spec.causal or spec.block_size is not None or mask is None:
            raise InvalidRequestError(
                f"{model}: filters are for diffusion models without blocks that have a mask token"
            )
        texts = dict.fromkeys(
            prompt for prompt, _ in sample_texts(Random(f"{seed}/filter"), prompts)
        )
        questions = [llm.tokenizer.encode(prompt) for prompt in texts]
        examples = collect_examples(llm, questions, canvas, block)
        facts = model_facts(llm.model, mask)
    order = torch.randperm(len(examples.confidences), generator=torch.Generator().manual_seed(seed))
    held_out, training_rows = order[: len(order) // 10], order[len(order) // 10 :]
    network = fit(examples, training_rows, epochs, rate, seed, report)
    save_filter(out, network, facts)
    return {"rows": len(training_rows), **_evaluate(network, examples, held_out)}


def fit(
    examples: FilterExamples,
    training_rows: torch.Tensor,
    epochs: int,
    rate: float,
    seed: int,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Filter:
    """Train a filter on `training_rows`, all of them in every epoch."""
    torch.manual_seed(seed)
    network = Filter(examples.confidences.shape[1])
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    for epoch in range(epochs):
        losses = functional.binary_cross_entropy_with_logits(
            network(examples.confidences[training_rows]),
            examples.agrees[training_rows],
            reduction="none",
        )
        loss = (losses * examples.masked[training_rows]).sum() / examples.masked[
            training_rows
        ].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report(epoch + 1, float(loss.detach()))
    return network


@torch.inference_mode()
def _evaluate(
    network: Filter, examples: FilterExamples, held_out: torch.Tensor
) -> dict[str, float]:
    masked, agrees = examples.masked[held_out] > 0, examples.agrees[held_out] > 0
    accepted = (network(examples.confidences[held_out]).sigmoid() > 0.96) & masked
    num_right = float((accepted & agrees).sum())
    return {
        "precision": num_right / max(1.0, float(accepted.sum())),
        "recall": num_right / max(1.0, float((agrees & masked).sum())),
        "agreeing": float((agrees & masked).sum()) / max(1.0, float(masked.sum())),
    }


def save_filter(path: Path, network: Filter, model: dict[str, Any]) -> None:
    """Write a filter: float32 weights and biases of `hidden` and `output`, its block size, and
    `model_facts` of its model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = network.hidden.in_features
    described = {"block": block, "model": model}
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    save_file(weights, str(path), metadata={"learn2pd": json.dumps(described)})
