"""The adapter of the decoder regression: its losses, their gradients, and its use by the engine."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from anydecode import LLM
from anydecode.decoders.search.regression import Regression
from anydecode.errors import InvalidRequestError
from anydecode.models.loading import load_checkpoint
from anydecode.training import checkpoint
from anydecode.training.block_adapter import open_llama
from anydecode.training.regression import (
    DigitModel,
    Example,
    NumberRecipe,
    best_digits,
    train_numbers,
)
from anydecode.training.tokenizer import build_tokenizer
from anydecode.training.transformer import Shape, Transformer

TOKENIZER = build_tokenizer()
SHAPE = Shape(TOKENIZER.get_vocab_size(), width=32, layers=2, heads=4, hidden=48, kv_heads=2)
NAMES = {"Ada": 0.25, "Ben": 0.5, "Leo": 0.75}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Transformer(SHAPE)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    checkpoint.save_llama(tmp_path / "base", model.state_dict(), SHAPE, TOKENIZER)
    return tmp_path / "base"


class Bandit:
    """One digit of three, whose logits are the parameters; the other tokens are 3 and 4."""

    def __init__(self) -> None:
        self.logits = torch.tensor([0.3, -0.2, 0.5, 2.0, -1.0], requires_grad=True)

    def __call__(self, rows: torch.Tensor, *, causal: bool, output_rows: Any) -> torch.Tensor:
        return self.logits.expand(*output_rows[0].shape, 5)


def reward_gradient(baseline: float) -> torch.Tensor:
    """The gradient of the expected reward, less that of the baseline, from all three actions."""
    law = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    rewards = torch.tensor([-((digit / 3 - 0.4) ** 2) for digit in range(3)])
    (law.softmax(-1) * (rewards - baseline)).sum().backward()  # type: ignore[no-untyped-call]
    assert law.grad is not None
    return law.grad


def test_the_loss_of_rewards_has_the_gradient_of_the_expected_reward() -> None:
    """The mean over many samples; the baseline does not change it."""
    bandit = Bandit()
    numbers = DigitModel(bandit, Regression(base=3, digits=1), [[0, 1, 2]])
    recipe, generator = NumberRecipe(samples=40_000), torch.Generator().manual_seed(1)
    loss = numbers.reward_loss([Example([4], (1,), 0.4)], recipe, generator)
    loss.backward()  # type: ignore[no-untyped-call]
    assert bandit.logits.grad is not None
    expected = -reward_gradient(0.0)
    assert torch.allclose(expected, -reward_gradient(7.0), atol=1e-6)
    assert torch.allclose(bandit.logits.grad[:3], expected, atol=2e-3)
    assert expected.abs().min() > 4e-3 and bandit.logits.grad[3:].abs().max() == 0


def test_the_best_digits_behind_every_beginning() -> None:
    """Those with which the number comes nearest to the true one, by trying all."""
    for true in ((1, 2, 0), (0, 0, 2), (2, 1, 1)):
        codes = torch.cartesian_prod(*[torch.arange(3)] * 3)
        found = best_digits(codes, torch.tensor([true] * 27), [3] * 3)
        for code, best in zip(codes.tolist(), found.tolist(), strict=True):
            for place in range(3):
                if tuple(code[:place]) == true[:place]:
                    assert best[place] == true[place]
                else:
                    is_larger = tuple(code[:place]) > true[:place]
                    assert best[place] == (0 if is_larger else 2)


def test_the_expert_term_is_the_cross_entropy_of_the_best_digits() -> None:
    bandit = Bandit()
    numbers = DigitModel(bandit, Regression(base=3, digits=1), [[0, 1, 2]])
    losses = []
    for weight in (0.0, 0.5):
        recipe, generator = NumberRecipe(samples=50, expert=weight), torch.Generator()
        generator.manual_seed(1)
        losses.append(numbers.reward_loss([Example([4], (1,), 0.4)], recipe, generator))
    added = -0.5 * float(bandit.logits.detach()[:3].log_softmax(0)[1])
    assert float((losses[1] - losses[0]).detach()) == pytest.approx(added, rel=1e-4)


def test_the_gradient_of_a_group_is_divided_by_the_spread_of_its_rewards() -> None:
    """Over many samples: the gradient of the expected reward, divided by its deviation."""
    bandit = Bandit()
    numbers = DigitModel(bandit, Regression(base=3, digits=1), [[0, 1, 2]])
    recipe = NumberRecipe(samples=40_000, baseline="group")
    generator = torch.Generator().manual_seed(2)
    numbers.reward_loss([Example([4], (1,), 0.4)], recipe, generator).backward()  # type: ignore[no-untyped-call]
    law = torch.tensor([0.3, -0.2, 0.5]).softmax(-1)
    rewards = torch.tensor([-((digit / 3 - 0.4) ** 2) for digit in range(3)])
    spread = float(((law * rewards**2).sum() - (law * rewards).sum() ** 2).sqrt())
    assert bandit.logits.grad is not None
    assert torch.allclose(bandit.logits.grad[:3], -reward_gradient(0.0) / spread, atol=2e-2)
    assert (reward_gradient(0.0) / spread).abs().min() > 6e-2


def test_rewards_of_other_inputs_do_not_count() -> None:
    """Each group has its own mean: inputs with far numbers change nothing."""
    bandit = Bandit()
    numbers = DigitModel(bandit, Regression(base=3, digits=1), [[0, 1, 2]])
    recipe = NumberRecipe(samples=3000, baseline="group")
    gradients = []
    for value in (0.4, 40.0):
        examples = [Example([4], (1,), 0.4), Example([4], (1,), value)]
        bandit.logits.grad = None
        generator = torch.Generator().manual_seed(3)
        numbers.reward_loss(examples, recipe, generator).backward()  # type: ignore[no-untyped-call]
        assert bandit.logits.grad is not None
        gradients.append(bandit.logits.grad.abs().max())
    assert max(gradients) < 1


def test_the_divergence_is_from_the_model_before() -> None:
    """KL(before, now) by hand, and its gradient, the difference of the probabilities."""
    bandit = Bandit()
    numbers = DigitModel(bandit, Regression(base=3, digits=1), [[0, 1, 2]])
    old = torch.tensor([[-0.5, 1.0, 0.0]]).log_softmax(-1)
    recipes = [NumberRecipe(samples=50, divergence=weight) for weight in (0.0, 2.0)]
    losses, gradients = [], []
    for recipe in recipes:
        bandit.logits.grad = None
        generator = torch.Generator().manual_seed(1)
        loss = numbers.reward_loss(
            [Example([4], (1,), 0.4)], recipe, generator, lambda prompts, codes: [old]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        assert bandit.logits.grad is not None
        gradients.append(bandit.logits.grad[:3].clone())
    law = bandit.logits.detach()[:3].log_softmax(-1)
    expected = float((old[0].exp() * (old[0] - law)).sum())
    assert losses[1] - losses[0] == pytest.approx(2 * expected, rel=1e-4)
    assert torch.allclose(gradients[1] - gradients[0], 2 * (law.exp() - old[0].exp()), atol=1e-5)


@pytest.mark.slow
def test_a_divergence_keeps_the_model_where_it_was(folder: Path, tmp_path: Path) -> None:
    """Steps on errors at a high rate, with a large weight of the divergence."""
    pairs = [(f"copy {name}:", 100 * value) for name, value in NAMES.items()] * 4
    recipe = NumberRecipe(
        steps=40, reward_steps=20, samples=4, rank=4, batch=6, rate=2e-2, reward_rate=2e-2,
        baseline="group", divergence=1000.0,
    )  # fmt: skip
    decoder = Regression(digits=2, high=100.0)
    errors = train_numbers(load_checkpoint(folder), pairs, decoder, tmp_path / "out", recipe)
    assert errors.rewarded <= errors.supervised + 1


def test_losses_equal_those_of_one_prompt_at_a_time(folder: Path) -> None:
    """Prompts of other lengths share a pass."""
    model = open_llama(load_checkpoint(folder))
    decoder = Regression(digits=2)
    digit_tokens = [TOKENIZER.encode(str(digit)).ids[0] for digit in range(10)]
    numbers = DigitModel(model, decoder, [digit_tokens] * 2)
    prompts = [TOKENIZER.encode(text).ids for text in ("copy Ada:", "copy Ada Ben Leo:")]
    codes = torch.tensor([[3, 1], [4, 1]])
    with torch.no_grad():
        examples = [Example(prompt, tuple(code), 0.0)
                    for prompt, code in zip(prompts, codes.tolist(), strict=True)]  # fmt: skip
        entropy, masked = 0.0, []
        for prompt, code in zip(prompts, codes.tolist(), strict=True):
            tokens = [*prompt, *(digit_tokens[digit] for digit in code)]
            rows = model(torch.tensor([tokens]), causal=True)[0, len(prompt) - 1 : -1]
            for row, digit in zip(rows, code, strict=True):
                entropy -= float(row.log_softmax(-1)[digit_tokens[digit]]) / 4
            laws = rows[:, digit_tokens].log_softmax(-1)
            masked.append(float(laws[0, code[0]] + laws[1, code[1]]))
        assert float(numbers.cross_entropy(examples)) == pytest.approx(entropy, rel=1e-4)
        found = numbers.log_probabilities(prompts, codes).tolist()
        assert found == pytest.approx(masked, rel=1e-4)


@pytest.mark.slow
def test_the_engine_predicts_with_the_adapter(folder: Path, tmp_path: Path) -> None:
    pairs = [(f"copy {name}:", 100 * value) for name, value in NAMES.items()] * 4
    Random(0).shuffle(pairs)
    decoder = Regression(digits=2, high=100.0)
    recipe = NumberRecipe(steps=40, reward_steps=2, samples=2, rank=4, batch=6, rate=2e-2)
    losses: list[float] = []
    errors = train_numbers(
        load_checkpoint(folder), pairs, decoder, tmp_path / "numbers", recipe,
        lambda step, loss: losses.append(loss),
    )  # fmt: skip
    assert len(losses) == 42 and losses[39] < losses[0] / 4
    assert errors.supervised < 1 < errors.before
    with LLM(folder, dtype="float32", threads=1) as llm:
        llm.add_adapter("numbers", tmp_path / "numbers")
        for name, value in NAMES.items():
            found = llm.generate(f"copy {name}:", decoder=decoder, adapter="numbers").score
            assert found == pytest.approx(100 * value, abs=1)


def test_rewards_make_near_numbers_more_probable(folder: Path) -> None:
    """Of a number that is no code, the steps on errors make the nearest codes more probable."""
    model = Transformer(SHAPE)
    decoder = Regression(base=4, digits=2)
    digit_tokens = [TOKENIZER.encode(str(digit)).ids[0] for digit in range(4)]
    numbers = DigitModel(model, decoder, [digit_tokens] * 2)
    example = Example(TOKENIZER.encode("copy Ada:").ids, (0, 0), 0.6)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def mean_error() -> float:
        codes = numbers.codes([example.prompt] * 200, torch.Generator().manual_seed(5))
        return float(((numbers.values(codes) - 0.6) ** 2).mean())

    before = mean_error()
    for _ in range(20):
        optimizer.zero_grad()
        loss = numbers.reward_loss([example], NumberRecipe(samples=32), generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert mean_error() < before / 2


def test_the_command_trains_and_prints_the_errors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from anydecode.cli.main import run

    data, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    data.write_text('{"prompt": "copy Ada:", "number": 3}\n{"prompt": "Ben", "number": 4}\n')
    arguments = ["train", "regression", "--model", str(folder), "--data", str(data), "--out"]
    arguments += [str(out), "--steps", "1", "--reward-steps", "1", "--samples", "2", "--batch", "2"]
    arguments += ["--baseline", "group", "--divergence", "0.1"]
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--decoder", "regression:digits=1,high=10", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(out) and {"before", "supervised", "rewarded"} < found.keys()
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 16
    assert not (out / "block.json").exists()
    with pytest.raises(SystemExit):
        run([*arguments, "--decoder", "beam"])
    assert "the decoder regression" in capsys.readouterr().err


@pytest.mark.parametrize(
    "pairs, recipe, message",
    [
        ([("a", 0.5)], {}, "at least 2 pairs, not 1"),
        ([("a " * 600, 0.5)] * 2, {}, "tokens; it may have 1 to 509"),
        ([("a", 0.5)] * 2, {"samples": 0}, "must be 1 or more"),
        ([("a", 0.5)] * 2, {"steps": 0}, "not both 0"),
        ([("a", 0.5)] * 2, {"baseline": "mean"}, "choose from greedy, group"),
        ([("a", 0.5)] * 2, {"divergence": -1.0}, "divergence must be 0 or more"),
        ([("a", 0.5)] * 2, {"baseline": "group", "samples": 1, "reward_steps": 1}, "of 2 or more"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    folder: Path, tmp_path: Path, pairs: list[tuple[str, float]], recipe: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(InvalidRequestError, match=message):
        train_numbers(
            load_checkpoint(folder), pairs, Regression(), tmp_path / "a", NumberRecipe(**recipe)
        )
    assert not (tmp_path / "a").exists()
