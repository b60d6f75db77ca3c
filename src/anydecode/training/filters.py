"""The commit filter of Learn2PD (Bao et al., arXiv:2509.25188): from the confidences of a block,
which of its guesses are final.

Reference answers are decoded one token a pass. Decoding again, every guess that agrees with the
reference is committed; what the confidences were, and which guesses agreed, is the filter's lesson.
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
from anydecode.training.data import drawn
from anydecode.training.denoising import by_length, denoise
from anydecode.training.objectives import without_mask
from anydecode.training.tokenizer import MASK_ID
from anydecode.training.transformer import Transformer

FILE = "learn2pd.safetensors"


@dataclass(frozen=True)
class Lessons:
    """What was seen, a row per block and pass: `confidences[rows, block]` (1 where committed),
    `agrees[rows, block]`, and `masked[rows, block]`, which alone are learned from."""

    confidences: torch.Tensor
    agrees: torch.Tensor
    masked: torch.Tensor


class Filter(nn.Module):
    """Two layers: `[rows, block]` confidences to as many logits of being final."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(block, block)
        self.output = nn.Linear(block, block)

    def forward(self, confidences: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(torch.relu(self.hidden(confidences)))
        return logits


@torch.inference_mode()
def lessons(model: Transformer, prompts: list[list[int]], canvas: int, block: int) -> Lessons:
    """Decode `prompts` once for reference, then block by block with an oracle that commits all that
    agrees, and the reference itself where a pass changes nothing."""
    reference, _ = denoise(model, prompts, canvas, 1.1)
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for positions in by_length(prompts):
        head = torch.tensor([prompts[position] for position in positions])
        goal = torch.tensor([reference[position] for position in positions])
        tokens = functional.pad(head, (0, canvas), value=MASK_ID)
        for start in range(0, canvas, block):
            part = slice(head.shape[1] + start, head.shape[1] + start + block)
            wanted, before = goal[:, start : start + block], None
            while (masked := tokens[:, part] == MASK_ID).any():
                logits = without_mask(model(tokens))[:, part]
                sure, guesses = logits.softmax(-1).max(-1)
                agrees = guesses == wanted
                live = masked.any(-1)
                seen = torch.where(masked, sure, 1.0)
                rows.append((seen[live], agrees[live], masked[live]))
                stuck = ~(masked & agrees).any(-1, keepdim=True)
                if before is not None:
                    stuck |= (guesses == before).all(-1, keepdim=True)
                tokens[:, part] = torch.where(masked & (agrees | stuck), wanted, tokens[:, part])
                before = guesses
    confidences, agreed, masks = (torch.cat(column) for column in zip(*rows, strict=True))
    return Lessons(confidences.clone(), agreed.float(), masks.float())


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
    """Train a filter for the checkpoint in `folder`, write it to `out`, and say how it does on a
    tenth of the lessons that it has not seen: `precision` and `recall` at 0.96, and the share of
    guesses that agree at all."""
    if not 1 <= block <= canvas or canvas % block:
        raise InvalidRequestError(f"blocks of {block} do not divide a canvas of {canvas}")
    if prompts < 10 or epochs < 1:
        raise InvalidRequestError("a filter is trained on ten prompts or more, an epoch or more")
    model, tokenizer = checkpoint.load_llada(folder)
    asked = [prompt for prompt, _ in drawn(tokenizer, Random(f"{seed}/filter"), prompts)]
    seen = lessons(model, asked, canvas, block)
    order = torch.randperm(len(seen.confidences), generator=torch.Generator().manual_seed(seed))
    held, used = order[: len(order) // 10], order[len(order) // 10 :]
    network = fit(seen, used, epochs, rate, seed, report)
    save_filter(out, network)
    return {"rows": len(used), **_judged(network, seen, held)}


def fit(
    seen: Lessons,
    used: torch.Tensor,
    epochs: int,
    rate: float,
    seed: int,
    report: Callable[[int, float], None] = lambda *_: None,
) -> Filter:
    """A filter that has learned the rows `used`, all of them in every epoch."""
    torch.manual_seed(seed)
    network = Filter(seen.confidences.shape[1])
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    for epoch in range(epochs):
        losses = functional.binary_cross_entropy_with_logits(
            network(seen.confidences[used]), seen.agrees[used], reduction="none"
        )
        loss = (losses * seen.masked[used]).sum() / seen.masked[used].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report(epoch + 1, float(loss.detach()))
    return network


@torch.inference_mode()
def _judged(network: Filter, seen: Lessons, held: torch.Tensor) -> dict[str, float]:
    masked, agrees = seen.masked[held] > 0, seen.agrees[held] > 0
    accepted = (network(seen.confidences[held]).sigmoid() > 0.96) & masked
    right = float((accepted & agrees).sum())
    return {
        "precision": right / max(1.0, float(accepted.sum())),
        "recall": right / max(1.0, float((agrees & masked).sum())),
        "agreeing": float((agrees & masked).sum()) / max(1.0, float(masked.sum())),
    }


def save_filter(path: Path, network: Filter) -> None:
    """Write a filter: float32 `hidden` and `output`, weight and bias, and its block size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    block = network.hidden.in_features
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    save_file(weights, str(path), metadata={"learn2pd": json.dumps({"block": block})})


def load_filter(path: Path) -> Filter:
    """The filter in `path`. Raises `CheckpointError`."""
    try:
        weights = load_file(str(path))
        network = Filter(weights["hidden.weight"].shape[0])
        network.load_state_dict(weights)
    except Exception as error:  # the library raises its own kinds
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: no Learn2PD filter: {reason}") from None
    return network.eval()
