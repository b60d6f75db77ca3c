"""LFM2.5's diffusion model in its published layout, against a forward pass in plain torch: layers
that depend on the time of each row, self-conditioning, short convolutions behind a causal context;
and its schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.duo import duo
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.decoders.diffusion.uniform import UniformDenoiser
from anydecode.errors import AnydecodeError, CheckpointError
from anydecode.kernels.library import load_library
from anydecode.models.families import spec_from_config
from anydecode.scoring.sequence import Sequence
from lfm2_checkpoints import (
    BLOCK,
    EPS,
    HEAD,
    HEADS,
    KERNEL,
    KV,
    LAYERS,
    PUBLISHED,
    THETA,
    TIME_EPS,
    D,
    Tensors,
    write,
)

PROMPT = [(5 * i + 2) % 60 for i in range(13)]


@dataclass
class Wrong:
    """What a wrong reference does: the time of all rows is that of the canvas; convolutions see
    none of the context; the canvas is causal; no self-conditioning."""

    one_time: bool = False
    fresh_convolution: bool = False
    causal: bool = False
    unconditioned: bool = False


def forward(
    tensors: Tensors,
    tokens: Any,
    first: int,
    sigma: float,
    belief: torch.Tensor | None,
    wrong: Wrong | None = None,
) -> torch.Tensor:
    """The logits of the canvas, the rows from `first` on, float64 `[rows, vocab]`: those before it
    are a causal context at sigma 0. `belief`: the distributions of the last pass."""
    wrong = wrong or Wrong()
    weights = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    silu = torch.nn.functional.silu
    count = len(tokens)
    at = torch.arange(count)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weights[f"{name}.weight"]

    sigmas = torch.full((count,), sigma, dtype=torch.float64)
    if not wrong.one_time:
        sigmas[:first] = 0.0
    rates = torch.exp(-math.log(10000) * torch.arange(128).double() / 128)
    angles = sigmas[:, None] * rates
    waves = torch.cat([angles.cos(), angles.sin()], -1)
    time = linear(silu(linear(waves, "sigma_embed.mlp.0")), "sigma_embed.mlp.2")
    shared = linear(silu(time), "adaln_proj.1")

    x = weights["embed_tokens.weight"][torch.tensor([int(token) for token in tokens])]
    if belief is not None and not wrong.unconditioned:
        states = norm(belief @ weights["embed_tokens.weight"], "selfcond_norm")
        added = linear(silu(linear(states, "selfcond_ffn.0")), "selfcond_ffn.2")
        x = torch.cat([x[:first], x[first:] + added])
    for index, kind in enumerate(LAYERS):
        prefix = f"layers.{index}."
        scale, shift, gate = (shared + weights["adaln_block_emb"][index]).chunk(3, -1)
        modulated = x * (1 + scale) + shift
        y = norm(modulated, f"{prefix}operator_norm")
        if kind == "conv":
            b, c, z = linear(y, f"{prefix}conv.in_proj").chunk(3, -1)
            inputs = b * z
            padded = torch.cat([torch.zeros(KERNEL - 1, D, dtype=torch.float64), inputs])
            taps = weights[f"{prefix}conv.conv.weight"][:, 0]
            mixed = sum(padded[k : k + count] * taps[:, k] for k in range(KERNEL))
            if wrong.fresh_convolution:
                own = torch.cat([torch.zeros(KERNEL - 1, D, dtype=torch.float64), inputs[first:]])
                rows = sum(own[k : k + count - first] * taps[:, k] for k in range(KERNEL))
                mixed = torch.cat([mixed[:first], rows])
            mixed = linear(c * mixed, f"{prefix}conv.out_proj")
        else:
            attention = f"{prefix}self_attn."
            q = linear(y, f"{attention}q_proj").view(count, HEADS, HEAD)
            k = linear(y, f"{attention}k_proj").view(count, KV, HEAD)
            v = linear(y, f"{attention}v_proj").view(count, KV, HEAD)
            q, k = norm(q, f"{attention}q_layernorm"), norm(k, f"{attention}k_layernorm")
            turns = at[:, None, None] * THETA ** (-torch.arange(0, HEAD, 2).double() / HEAD)
            cos, sin = turns.cos(), turns.sin()
            q, k = (
                torch.cat([p * cos - r * sin, r * cos + p * sin], -1)
                for p, r in (q.chunk(2, -1), k.chunk(2, -1))
            )
            k, v = (part.repeat_interleave(HEADS // KV, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
            hidden = at[:, None] < at
            if not wrong.causal:
                hidden[first:] = False
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            mixed = linear(
                torch.einsum("hqk,khd->qhd", shares, v).flatten(1), f"{attention}out_proj"
            )
        output = modulated + mixed
        y = norm(output, f"{prefix}ffn_norm")
        gated = silu(linear(y, f"{prefix}feed_forward.w1")) * linear(y, f"{prefix}feed_forward.w3")
        output = output + linear(gated, f"{prefix}feed_forward.w2")
        x = x + (1 + gate) * (output - modulated)
    return norm(x, "embedding_norm")[first:] @ weights["embed_tokens.weight"].T


@dataclass
class Pass:
    """What a pass read and predicted."""

    tokens: np.ndarray
    first: int
    step: int
    logits: torch.Tensor
    temperature: float


def schedule(step: int, steps: int) -> tuple[float, float]:
    """Sigma and temperature of a step of the published preset: the times are those of a grid from 1
    to `TIME_EPS` that is warped by the power 0.3, with temperatures from 0.8 to 0.4; the last step,
    which reads out the text, has the sigma 0.7 and the last temperature."""
    num_samples = steps - 1
    if step == num_samples:
        return 0.7, 0.4
    time = TIME_EPS + (1 - TIME_EPS) * (1 - step / num_samples) ** 0.3
    return -math.log(1 - (1 - TIME_EPS) * time), 0.8 - 0.4 * step / (num_samples - 1)


def decoded(folder: Path, steps: int = 5, length: int = 20, **options: Any) -> list[Pass]:
    """The passes of an answer of the published loop."""
    passes: list[Pass] = []
    decoder: Any = duo(
        steps,
        rho=0.3,
        read_out=True,
        read_out_sigma=0.7,
        first_temperature=0.8,
        last_temperature=0.4,
        cache="block",
    )
    plain = decoder.denoise

    def denoise(
        sequence: Sequence,
        canvas: Canvas,
        predictions: Predictions,
        positions: np.ndarray,
        is_last: bool,
    ) -> Any:
        logits = np.stack([predictions.logits(i).copy() for i in positions])
        assert canvas.block is not None
        temperature = decoder._sampler(canvas, predictions).temperature
        step = canvas.tokens.copy(), canvas.block[0], canvas.block_step
        passes.append(Pass(*step, torch.from_numpy(logits).double(), temperature))
        tokens, is_final = plain(sequence, canvas, predictions, positions, is_last)
        assert is_final == is_last
        return tokens, is_final

    decoder.denoise = denoise
    with LLM(folder, threads=1, cache_positions=128, **options) as llm:
        llm.generate([PROMPT], decoder=decoder, max_tokens=length, ignore_eos=True)
        assert llm.engine is not None
        llm.engine.check_integrity()
    return passes


def largest_difference(
    tensors: Tensors, passes: list[Pass], steps: int = 5, wrong: Wrong | None = None
) -> float:
    """Of the logits of the passes from those of the reference."""
    worst, belief = 0.0, None
    for one in passes:
        sigma, temperature = schedule(one.step, steps)
        belief = None if one.step == 0 else belief
        tokens = one.tokens[: one.first + BLOCK]
        expected = forward(tensors, tokens, one.first, sigma, belief, wrong)
        worst = max(worst, float((expected - one.logits).abs().max()))
        belief = (one.logits / temperature).softmax(-1)
    return worst


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_every_pass_equals_the_reference(tmp_path: Path, backend: str) -> None:
    if backend == "native" and load_library() is None:
        pytest.skip("no compiler")
    tensors = write(tmp_path)
    passes = decoded(tmp_path, backend=backend)
    assert [one.first for one in passes] == [13] * 5 + [21] * 5 + [29] * 5
    assert largest_difference(tensors, passes) < 2e-3
    for one in passes:
        assert one.temperature == pytest.approx(schedule(one.step, 5)[1])
    assert any((one.tokens[:29] != passes[5].tokens[:29]).any() for one in passes[6:10])


@pytest.mark.slow
def test_wrong_references_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write(tmp_path)
    passes = decoded(tmp_path, backend="torch")
    for name in ("one_time", "fresh_convolution", "causal", "unconditioned"):
        assert largest_difference(tensors, passes, wrong=Wrong(**{name: True})) > 0.01, name
    monkeypatch.setattr(UniformDenoiser, "predicted", lambda *arguments: None)
    assert largest_difference(tensors, decoded(tmp_path, backend="torch")) > 0.01


@pytest.mark.slow
def test_opens_with_the_published_decoder(tmp_path: Path) -> None:
    write(tmp_path)
    prompts = [PROMPT, [3, 9], list(range(2, 9))]
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 4}
    with LLM(tmp_path, threads=1, backend="torch") as llm:
        spec = llm.model.spec
        assert (spec.block_size, spec.has_causal_context, spec.mask_token) == (BLOCK, True, None)
        alone = [llm.generate([one], **options)[0] for one in prompts]
        assert [one.tokens for one in llm.generate(prompts, **options)] == [
            one.tokens for one in alone
        ]
        assert alone[0].stats.passes == 2 * 9
        for decoder in ("duo", "diffusion-gemma"):
            with pytest.raises(AnydecodeError, match="random tokens behind finished blocks"):
                llm.generate([PROMPT], decoder=decoder, max_tokens=8)


@pytest.mark.slow
def test_unused_rows_of_the_embedding_are_no_noise_and_no_text(tmp_path: Path) -> None:
    spec = spec_from_config({**PUBLISHED, "vocab_size": 65536})
    assert spec.num_noise_tokens == 64400 == spec.mask_token
    write(tmp_path)
    with LLM(tmp_path, threads=1, backend="torch") as llm:
        object.__setattr__(llm.model.spec, "num_noise_tokens", 20)
        decoder = "duo:cache=block,steps=3"
        tokens = llm.generate(
            [PROMPT], decoder=decoder, max_tokens=24, ignore_eos=True, temperature=5.0
        )[0].tokens
    assert max(tokens) < 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma_cond_dim": None}, "sigma_cond_dim"),
        ({"adaln_conditioning": False}, "adaln_conditioning is False"),
        ({"self_conditioning": False}, "self_conditioning is False"),
    ],
)
def test_other_kinds_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**PUBLISHED, **change})
