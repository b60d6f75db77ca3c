"""Oracle of distillspec (arXiv:2310.08461): the divergences by their definitions, their gradients
by finite differences, the acceptance of rejection sampling, the draft model's own answers against
enumeration, and the decoding with a trained draft model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anydecode import catalogue
from anydecode.certification.checks import Check, oracle_test
from anydecode.certification.chi_square import Text, fit
from anydecode.certification.oracles.recipes.draft_texts import (
    TARGET,
    Pair,
    distributions,
    drafted_text,
    log_loss,
    opened,
)
from anydecode.certification.oracles.transformer import softmax
from anydecode.models.loading import load_checkpoint
from anydecode.models.network import Network
from anydecode.models.opening import check_torch
from anydecode.training.recipes.draft_recipe import DIVERGENCES, DraftRecipe

BETA = 0.3


def defined(name: str, target: Sequence[float], draft: Sequence[float]) -> float:
    """A divergence of two distributions, token by token."""
    total = 0.0
    for p, q in zip(target, draft, strict=True):
        m = BETA * p + (1 - BETA) * q
        if name == "forward-kl":
            total += p * math.log(p / q)
        elif name == "reverse-kl":
            total += q * math.log(q / p)
        elif name == "tv":
            total += abs(p - q) / 2
        else:
            total += BETA * p * math.log(p / m) + (1 - BETA) * q * math.log(q / m)
    return total


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random logits of a target and of a draft model, float64 `[3, 7]`."""
    draw = np.random.default_rng(seed)
    return draw.normal(0, 1.5, (3, 7)), draw.normal(0, 1.5, (3, 7))


