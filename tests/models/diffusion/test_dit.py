"""GIDD's and Duo's diffusion transformers, whose layers read the time, in their published layouts:
every pass of their decoders against a forward pass in plain torch at that pass's time."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.diffusion.canvas import Canvas
from anydecode.decoders.diffusion.denoiser import Denoiser
from anydecode.decoders.diffusion.predictions import Predictions
from anydecode.errors import CheckpointError, UnsupportedCombinationError
from anydecode.models.scripted import ByteTokenizer
from dit_checkpoints import DUO, GIDD, V, reference_dit, write_dit

PROMPT = [3, 14, 15, 9, 26, 5]
LENGTH, STEPS = 6, 4
Pass = tuple[int, list[int], dict[int, np.ndarray]]


def open_model(folder: Path, **options: Any) -> LLM:
    chosen = {"tokenizer": ByteTokenizer(), "threads": 1, "cache_positions": 256} | options
    return LLM(str(folder), **chosen)


def recorded(folder: Path, decoder: str, monkeypatch: pytest.MonkeyPatch, backend: str) -> Any:
    """(step, tokens, logits by position) of every pass, and the text's tokens."""
    passes: list[Pass] = []
    original = Denoiser.predictions

    def record(
        self: Denoiser, sequence: Any, canvas: Canvas, scores: Any, rows: range | None = None
    ) -> Predictions:
        found = original(self, sequence, canvas, scores, rows)
        logits = {int(p): found.logits(p).copy() for p in found.positions}
        passes.append((canvas.step, canvas.tokens.tolist(), logits))
        return found

    monkeypatch.setattr(Denoiser, "predictions", record)
    with open_model(folder, backend=backend) as llm:
        output = llm.generate(
            PROMPT, decoder=decoder, max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True
        )
    return passes, output.tokens


def largest_difference(tensors: dict[str, torch.Tensor], passes: list[Pass], values: Any) -> float:
    """The largest difference of any logit, where the time's embedding receives `values[step]`."""
    differences = []
    for step, tokens, logits in passes:
        reference = reference_dit(tensors, tokens, None, values[min(step, len(values) - 1)])
        for position, row in logits.items():
            allowed = np.isfinite(row)  # the mask is not
            assert allowed.sum() >= V - 1
            differences.append(float(np.abs(row - reference[position])[allowed].max()))
    return max(differences)


TIMES = [1 - step / STEPS for step in range(STEPS)]
#: Config, decoder, what the embedding of times receives in each pass, and the same if wrong.
CASES: dict[str, tuple[dict[str, Any], str, list[float], list[list[float]]]] = {
    "gidd": (
        GIDD,
        f"gidd:steps={STEPS},corrections=3,mask=63",
        [1 - 1e-4, *TIMES[1:], 0.01],
        [[1 - 1e-4, *TIMES[1:], 1e-4], [0.0], [-math.log(1 - 0.999 * t) for t in TIMES]],
    ),
    "duo": (
        DUO,
        f"duo:steps={STEPS}",
        [-math.log(1 - 0.999 * t) for t in TIMES],
        [TIMES, [0.0], [-math.log(1 - 0.999 * t) for t in TIMES[1:]]],
    ),
}


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", CASES)
def test_every_pass_reads_its_time(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, decoder, values, wrong_values = CASES[name]
    tensors = write_dit(tmp_path, config)
    passes, tokens = recorded(tmp_path, decoder, monkeypatch, backend)
    assert len(passes) >= STEPS and len(tokens) == LENGTH
    assert largest_difference(tensors, passes, values) < 1e-3
    for wrong in wrong_values:
        assert largest_difference(tensors, passes, wrong) > 1e-2


def test_requests_at_different_times_share_passes(tmp_path: Path) -> None:
    """The text of each is the one that it has alone."""
    write_dit(tmp_path, GIDD)
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
    lengths = [4, 6, 9]

    async def answer(llm: LLM, prompt: list[int], length: int) -> list[int]:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
        decoder = "gidd:corrections=2,mask=63"
        output = await llm.agenerate(prompt, decoder=decoder, max_tokens=length, **options)
        return output.tokens

    async def together(llm: LLM) -> list[list[int]]:
        pairs = zip(prompts, lengths, strict=True)
        return await asyncio.gather(*(answer(llm, *pair) for pair in pairs))

    with open_model(tmp_path) as llm:
        alone = [asyncio.run(answer(llm, *p)) for p in zip(prompts, lengths, strict=True)]
        assert asyncio.run(together(llm)) == alone


@pytest.mark.parametrize("decoder", ["llada", "wino"])
def test_other_unmasking_methods_read_the_share_of_masks(
    decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_dit(tmp_path, GIDD)
    passes, _ = recorded(tmp_path, f"{decoder}:mask=63", monkeypatch, "native")
    if decoder == "wino":
        passes = passes[::2]  # every second one is that of the rows that do not see themselves
    shares = [tokens.count(63) / LENGTH for _, tokens, _ in passes]
    assert largest_difference(tensors, passes, [1 - 1e-4, *shares[1:]]) < 1e-3
    assert largest_difference(tensors, passes, [0.5]) > 1e-2


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_of_rows_are_refused(cache: str, tmp_path: Path) -> None:
    write_dit(tmp_path, GIDD)
    with (
        open_model(tmp_path) as llm,
        pytest.raises(UnsupportedCombinationError, match="use cache=none"),
    ):
        llm.generate(PROMPT, decoder=f"llada:cache={cache},block=4,mask=63", max_tokens=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "causal=true is not supported"),
        ({"p_uniform": 1.5}, "p_uniform"),
        ({"t_eps": 0}, "t_eps"),
        ({"timestep_cond_dim": 13}, "time_embedding|sigma_map"),
    ],
)
def test_wrong_configs_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_dit(tmp_path, GIDD)
    (tmp_path / "config.json").write_text(json.dumps({**GIDD, **change}))
    with pytest.raises(CheckpointError, match=message):
        open_model(tmp_path)
