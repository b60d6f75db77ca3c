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

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from anydecode.errors import CheckpointError, InvalidRequestError
from anydecode.training import checkpoint
from anydecode.training.data import sample_pairs
from anydecode.training.denoising import by_length, denoise
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import MASK_ID
from anydecode.training.transformer import Transformer

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


@torch.inference_mode()
def collect_examples(
    model: Transformer, prompts: list[list[int]], canvas: int, block: int
) -> FilterExamples:
    """Decode `prompts` once for reference, then block by block with an oracle. The oracle commits
    all predictions that agree with the reference, and the reference itself when a pass changes
    nothing.
    """
    reference, _ = denoise(model, prompts, canvas, 1.1)
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for positions in by_length(prompts):
        head = torch.tensor([prompts[position] for position in positions])
        reference_tokens = torch.tensor([reference[position] for position in positions])
        tokens = functional.pad(head, (0, canvas), value=MASK_ID)
        for start in range(0, canvas, block):
            part = slice(head.shape[1] + start, head.shape[1] + start + block)
            target, previous = reference_tokens[:, start : start + block], None
            while (masked := tokens[:, part] == MASK_ID).any():
                logits = without_mask(model(tokens))[:, part]
                confidence, predictions = logits.softmax(-1).max(-1)
                agrees = predictions == target
                is_active = masked.any(-1)
                block_confidences = torch.where(masked, confidence, 1.0)
                rows.append((block_confidences[is_active], agrees[is_active], masked[is_active]))
                is_stuck = ~(masked & agrees).any(-1, keepdim=True)
                if previous is not None:
                    is_stuck |= (predictions == previous).all(-1, keepdim=True)
                tokens[:, part] = torch.where(masked & (agrees | is_stuck), target, tokens[:, part])
                previous = predictions
    confidences, agreed, masks = (torch.cat(column) for column in zip(*rows, strict=True))
    return FilterExamples(confidences.clone(), agreed.float(), masks.float())


def train_filter(
    folder: Path,
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
    """Train a filter for the checkpoint in `folder` and write it to `out`.

    Returns:
        The number of training rows and, on a held-out tenth: `precision` and `recall` at threshold
            0.96, and `agreeing`, the fraction of predictions that agree with the reference.
    """
    if not 1 <= block <= canvas or canvas % block:
        raise InvalidRequestError(f"blocks of {block} do not divide a canvas of {canvas}")
    if prompts < 10 or epochs < 1:
        raise InvalidRequestError("a filter needs prompts >= 10 and epochs >= 1")
    model, tokenizer = checkpoint.load_llada(folder)
    questions = [prompt for prompt, _ in sample_pairs(tokenizer, Random(f"{seed}/filter"), prompts)]
    examples = collect_examples(model, questions, canvas, block)
    order = torch.randperm(len(examples.confidences), generator=torch.Generator().manual_seed(seed))
    held_out, training_rows = order[: len(order) // 10], order[len(order) // 10 :]
    network = fit(examples, training_rows, epochs, rate, seed, report)
    save_filter(out, network)
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


def save_filter(path: Path, network: Filter) -> None:
    """Write a filter: float32 weights and biases of `hidden` and `output`, and its block size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = network.hidden.in_features
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    save_file(weights, str(path), metadata={"learn2pd": json.dumps({"block": block})})


def load_filter(path: Path) -> Filter:
    """Load the filter in `path`. Raises `CheckpointError` if there is none."""
    try:
        weights = load_file(str(path))
        network = Filter(weights["hidden.weight"].shape[0])
        network.load_state_dict(weights)
    except Exception as error:  # the library raises several exception types
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: no Learn2PD filter: {reason}") from None
    return network.eval()