def of_rows(name: str, target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """`defined` for each row of logits."""
    pairs = zip(softmax(target), softmax(draft), strict=True)
    return np.array([defined(name, p, q) for p, q in pairs])


def slopes(name: str, target: np.ndarray, draft: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of the sum of a divergence by the draft model's logits, by differences."""
    gradient = np.empty_like(draft)
    for index in np.ndindex(*draft.shape):
        ends = []
        for sign in (1, -1):
            moved = draft.copy()
            moved[index] += sign * step
            ends.append(of_rows(name, target, moved).sum())
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def losses() -> Iterator[Check]:
    """The divergences, their gradients, the acceptance, and the mean over answers."""
    import torch

    from anydecode.training.divergences import acceptance, divergence

    logits = rows(1)
    target, draft = map(torch.from_numpy, logits)
    for name in DIVERGENCES:
        learned = draft.clone().requires_grad_(True)
        found = divergence(name, target, learned, BETA)
        found.sum().backward()  # type: ignore[no-untyped-call]
        values = found.detach().numpy()
        yield Check(f"{name} is its definition", np.allclose(values, of_rows(name, *logits)))
        assert learned.grad is not None
        yield Check(
            f"the gradient of {name} is that of finite differences",
            np.allclose(learned.grad.numpy(), slopes(name, *logits), atol=1e-7),
        )
    p, q = map(softmax, logits)
    accepted = [
        sum(b * min(1.0, a / b) for a, b in zip(*pair, strict=True))
        for pair in zip(p, q, strict=True)
    ]
    yield Check(
        "the acceptance is that of rejection sampling",
        np.allclose(acceptance(target, draft).numpy(), accepted),
    )


def mean_loss(
    target: Network, draft: Network, pairs: Sequence[Pair], name: str = "forward-kl"
) -> float:
    """A divergence of answers, or the cross-entropy of their tokens: the mean over tokens of each,
    and the mean of these."""
    if name == "cross-entropy":
        return log_loss(draft, pairs)
    means = []
    for prompt, answer in pairs:
        text = [*prompt, *answer][:-1]
        p, q = (distributions(one, text)[len(prompt) - 1 :] for one in (target, draft))
        losses = [defined(name, *rows) for rows in zip(p, q, strict=True)]
        means.append(sum(losses) / len(losses))
    return sum(means) / len(means)


def likelihood_ratio(target: Network, draft: Network, pairs: Sequence[Pair]) -> float:
    """The mean, over tokens of answers, of the logarithm of the draft model's probability by the
    target's: above 0 for the draft model's answers, below 0 for the target's."""
    ratios = []
    for prompt, answer in pairs:
        text = [*prompt, *answer]
        p, q = (distributions(one, text[:-1]) for one in (target, draft))
        for position in range(len(prompt) - 1, len(text) - 1):
            token = text[position + 1]
            ratios.append(math.log(q[position, token] / p[position, token]))
    return sum(ratios) / len(ratios)


def sampled(folder: Path) -> Iterator[Check]:
    """Two tokens behind prompts of two lengths, against enumeration."""
    import torch

    from anydecode.training.block_adapter import open_llama
    from anydecode.training.draft_sampling import sample_answers

    checkpoint = load_checkpoint(folder)
    network, model = opened(folder), open_llama(checkpoint)
    prompts = [40, 50, 60, 70, 80], [90, 100]
    generator = torch.Generator().manual_seed(5)
    answers = sample_answers(model, [*prompts] * 400, 2, (), generator)
    for number, prompt in enumerate(prompts):
        first = distributions(network, prompt)[-1]
        likely = np.flatnonzero(first > 0.02)
        expected: dict[Text, float] = {
            (int(one), int(other)): first[one] * p
            for one in likely
            for other, p in enumerate(distributions(network, [*prompt, int(one)])[-1])
        }
        expected[()] = 1 - sum(expected.values())  # all others
        seen: list[Text] = [tuple(answer) for answer in answers[number::2]]
        result = fit([one if one in expected else () for one in seen], expected)
        name = f"own answers behind {len(prompt)} tokens have the draft model's distribution"
        yield Check(name, result.passed, str(result))


def run_of(folder: Path, recipe: DraftRecipe, pairs: list[Pair] | None = None, **given: Any) -> Any:
    """A run on the target."""
    from anydecode.training.draft_model import DraftModelRun, DraftOptions

    settings = DraftOptions(answers=16, tokens=12, batch=8, draft=recipe, **given)
    return DraftModelRun(load_checkpoint(TARGET), folder, settings, pairs=pairs)


def of_default_parts(folder: Path) -> Iterator[Check]:
    """A run with the default parts: the loss of the first step of each follows from the answers
    that it learns, and the training lowers the divergence."""
    recipe = catalogue.build("distillspec", layers=1)
    assert isinstance(recipe, DraftRecipe)
    yield Check(
        "the default build is that of the card",
        (recipe.beta, recipe.data, recipe.on_policy) == (0.5, "target", 1.0),
    )
    run, target = run_of(folder, recipe, steps=8, rate=3e-3), opened(TARGET)
    expected = dict[int, tuple[str, float]]()
    losses, ratios, divergences = list[float](), list[float](), list[float]()

    def observe(_: float, loss: float | None = None) -> None:
        if loss is not None:
            losses.append(loss)
        if run.step in (0, 4, 8):
            run.save()
            draft = opened(run.draft_folder)
            divergences.append(mean_loss(target, draft, run.pairs[:4]))
            if run.step < 8:
                rows, objective = run.step_rows()
                expected[run.step] = objective, mean_loss(target, draft, rows, objective)
                ratios.append(likelihood_ratio(target, draft, rows))

    observe(0.0)
    run.train(observe)
    about = {step: f"{name} {loss:.3f}" for step, (name, loss) in expected.items()}
    yield Check(
        "tokens are learned in the first half, the target's distributions in the second",
        [name for name, _ in expected.values()] == ["cross-entropy", "forward-kl"],
        str(about),
    )
    yield Check(
        "the answers are the target's in the first half, the draft model's own in the second",
        ratios[0] < 0 < ratios[1],
        " ".join(f"{ratio:.3f}" for ratio in ratios),
    )
    yield Check(
        "the loss of a step is that of its answers",
        all(math.isclose(losses[n], loss, rel_tol=0.05) for n, (_, loss) in expected.items()),
        f"{losses[0]:.3f} {losses[4]:.3f} {about}",
    )
    yield Check(
        "the training lowers the divergence in both parts",
        divergences[0] > divergences[1] > divergences[2],
        " ".join(f"{value:.3f}" for value in divergences),
    )


def of_jensen_shannon(folder: Path, pairs: list[Pair]) -> Iterator[Check]:
    """A step with a Jensen-Shannon divergence of another weight than the default."""
    recipe = catalogue.build(
        "distillspec", layers=1, warmup=0.0, divergence="jsd", beta=BETA, on_policy=0.0
    )
    assert isinstance(recipe, DraftRecipe)
    run, losses = run_of(folder, recipe, pairs, steps=1), list[float]()
    run.save()
    rows, objective = run.step_rows()
    draft = opened(run.draft_folder)
    expected = mean_loss(opened(TARGET), draft, rows, objective)
    run.train(lambda _, loss: losses.append(loss))
    yield Check(
        "the run's Jensen-Shannon divergence has the weight that is given",
        objective == "jsd" and math.isclose(losses[0], expected, rel_tol=1e-2),
        f"{losses[0]:.5f} {expected:.5f}",
    )


@oracle_test("distillspec")
def distilled() -> Iterator[Check]:
    """The losses, and a run on the draft model's own answers."""
    check_torch("the training")
    from anydecode.training.draft_model import draft_loss

    yield from losses()
    recipe = catalogue.build("distillspec", layers=2, warmup=0.0)
    assert isinstance(recipe, DraftRecipe)
    with tempfile.TemporaryDirectory() as name:
        run = run_of(Path(name) / "own", recipe, steps=8)
        before = run.measure()["temperature 0.0"]
        own, objective = run.step_rows()
        target, draft = opened(TARGET), opened(run.draft_folder)
        yield Check("the default divergence is forward KL", objective == "forward-kl")
        ratios = [likelihood_ratio(target, draft, pairs) for pairs in (own, run.pairs[:8])]
        yield Check(
            "the learned answers are the draft model's own, not the target's",
            ratios[1] < 0 < ratios[0],
            " ".join(f"{ratio:.3f}" for ratio in ratios),
        )
        pairs = [(prompt, answer[: 2 + 5 * (i % 2)]) for i, (prompt, answer) in enumerate(own)]
        loss = float(draft_loss(run.draft, run.target, pairs, objective).detach())
        expected = mean_loss(target, draft, pairs)
        yield Check(
            "the loss is the mean over answers of their means",
            math.isclose(loss, expected, rel_tol=1e-3),
            f"{loss:.5f} {expected:.5f}",
        )
        yield from sampled(run.draft_folder)
        run.train()
        yield Check("held-out prompts are decoded", 1 <= before["tokens_per_pass"] <= 6)
        prompts = [prompt for prompt, _ in run.pairs[:3]]
        yield drafted_text(run.draft_folder, prompts, max_tokens=16, temperature=0.8, seed=3)
        yield from of_default_parts(Path(name) / "default")
        yield from of_jensen_shannon(Path(name) / "jsd", run.pairs)
