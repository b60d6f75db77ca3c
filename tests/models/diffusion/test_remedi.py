"""RemeDi in its published layout, against a forward pass in plain torch: side layers after every
tenth layer, a prompt that is one block, and confidences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.diffusion.blocks import FixedBlocks
from anydecode.decoders.diffusion.caches import BlockCausalCache, CachePolicy, NoCache
from anydecode.decoders.diffusion.unmasking import TopKUnmasking
from anydecode.errors import InvalidRequestError, UnsupportedCombinationError
from anydecode.kernels.library import load_library
from diffusion_checkpoints import MASK, RecordingDenoiser
from remedi_checkpoints import BLOCK, HEADS, SIDES, write


def forward(
    tensors: dict[str, torch.Tensor],
    tokens: Any,
    prompt: int,
    *,
    sums: bool = True,
    feeds_back: bool = True,
    in_blocks: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits `[rows, vocab]` and the confidences `[rows]` of a canvas, float64. The options
    are those of wrong references."""
    weights = {name.removeprefix("model."): value.double() for name, value in tensors.items()}
    at = torch.arange(len(tokens))
    block = torch.where(at < prompt, -1, (at - prompt) // BLOCK)
    hidden = block[:, None] < block
    if not in_blocks:
        hidden = torch.zeros_like(hidden)
    steps = torch.arange(0, 16, 2).double() / 16
    angles = at[:, None, None] * 500000.0**-steps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :8], x[..., 8:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        def linear(y: torch.Tensor, part: str) -> torch.Tensor:
            return y @ weights[f"{name}.{part}.weight"].T

        y = norm(x, f"{name}.attn_norm")
        q, k, v = (linear(y, f"{part}_proj").view(-1, HEADS, 16) for part in "qkv")
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / 4
        attention = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + linear(torch.einsum("hqk,khd->qhd", attention, v).flatten(1), "attn_out")
        y = norm(x, f"{name}.ff_norm")
        gate = torch.nn.functional.silu(linear(y, "ff_proj"))
        return x + linear(gate * linear(y, "up_proj"), "ff_out")

    x = weights["transformer.wte.weight"][torch.tensor([int(token) for token in tokens])]
    side = torch.zeros_like(x)
    for index in range(12):
        x = layer(x, f"transformer.blocks.{index}")
        if index in SIDES:
            number = SIDES.index(index)
            side = layer(x + side if sums else x, f"blocks_upm.{number}")
            y = norm(side, f"backprop_norms.{number}")
            back = y @ weights[f"backprop_linears.{number}.weight"].T
            x = x + (back + weights[f"backprop_linears.{number}.bias"]) * feeds_back
    confidence = norm(side, "ln_f_upm") @ weights["linear_confidence.weight"][0]
    confidence = confidence + weights["linear_confidence.bias"]
    return norm(x, "transformer.ln_f") @ weights["transformer.ff_out.weight"].T, confidence


def passes(
    folder: Path, prompt: list[int], backend: str, cache: CachePolicy
) -> list[tuple[np.ndarray, dict[int, np.ndarray]]]:
    with LLM(folder, cache_positions=256, backend=backend, threads=1, dtype="float32") as llm:
        recorder = RecordingDenoiser(FixedBlocks(0), unmask=TopKUnmasking(2), cache=cache)
        recorder.passes = []
        llm.generate(prompt, decoder=recorder, max_tokens=9, ignore_eos=True)
    return recorder.passes


def difference(
    tensors: dict[str, torch.Tensor], recorded: list[Any], prompt: int, **wrong: bool
) -> float:
    largest = 0.0
    for tokens, logits in recorded:
        reference = forward(tensors, tokens, prompt, **wrong)[0].numpy()
        for position, row in logits.items():
            largest = max(largest, float(np.delete(np.abs(row - reference[position]), MASK).max()))
    return largest


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("cache", [BlockCausalCache, NoCache])
def test_every_pass_equals_the_reference(
    backend: str, cache: type[CachePolicy], tmp_path: Path
) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("no native kernels")
    tensors = write(tmp_path)
    prompt = [(7 * index + 3) % 50 for index in range(6)]
    recorded = passes(tmp_path, prompt, backend, cache())
    assert len(recorded) >= 5 and difference(tensors, recorded, len(prompt)) < 2e-4
    for wrong in ("sums", "feeds_back", "in_blocks"):
        assert difference(tensors, recorded, len(prompt), **{wrong: False}) > 1e-2, wrong
    assert difference(tensors, recorded, 0) > 1e-2, "blocks from the first position"


def reflected(
    tensors: dict[str, torch.Tensor], prompt: list[int], *, by_logit: bool = False
) -> list[int]:
    """Two blocks, each in as many steps as it has positions: fill the masks, and keep one token
    more than in the step before, those of the largest confidences."""
    tokens = list(prompt)
    for _ in range(2):
        first = len(tokens)
        tokens += [MASK] * BLOCK
        for step in range(BLOCK):
            logits, confidences = forward(tensors, tokens, len(prompt))
            logits[:, MASK] = -torch.inf
            filled = [
                int(logits[i].argmax()) if tokens[i] == MASK else tokens[i]
                for i in range(first, len(tokens))
            ]
            held = torch.tensor([logits[first + i, token] for i, token in enumerate(filled)])
            ranks = held if by_logit else confidences[first:]
            kept = ranks.argsort(descending=True)[: step + 1].tolist()
            tokens[first:] = [token if i in kept else MASK for i, token in enumerate(filled)]
    return tokens[len(prompt) :]


def test_the_default_decoder_ranks_tokens_by_their_confidences(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    prompts = [[3, 7, 11, 2, 5], [9, 8, 40]]
    expected, wrong = (
        [reflected(tensors, prompt, by_logit=by_logit) for prompt in prompts]
        for by_logit in (False, True)
    )
    assert expected != wrong
    options: dict[str, Any] = {"max_tokens": 2 * BLOCK, "ignore_eos": True}
    with LLM(tmp_path, cache_positions=256, threads=1, dtype="float32") as llm:
        assert llm.default_decoder == "remedi:cache=block"
        for decoder, tokens in (
            (None, expected),
            ("remedi", expected),
            ("remedi:rank=confidence", expected),
            ("remedi:cache=block,rank=logit", wrong),
        ):
            answers = llm.generate(prompts, **({"decoder": decoder} if decoder else {}), **options)
            assert [answer.tokens for answer in answers] == tokens, decoder
        with pytest.raises(UnsupportedCombinationError, match="or a memory"):
            llm.generate(prompts[0], decoder="elastic-cache", **options)


def test_other_models_have_no_confidences() -> None:
    with LLM("tiny-diffusion") as llm:
        with pytest.raises(UnsupportedCombinationError, match="leave rank out"):
            llm.generate("1+2=", decoder="remedi:rank=confidence", max_tokens=8)
        with pytest.raises(InvalidRequestError, match="confidence or logit"):
            llm.generate("1+2=", decoder="remedi:rank=x", max_tokens=8)
