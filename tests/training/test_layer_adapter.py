"""Adapters that learn with the layers that routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.exit_files import model_fingerprint
from anydecode.models.families import load_network
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.loading import load_checkpoint
from anydecode.training.layer_adapter import LayerAdapterRecipe, LayerAdapterRun
from anydecode.training.layer_routers import routed_logits
from anydecode.training.own_answers import padded
from interrupted_runs import assert_resumes
from train_commands import train_command


def _recipe(**options: Any) -> LayerAdapterRecipe:
    return LayerAdapterRecipe(**{"steps": 3, "answers": 4, "tokens": 8, **options})


def _routers(file: Path, checkpoint: Checkpoint, layers: list[int], bias: float) -> Path:
    """A file of routers whose decisions depend on the prompt if `bias` is near 0."""
    network = load_network(checkpoint, None)
    random = np.random.default_rng(0)
    weight = random.standard_normal((len(layers), network.spec.hidden_size)).astype(np.float32)
    biases = np.full(len(layers), bias, np.float32)
    LayerRouters(layers, weight, biases, model_fingerprint(network)).save(file)
    return file


@pytest.mark.slow
def test_passes_are_those_of_the_decoder(model: Path, tmp_path: Path) -> None:
    """On texts that first-router generates, the most probable tokens are the texts', and without
    the routers some are not."""
    checkpoint = load_checkpoint(str(model))
    stored = _routers(tmp_path / "routers", checkpoint, [1, 2, 3, 4], 0.0)
    made = LayerAdapterRun(checkpoint, tmp_path / "run", _recipe(), stored)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    num_skipped, num_other = [], 0
    with LLM(checkpoint.path) as llm:
        for prompt in ([3, 4, 5], [7], [9, 2, 2, 30], [11, 6]):
            decoder = f"first-router:routers={stored}"
            found = llm.generate(prompt, decoder=decoder, trace=True, **options)
            texts = padded([(prompt, found.tokens)])
            with torch.no_grad():
                logits, gates = routed_logits(made.model, made.routers, *texts, threshold=0.5)
                full = made.model(texts[0], causal=True)[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == found.tokens
            assert found.trace is not None
            assert found.trace[-1]["mixers"] == 6 - int((gates < 0.5).sum())
            num_skipped.append(int((gates < 0.5).sum()))
            num_other += int((full.argmax(-1) != logits.argmax(-1)).sum())
    assert len(set(num_skipped)) > 1 and num_other


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_model_of_one(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(model))
    stored = _routers(tmp_path / "routers", checkpoint, [1, 2, 3, 4], 0.0)

    def opened(folder: str, **options: Any) -> LayerAdapterRun:
        return LayerAdapterRun(checkpoint, tmp_path / folder, _recipe(**options), stored)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="other routers"):
        opened("parts", threshold=0.6)


def test_bad_recipes_and_routers_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="threshold must be from 0 to 1"):
        _recipe(threshold=1.5)
    other = _routers(tmp_path / "other", load_checkpoint("tiny-autoregressive"), [1], 0.0)
    with pytest.raises(InvalidRequestError, match="another model"):
        LayerAdapterRun(load_checkpoint(str(model)), tmp_path / "run", _recipe(), other)


@pytest.mark.slow
def test_training_makes_up_for_skipped_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes a model with its routers, which agrees better with the full model."""
    pytest.importorskip("matplotlib")
    checkpoint = load_checkpoint("tiny-autoregressive")
    layers = list(range(1, load_network(checkpoint, None).spec.num_layers - 1))
    file, out, plot = tmp_path / "routers", tmp_path / "run", tmp_path / "curve.svg"
    _routers(file, checkpoint, layers, -40.0)
    log = train_command(
        capsys,
        "depth --recipe first-router-adapter --answers 128 --tokens 16 --steps 80 --rate 2e-3",
        routers=file,
        out=out,
        plot=plot,
    )
    first, *_, last = (one["held_out"]["answers"] for one in log["history"] if "held_out" in one)
    assert last < 0.8 * first, (first, last)
    assert plot.read_text().lstrip().startswith("<?xml")
    with LLM(log["path"]) as llm:
        found = llm.generate("copy Ada:", decoder="first-router", max_tokens=4, trace=True)
        assert found.trace is not None
        assert found.trace[0]["mixers"] == 2
