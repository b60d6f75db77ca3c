"""Layer routers learn which layers a prompt does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.layer_routers import LayerRouters
from anydecode.models.loading import load_checkpoint
from anydecode.training.layer_routers import (
    LayerRouterRecipe,
    LayerRouterRun,
    Routers,
    routed_logits,
)
from frozen_models import TEXTS, frozen_model
from interrupted_runs import assert_resumes
from train_commands import train_command


@pytest.mark.parametrize("threshold", [None, 0.5, 0.7])
def test_layers_are_mixed_with_their_inputs(threshold: float | None) -> None:
    """By the mean probability over the prompt, or in full or not at all."""
    model, routers = frozen_model(), Routers([1, 2], 32)
    with torch.no_grad():
        routers.weight.normal_(0, 0.2)
        routers.bias[:] = torch.tensor([-4.0, 0.4])
        logits, gates = routed_logits(model, routers, *TEXTS, threshold)
        expected = []
        for text, is_answer in zip(*TEXTS, strict=True):
            x = model.transformer["wte"](text[None, :-1])
            rope = model.cos[:4], model.sin[:4]
            num_prompt = int(is_answer.long().argmax())
            for layer, block in enumerate(model.blocks):
                ran = block(x, rope, True, None)
                if layer in (1, 2):
                    scores = x[0, :num_prompt] @ routers.weight[layer - 1]
                    gate = torch.sigmoid(scores + routers.bias[layer - 1]).mean()
                    gate = gate if threshold is None else (gate >= threshold).float()
                    ran = gate * ran + (1 - gate) * x
                x = ran
            rows = x[0][is_answer[1:]]
            expected.append(model.transformer["ff_out"](model.transformer["ln_f"](rows)))
    assert gates.shape == (2, 2) and (gates[0] < 0.2).all()
    assert torch.allclose(logits, torch.cat(expected), atol=1e-5)


def _recipe(**options: Any) -> LayerRouterRecipe:
    return LayerRouterRecipe(**{"steps": 3, "answers": 4, "tokens": 4, "first": 1, **options})


def test_a_run_in_two_parts_gives_the_routers_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")

    def opened(folder: str) -> LayerRouterRun:
        return LayerRouterRun(checkpoint, tmp_path / folder, _recipe())

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="other layers"):
        LayerRouterRun(checkpoint, tmp_path / "parts", _recipe(first=2))


@pytest.mark.slow
def test_a_large_penalty_skips_layers(tmp_path: Path) -> None:
    """And none at all skips none."""
    checkpoint = load_checkpoint("tiny-autoregressive")
    for penalty in (0.0, 20.0):
        recipe = _recipe(steps=60, penalty=penalty, rate=0.1, last=0)
        made = LayerRouterRun(checkpoint, tmp_path / str(penalty), recipe)
        made.train()
        shares = made.results()["runs"]
        assert sum(shares) < len(shares) if penalty else sum(shares) > 0


def test_the_command_writes_routers_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys, "depth --recipe first-router --answers 4 --first 1 --steps 2", out=out, plot=plot
    )
    assert log["steps"] == 2 and plot.read_text().lstrip().startswith("<?xml")
    assert LayerRouters.load(Path(log["path"])).layers[0] == 1
    with LLM("tiny-autoregressive") as llm:
        decoder = f"first-router:threshold=0.95,routers={log['path']}"
        found = llm.generate("copy Ada:", decoder=decoder, max_tokens=4, ignore_eos=True)
        assert len(found.tokens) == 4


@pytest.mark.parametrize(
    "options", [{"steps": None}, {"tokens": 0}, {"penalty": -1.0}, {"answers": 1}], ids=str
)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        _recipe(**options)
