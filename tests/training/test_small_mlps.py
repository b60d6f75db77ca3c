"""Small MLPs that learn to take the place of a model's own, at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.models.small_mlps import SmallMlps
from anydecode.training.small_mlps import SmallMlpRecipe, SmallMlpRun, mixed_logits
from frozen_models import TEXTS, frozen_model, random_mlps
from interrupted_runs import assert_resumes
from train_commands import train_command


def test_tokens_run_the_mlps_that_they_have_drawn() -> None:
    """None, all, and one of a layer at one token, which moves later rows too."""
    model, mlps = frozen_model(), random_mlps(frozen_model(), [1, 2])
    rows = TEXTS[1][:, 1:]
    none = torch.zeros(2, 2, 4, dtype=torch.bool)
    full = model(TEXTS[0][:, :-1], causal=True)[rows]
    torch.testing.assert_close(mixed_logits(model, mlps, *TEXTS, none), full)
    one = none.clone()
    one[1, 0, 2] = True  # the third token of the first text, in layer 2
    found = mixed_logits(model, mlps, *TEXTS, one)
    assert not torch.allclose(found[0], full[0]) and not torch.allclose(found[1], full[1])
    torch.testing.assert_close(found[2:], full[2:])


def test_the_engine_computes_what_was_trained(tmp_path: Path) -> None:
    model = frozen_model()
    mlps = random_mlps(model, [1])
    names = ("norm", "gate", "up", "down")
    weights = dict(mlps["1"].named_parameters())
    parts = {name: {1: weights[f"{name}.weight"].numpy()} for name in names}
    SmallMlps(**parts, fingerprint="a model").save(tmp_path / "file")
    loaded, x = SmallMlps.load(tmp_path / "file"), torch.randn(3, 32)
    found = loaded(1, x.numpy(), model.blocks[1].ff_norm.eps)
    np.testing.assert_allclose(found, mlps["1"](x).numpy(), atol=1e-5)


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_mlps_of_one(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(model))

    def opened(folder: str, width: int = 8) -> SmallMlpRun:
        recipe = SmallMlpRecipe(steps=3, answers=4, tokens=8, width=width, layers=4)
        return SmallMlpRun(checkpoint, tmp_path / folder, recipe)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="another model or width"):
        opened("parts", width=9)


@pytest.mark.slow
def test_trained_mlps_predict_better_than_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    log = train_command(
        capsys,
        "depth --recipe duo-llm-mlps --answers 64 --tokens 16 --steps 120 --width 32 --layers 12"
        " --rate 5e-3",
        out=out,
    )
    first, *_, last = (one["held_out"] for one in log["history"] if "held_out" in one)
    assert last["half of them small"] < 0.8 * first["half of them small"], (first, last)
    with LLM("tiny-autoregressive") as llm:
        decoder = f"duo-llm:layers=12,small={log['path']}"
        found = llm.generate("copy Ada:", decoder=decoder, max_tokens=2, trace=True)
        assert (
            found.trace is not None
            and len(found.trace[0]["losses"]) == 2**llm.model.spec.num_layers
        )
        with pytest.raises(InvalidRequestError, match="small MLPs are those of layers"):
            llm.generate("copy Ada:", decoder=f"duo-llm:layers=2,small={log['path']}")
