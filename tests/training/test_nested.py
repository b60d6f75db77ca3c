"""Sorted fine-tuning: its loss by its definition, its layers, and exits that predict better."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.checkpoint import Checkpoint
from anydecode.models.loading import load_checkpoint
from anydecode.training.block_adapter import open_llama
from anydecode.training.nested import NestedRecipe, NestedRun, first_layers, sorted_loss
from anydecode.training.own_answers import own_answers, padded
from anydecode.training.transformer import Shape, Transformer
from interrupted_runs import assert_resumes
from train_commands import train_command

SHAPE = Shape(50, width=32, layers=4, heads=2, hidden=48)
PROMPTS = ["copy Ada Ben Carl:", "sort Leo Ada Ben:", "reverse a b c d:"]


def _opened(folder: Path) -> Checkpoint:
    return load_checkpoint(str(folder))


@torch.no_grad()
def test_the_loss_is_the_mean_over_models_of_the_first_layers() -> None:
    torch.manual_seed(0)
    model = Transformer(SHAPE).eval()
    tokens, is_answer = padded([([5, 6, 7], [8, 9]), ([5], [6, 7, 8])])
    assert tokens.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]]
    assert is_answer.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    expected = []
    for depth in (2, 4):
        logits = first_layers(model, depth)(tokens, causal=True)
        rows = [logits[0, 2], logits[0, 3], logits[1, 0], logits[1, 1], logits[1, 2]]
        expected.append(functional.cross_entropy(torch.stack(rows), torch.tensor([8, 9, 6, 7, 8])))
    torch.testing.assert_close(sorted_loss(model, tokens, is_answer, [2, 4]), sum(expected) / 2)


@pytest.mark.parametrize("layers", [-1, 9])
def test_more_layers_than_there_are_are_refused(layers: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"layers is {layers}"):
        first_layers(Transformer(SHAPE), layers)


def test_answers_are_the_models_own() -> None:
    pairs = own_answers(load_checkpoint("tiny-autoregressive"), 3, tokens=10, seed=0)
    with LLM("tiny-autoregressive") as llm:
        plain = [llm.generate(p, max_tokens=10, temperature=0.0).tokens for p, _ in pairs]
    assert [answer for _, answer in pairs] == plain


def test_the_command_writes_a_draft_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "nested", tmp_path / "curve.svg"
    settings = "nested --layers 2 --exits 0.5 --answers 8 --steps"
    log = train_command(capsys, f"{settings} 2", out=out, plot=plot)
    assert log["steps"] == 2 and set(log["history"][0]["held_out"]) == {"1 layers", "2 layers"}
    assert "nats per token" in plot.read_text()
    assert train_command(capsys, f"{settings} 3", out=out)["steps"] == 3
    with pytest.raises(InvalidRequestError, match="other layers or exits"):
        NestedRun(
            load_checkpoint("tiny-autoregressive"),
            out,
            NestedRecipe(steps=3, layers=3, exits=(0.5,), answers=8),
        )
    whole = open_llama(load_checkpoint("tiny-autoregressive"))
    nested = open_llama(_opened(out))
    assert nested.shape.layers == 2
    name = "transformer.wte.weight"
    assert torch.equal(nested.state_dict()[name], whole.state_dict()[name])  # frozen
    with LLM("tiny-autoregressive", draft=str(out)) as llm:
        plain, drafted = (
            llm.generate(PROMPTS, decoder=key, max_tokens=16, temperature=0.8, seed=1)
            for key in ("autoregressive", "s2d")
        )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


@pytest.mark.slow
def test_training_lowers_the_loss_of_held_out_answers(tmp_path: Path) -> None:
    """At the early exit above all: the last one could predict before."""
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = NestedRecipe(steps=60, layers=3, exits=(0.67,), answers=128, batch=8, rate=5e-4)
    NestedRun(checkpoint, tmp_path, recipe).train()
    held_out = padded(own_answers(checkpoint, 24, tokens=64, seed=7))
    before, after = (
        [float(sorted_loss(model, *held_out, [stop])) for stop in (2, 3)]
        for model in (first_layers(open_llama(checkpoint), 3), open_llama(_opened(tmp_path)))
    )
    assert after[0] < 0.8 * before[0] and sum(after) < 0.9 * sum(before), (before, after)


def test_an_interrupted_run_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    checkpoint = load_checkpoint("tiny-autoregressive")
    recipe = NestedRecipe(steps=3, layers=2, exits=(0.5,), answers=8, tokens=12)
    runs = assert_resumes(lambda name: NestedRun(checkpoint, tmp_path / name, recipe))
    whole, resumed = ((run.folder / "model.safetensors").read_bytes() for run in runs)
    assert whole == resumed
