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
from anydecode.decoders.diffusion.caches import CachePolicy
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.learn2pd import model_facts
from anydecode.decoders.diffusion.named_caches import cache as cache_named
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
        cache: The cache of its passes.
    """

    def __init__(
        self, references: dict[tuple[int, ...], list[int]], block: int, cache: CachePolicy
    ) -> None:
        super().__init__(FixedBlocks(block), cache=cache)
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
    """Decode `prompts` one token per pass for reference, then block by block with an oracle. The
    answers of a model with blocks have `canvas` tokens or more, up to the end of a block."""
    spec = llm.model.spec
    size, starts_at_end = spec.block_size or 1, spec.has_causal_context or spec.has_prompt_block
    name = "none" if spec.block_size is None else "block"
    groups: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        end = canvas if starts_at_end else len(prompt) + canvas
        groups.setdefault(canvas + -end % size, []).append(prompt)
    rows = []
    for length, group in groups.items():
        options: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "temperature": 0.0}
        answers = llm.generate(group, decoder=f"llada:block=0,cache={name}", **options)
        references = {
            tuple(prompt): answer.tokens for prompt, answer in zip(group, answers, strict=True)
        }
        oracle = OracleDenoiser(references, block, cache_named(name))
        llm.generate(group, decoder=oracle, **options)
        rows += oracle.rows
    confidences, agreed, masks = (
        torch.from_numpy(np.array(column)).float() for column in zip(*rows, strict=True)
    )
    return FilterExamples(confidences, agreed, masks)


def train_filter(
    model: str | Path,
    out: Path,
    *,
    prompts: int = 600,
    canvas: int = 32,
    block: int | None = None,
    epochs: int = 4000,
    rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda *_: None,
    family: str | None = None,
    mask: int | None = None,
) -> dict[str, Any]:
    """Train a filter for a diffusion model and write it to `out`.

    Args:
        model: The model, as `LLM` opens it.
        out: The file to write.
        prompts: The number of questions to learn from.
        canvas: The length of an answer in tokens.
        block: Positions per block; it divides `canvas` (default: 32, or `canvas` if that is less).
            A model with blocks has its own, which need not divide it.
        epochs: The number of passes over all training rows.
        rate: The learning rate.
        seed: Of the questions and of the initial weights.
        report: Called with the epoch and the loss.
        family, mask: What the model's files do not say, as those of `LLM`.

    Returns:
        The number of training rows and, on a held-out tenth: `precision` and `recall` at threshold
            0.96, and `agreeing`, the fraction of predictions that agree with the reference.

    Raises:
        InvalidRequestError: A number is out of range, or the model does not fill masks.
    """
    if prompts < 10 or epochs < 1:
        raise InvalidRequestError("a filter needs prompts >= 10 and epochs >= 1")
    with LLM(model, family=family, mask=mask) as llm:
        spec, mask = llm.model.spec, llm.tokenizer.mask_id
        if spec.causal or mask is None:
            raise InvalidRequestError(
                f"{model}: filters are for diffusion models that have a mask token, whose rows see"
                " both sides of it"
            )
        block = _block_size(block, canvas, spec.block_size)
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


def _block_size(given: int | None, canvas: int, own: int | None) -> int:
    """The positions per block of a filter: what was given, or those of a model with blocks."""
    if own is not None:
        if given not in (None, own):
            raise InvalidRequestError(
                f"this model's blocks have {own} positions; block={given} does not fit"
            )
        return own
    block = min(32, canvas) if given is None else given
    if not 1 <= block <= canvas or canvas % block:
        raise InvalidRequestError(f"blocks of {block} do not divide a canvas of {canvas}")
    return block


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
