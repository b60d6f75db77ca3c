"""Consistency training of blocks: trajectories are Jacobi iterations, the loss is its definition,
runs go on, and trained blocks settle in fewer passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from anydecode import LLM
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training import block_consistency
from anydecode.training.block_adapter import open_llama
from anydecode.training.block_consistency import (
    BlockRecipe,
    BlockRun,
    Trajectory,
    block_loss,
    settle,
    trajectories,
)
from anydecode.training.transformer import Shape, Transformer
from interrupted_runs import assert_resumes
from train_commands import train_command

BLOCKS: list[Trajectory] = [
    ([3, 4, 5], [[7, 7], [8, 7]], [8, 9, 10]),
    ([6], [[1], [2]], [2, 3]),
]


def _model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(Shape(50, width=32, layers=2, heads=2, hidden=48))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(4)
    return model.eval()


def test_trajectories_are_jacobi_iterations_up_to_the_end_of_the_answer(model: Path) -> None:
    checkpoint = load_checkpoint(str(model))
    network = open_llama(checkpoint)
    prompts = [[3, 4, 5, 9], [7, 2]]
    with LLM(checkpoint.path) as llm:
        answers = [llm.generate(one, max_tokens=14, temperature=0.0).tokens for one in prompts]
    found = trajectories(checkpoint, list(zip(prompts, answers, strict=True)), 6, seed=0)
    for prompt, answer, blocks in zip(prompts, answers, found, strict=True):
        assert [token for _, _, tokens in blocks for token in tokens] == answer
        text = list(prompt)
        for before, states, tokens in blocks:
            assert before == text and set(states[0]) <= set(prompt)
            for state, following in zip(states, [*states[1:], tokens[:-1]], strict=True):
                logits = network(torch.tensor([[*text, *state]]), causal=True)[0, len(text) - 1 :]
                assert logits.argmax(-1).tolist()[:-1] == following
            text += tokens


def test_the_loss_is_its_definition() -> None:
    """Row by row; the gradient does not reach the last state's prediction by the divergence."""
    model, states = _model(), [[7, 7], [1]]
    rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for (text, _, tokens), state in zip(BLOCKS, states, strict=True):
        for row, token in enumerate(tokens):
            last, found = (
                model(torch.tensor([[*text, *one[:row]]]), causal=True)[0, -1]
                for one in (tokens[:-1], state)
            )
            rows.append((last, found, token))
    apart = [
        functional.kl_div(found.log_softmax(-1), last.detach().softmax(-1), reduction="sum")
        for last, found, _ in rows
    ]
    text = [-last.log_softmax(-1)[token] for last, _, token in rows]
    expected = (sum(apart) + 0.3 * sum(text)) / len(rows)
    loss = block_loss(model, BLOCKS, states, 0.3)
    torch.testing.assert_close(loss, expected)
    weights = list(model.parameters())
    for one, other in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_block_settles_at_plain_decoding() -> None:
    model = _model()
    for text, states, tokens in BLOCKS:
        num_passes, found = settle(model, (text, states, tokens))
        plain = list(text)
        for _ in tokens:
            plain.append(int(model(torch.tensor([plain]), causal=True)[0, -1].argmax()))
        assert found == plain[len(text) :] and 1 <= num_passes <= len(tokens)


@pytest.mark.parametrize(
    "options", [{}, {"steps": 1, "block": 0}, {"steps": 1, "text_weight": -1.0}], ids=str
)
def test_bad_recipes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        BlockRecipe(**options)


@pytest.mark.slow
def test_a_run_in_two_parts_gives_the_model_of_one(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(model))

    def opened(folder: str, block: int = 4) -> BlockRun:
        recipe = BlockRecipe(steps=3, answers=4, tokens=8, block=block)
        return BlockRun(checkpoint, tmp_path / folder, recipe)

    assert_resumes(opened)
    with pytest.raises(InvalidRequestError, match="another rank, block or model"):
        opened("parts", block=5)


@pytest.mark.slow
def test_the_command_writes_a_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    log = train_command(
        capsys, "depth --recipe ceed --answers 4 --steps 2 --block 4", model=model, out=out
    )
    assert log["steps"] == 2 and log["history"][0]["held_out"]["agreement"] == 1
    with LLM(log["path"]) as llm:
        plain, found = (
            llm.generate([3, 4, 5], decoder=key, max_tokens=8, ignore_eos=True).tokens
            for key in ("autoregressive", "ceed:block=4,passes=4")
        )
    assert found == plain


@pytest.mark.slow
def test_trained_blocks_settle_in_fewer_passes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with the cross-entropy alone."""

    def passes(folder: str) -> tuple[int, int]:
        recipe = BlockRecipe(steps=200, answers=6, tokens=12, block=6, rate=3e-3)
        made = BlockRun(load_checkpoint(str(model)), tmp_path / folder, recipe)
        blocks = [one for parts in made.blocks[1:] for one in parts]
        before = sum(settle(made.model, one)[0] for one in blocks)
        made.train()
        return before, sum(settle(made.model, one)[0] for one in blocks)

    before, after = passes("consistency")
    assert after <= 0.85 * before
    monkeypatch.setattr(block_consistency, "divergence", lambda p, q: 0 * q.sum())
    before, after = passes("text")
    assert after > 0.85 * before
