"""MLP routers learn which MLPs a token does without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.models.mlp_routers import MlpRouters
from anydecode.models.small_mlps import SmallMlps
from anydecode.training.layer_routers import Routers
from anydecode.training.mlp_routers import MlpRouterRecipe, MlpRouterRun, routed_logits
from anydecode.training.small_mlps import SmallMlpRecipe, SmallMlpRun, modules_of
from frozen_models import TEXTS, frozen_model, random_mlps
from interrupted_runs import assert_resumes, trained
from train_commands import train_command


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("has_small", [False, True], ids=["none", "small"])
def test_mlps_of_answers_are_mixed_with_what_runs_in_their_place(
    temperature: float, has_small: bool
) -> None:
    """By the sigmoid of the score over the temperature, or one of both, from the state behind the
    layer's attention; the prompt's are not."""
    model, routers = frozen_model(), Routers([1, 2], 32, bias=0.0)
    small = random_mlps(model, [1, 2]) if has_small else None
    with torch.no_grad():
        routers.weight.normal_(0, 0.3)
        logits, weights = routed_logits(model, routers, small, *TEXTS, temperature)
        expected, found = [], []
        for text, is_answer in zip(*TEXTS, strict=True):
            x = model.transformer["wte"](text[None, :-1])
            rope = model.cos[:4], model.sin[:4]
            for layer, block in enumerate(model.blocks):
                x = block.attend(x, rope, True, None)
                added = block.mlp(x)
                if layer in (1, 2):
                    other = small[str(layer)](x) if small else torch.zeros_like(x)
                    for row in range(4):
                        if not is_answer[row + 1]:
                            continue
                        score = x[0, row] @ routers.weight[layer - 1]
                        share = torch.sigmoid(score / temperature) if temperature else score >= 0
                        added[0, row] = added[0, row] * share + other[0, row] * (1 - share * 1.0)
                        found.append((layer, float(share)))
                x = x + added
            rows = x[0][is_answer[1:]]
            expected.append(model.transformer["ff_out"](model.transformer["ln_f"](rows)))
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)
    for layer in (1, 2):
        shares = torch.tensor([share for one, share in found if one == layer])
        torch.testing.assert_close(weights[layer - 1], shares, atol=1e-5, rtol=1e-5)


def _recipe(**options: Any) -> MlpRouterRecipe:
    return MlpRouterRecipe(**{"steps": 3, "answers": 4, "tokens": 4, **options})


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_routers_of_one(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")

    def opened(folder: str, **options: Any) -> MlpRouterRun:
        return MlpRouterRun(checkpoint, tmp_path / folder, _recipe(**options))

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="other layers"):
        opened("parts", layers=2)


@pytest.mark.slow
def test_tokens_run_the_share_of_mlps_that_is_asked_for(tmp_path: Path) -> None:
    """Of four layers, nearly none, two or nearly all."""
    checkpoint = load_checkpoint("tiny-autoregressive")
    found = []
    for share in (0.0, 0.5, 1.0):
        recipe = _recipe(steps=80, share=share, penalty=1000.0, rate=0.1, layers=4, answers=16)
        made = MlpRouterRun(checkpoint, tmp_path / str(share), recipe)
        made.train()
        found.append(sum(made.results()["runs"]) / len(made.routers.layers))
    assert found[0] < 0.2 < 0.3 < found[1] < 0.7 < 0.8 < found[2], found


@pytest.mark.slow
def test_routers_learn_beside_small_mlps(tmp_path: Path) -> None:
    """And those of other layers are refused."""
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = SmallMlpRecipe(steps=2, answers=4, tokens=4, width=8, layers=2)
    mlps = trained(SmallMlpRun(checkpoint, tmp_path / "mlps", recipe), None)
    small = SmallMlps.load(mlps.path)
    for one, other in zip(mlps.trained, modules_of(mlps.model, small).parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other)
    run = trained(MlpRouterRun(checkpoint, tmp_path / "run", _recipe(layers=2), small), None)
    with LLM("tiny-autoregressive") as llm:
        decoder = f"duo-llm:layers=2,routers={run.path}"
        options: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "trace": True}
        found = llm.generate("copy Ada:", decoder=f"{decoder},small={mlps.path}", **options)
        assert found.trace is not None and "routed_loss" in found.trace[0]
        with pytest.raises(InvalidRequestError, match="learned 'MLP or small MLP', and no small"):
            llm.generate("copy Ada:", decoder=decoder, **options)
    with pytest.raises(InvalidRequestError, match="small MLPs are those of layers"):
        MlpRouterRun(checkpoint, tmp_path / "other", _recipe(layers=1), small)


@pytest.mark.slow
def test_the_command_writes_routers_and_a_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "run", tmp_path / "curve.svg"
    log = train_command(
        capsys,
        "depth --recipe duo-llm --answers 4 --tokens 8 --layers 2 --steps 2",
        out=out,
        plot=plot,
    )
    assert log["steps"] == 2 and plot.read_text().lstrip().startswith("<?xml")
    path = Path(log["path"])
    assert MlpRouters.load(path).target == "MLP or nothing"
    with LLM("tiny-autoregressive") as llm:
        options: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "trace": True}
        found = llm.generate("copy Ada:", decoder=f"duo-llm:layers=2,routers={path}", **options)
        for one in found.trace or ():
            number = sum(1 << layer - 1 for layer in one["routed_pattern"])
            assert llm.model.spec.num_layers == 4 and one["routed_loss"] == one["losses"][number]


@pytest.mark.parametrize(
    "options", [{"steps": None}, {"layers": 0}, {"penalty": -1.0}, {"share": 1.5}], ids=str
)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        _recipe(**options)
